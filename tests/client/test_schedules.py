"""Learning-rate schedules by hand, and through a run that is stopped and resumed."""

from __future__ import annotations

import pytest

from coterie.client.schedules import find_schedule, register_schedule
from coterie.client.work import SGD, Proximal
from coterie.errors import ConfigError, UnknownName
from coterie.methods.fedavg import FedAvg
from tests.helpers import setup_of


def rates(rounds, **fields):
    work = SGD(lr=0.8, **fields).for_run(rounds)
    return [work.at(round).lr for round in range(1, rounds + 1)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.8] * 5),
        ({"lr_decay": 0.5}, [0.8, 0.4, 0.2, 0.1, 0.05]),
        ({"schedule": "exponential", "lr_decay": 0.5}, [0.8, 0.4, 0.2, 0.1, 0.05]),
        ({"schedule": "step", "lr_decay": 0.5, "decay_every": 2}, [0.8, 0.8, 0.4, 0.4, 0.2]),
        ({"schedule": "cosine", "lr_floor": 0.5}, [0.8, 0.741421356, 0.6, 0.458578644, 0.4]),
        ({"warmup_rounds": 3}, [0.2, 0.4, 0.6, 0.8, 0.8]),
        ({"warmup_rounds": 1, "lr_decay": 0.5}, [0.4, 0.8, 0.4, 0.2, 0.1]),
        ({"warmup_rounds": 2, "schedule": "cosine", "lr_floor": 0.5}, [0.8 / 3, 1.6 / 3, 0.8, 0.6, 0.4]),
    ],
)
def test_rates_by_hand(fields, expected):
    assert rates(5, **fields) == pytest.approx(expected)


def test_the_start_and_rounds_after_the_last_one():
    work = SGD(lr=0.8, schedule="cosine", lr_floor=0.25).for_run(4)
    assert work.at(0) == work.at(1)
    assert work.at(9).lr == pytest.approx(0.2)
    assert SGD(lr=0.8, schedule="cosine").for_run(1).at(1).lr == 0.8


def test_the_work_of_a_round_has_no_schedule_left():
    work = Proximal(lr=0.8, prox=0.1, schedule="cosine", warmup_rounds=1, lr_decay=0.5).for_run(5)
    assert work.at(3) == Proximal(lr=work.at(3).lr, prox=0.1)
    assert work.at(3).at(3) == work.at(3)
    assert Proximal.of(work, 0.2).total_rounds == 5


def test_what_cannot_be():
    with pytest.raises(UnknownName, match=r"There is no schedule 'cosinus'\. Did you mean 'cosine'\?"):
        SGD(schedule="cosinus").for_run(5)
    with pytest.raises(ConfigError, match=r"^warmup_rounds of SGD must be fewer than the rounds of the run, 5\. Got 5"):
        SGD(warmup_rounds=5).for_run(5)
    with pytest.raises(ConfigError, match=r"cosine needs the number of rounds"):
        SGD(schedule="cosine").at(1)


def test_a_schedule_of_your_own(monkeypatch):
    monkeypatch.setattr("coterie.client.schedules._SCHEDULES", {})
    register_schedule("half")(lambda work, round, rounds: 0.5**round)
    assert find_schedule("half")
    assert rates(3, schedule="half") == [0.4, 0.2, 0.1]


def test_a_run_knows_its_rounds():
    work = setup_of(FedAvg(), work=SGD(schedule="cosine", lr=1.0)).task().work
    assert work.total_rounds == 3
    assert work.at(3).lr == pytest.approx(0.01)
