"""Bytes: each distinct model once per client and round, single numbers apart, phases apart."""

from __future__ import annotations

import pytest
import torch

from coterie.engines.ledger import Ledger, fingerprints

P = 6  # entries of a model: 24 bytes in float32


def table(*rows, dtype=torch.float32):
    return torch.stack([torch.full((P,), float(row)) for row in rows]).to(dtype)


def send(ledger, models, refs, clients=None, phase="round", step="m:train", population=10, shared=None, each=None):
    refs = None if refs is None else torch.tensor(refs)
    clients = torch.arange(len(refs)) if clients is None else torch.tensor(clients)
    if models is not None:
        ledger.record_models(phase, step, clients, population, models, refs)
    ledger.record_payload(phase, step, len(clients), shared or {}, each or {})


def down(ledger, name="round/train"):
    return ledger.entries[name]["down"]


# ---- fingerprints ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rows_have_equal_fingerprints_and_others_do_not(dtype):
    torch.manual_seed(0)
    rows = torch.randn(50, 33, dtype=dtype)
    found = fingerprints(torch.cat([rows, rows.flip(0)]))
    assert found[:50] == found[:49:-1]
    assert len(set(found)) == 50
    assert fingerprints(rows.t().contiguous().t()) == found[:50]  # by content, not by storage


def test_the_smallest_change_and_the_order_of_entries_tell():
    row = torch.arange(1.0, 9.0)
    changed, swapped = row.clone(), row.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(100.0))
    swapped[[0, 1]] = swapped[[1, 0]]
    assert len(set(fingerprints(torch.stack([row, changed, swapped])))) == 3


# ---- down ----


def test_one_model_each():
    ledger = Ledger()
    send(ledger, table(1, 2), [0, 1, 0])
    assert ledger.entries == {
        "round/train": {"down": 3 * 24, "up": 0, "scalars": 0, "messages": 3, "gradients": 0, "largest_call": 3}
    }


def test_several_models_each():
    ledger = Ledger()
    send(ledger, table(1, 2, 3, dtype=torch.float64), [[0, 1, 2], [0, 1, 2]])
    assert down(ledger) == 2 * 3 * 48


def test_a_model_counts_once_for_a_client_in_a_round():
    ledger = Ledger()
    send(ledger, table(1), [0, 0])
    send(ledger, table(1), [0, 0])
    assert down(ledger) == 2 * 24
    assert ledger.entries["round/train"]["messages"] == 4
    send(ledger, table(1), [0], clients=[2])  # another client
    assert down(ledger) == 3 * 24
    ledger.begin_round()
    send(ledger, table(1), [0, 0])
    assert down(ledger) == 5 * 24


def test_models_are_told_apart_by_content_not_by_row_or_table():
    ledger = Ledger()
    send(ledger, table(7, 7), [[0, 1], [0, 1]])
    assert down(ledger) == 2 * 24
    send(ledger, table(5, 7), [1, 0])  # the first client has 7, the second gets 5
    assert down(ledger) == 3 * 24


def test_a_model_known_from_another_step_is_not_sent_again():
    ledger = Ledger()
    send(ledger, table(1), [0, 0], step="a:losses")
    send(ledger, table(1), [0, 0], step="b:train")
    assert down(ledger, "round/losses") == 2 * 24
    assert down(ledger, "round/train") == 0


def test_phases_are_kept_apart():
    ledger = Ledger()
    for phase in ("start", "round", "evaluate"):
        send(ledger, table(1), [0, 0], phase=phase)
    assert [down(ledger, f"{p}/train") for p in ("start", "round", "evaluate")] == [48, 48, 48]


def test_clients_may_join_within_a_round():
    ledger = Ledger()
    send(ledger, table(1), [0, 0], clients=[0, 1], population=2)
    send(ledger, table(1), [0, 0], clients=[1, 4], population=5)
    assert down(ledger) == 3 * 24


def test_no_model_is_no_bytes():
    ledger = Ledger()
    send(ledger, None, None, clients=[0, 1])
    assert ledger.entries["round/train"] == {"down": 0, "up": 0, "scalars": 0, "messages": 2, "gradients": 0}


def test_payload_for_all_and_for_each():
    ledger = Ledger()
    send(
        ledger,
        None,
        None,
        clients=[0, 1, 2],
        shared={"gradient": torch.zeros(5), "rate": torch.tensor(0.5, dtype=torch.float64)},
        each={"distances": torch.zeros(3, 4), "strength": torch.zeros(3)},
    )
    entry = ledger.entries["round/train"]
    assert entry["down"] == 3 * 5 * 4 + 3 * 4 * 4
    assert entry["scalars"] == 3 * 8 + 3 * 4


# ---- up and totals ----


def test_answers_in_chunks():
    ledger = Ledger()
    ledger.record_up("round", "m:train", [torch.zeros(2, P), torch.zeros(2, dtype=torch.int64)])
    ledger.record_up("round", "m:train", [torch.zeros(1, P), torch.zeros(1, dtype=torch.int64)])
    assert ledger.entries["round/train"] == {"down": 0, "up": 3 * 24, "scalars": 3 * 8, "messages": 0, "gradients": 0}


def test_totals_are_those_of_rounds_with_start_and_evaluation_apart():
    ledger = Ledger()
    send(ledger, table(1), [0, 0], phase="start", step="m:look")
    for _ in range(2):
        ledger.begin_round()
        send(ledger, table(1), [0, 0])
        ledger.record_up("round", "m:train", [torch.zeros(2, P), torch.zeros(2)])
        send(ledger, table(2), [0, 0], phase="evaluate", step="m:evaluate")
        ledger.record_up("evaluate", "m:evaluate", [torch.zeros(2)])
    assert ledger.totals() == {
        "down": 96,
        "up": 96,
        "scalars": 16,
        "start": {"down": 48, "up": 0, "scalars": 0},
        "repair": {"down": 0, "up": 0, "scalars": 0},
        "evaluate": {"down": 96, "up": 0, "scalars": 16},
        "gradients": {"start": 0, "round": 0, "repair": 0, "evaluate": 0},
        "by_step": {
            "evaluate/evaluate": {"down": 96, "up": 0, "scalars": 16, "messages": 4, "gradients": 0, "largest_call": 2},
            "round/train": {"down": 96, "up": 96, "scalars": 16, "messages": 4, "gradients": 0, "largest_call": 2},
            "start/look": {"down": 48, "up": 0, "scalars": 0, "messages": 2, "gradients": 0, "largest_call": 2},
        },
    }


def test_totals_are_a_copy():
    ledger = Ledger()
    send(ledger, table(1), [0])
    ledger.totals()["by_step"]["round/train"]["down"] = 0
    assert down(ledger) == 24


def test_an_empty_ledger():
    nothing = {"down": 0, "up": 0, "scalars": 0}
    assert Ledger().totals() == {
        **nothing,
        "start": nothing,
        "repair": nothing,
        "evaluate": nothing,
        "gradients": {"start": 0, "round": 0, "repair": 0, "evaluate": 0},
        "by_step": {},
    }


@pytest.mark.parametrize("clusters", [1, 2, 5])
def test_k_models_down_and_one_up_cost_one_plus_k_halves_of_one_each_way(clusters):
    def total(models, refs):
        ledger = Ledger()
        for number in range(3):
            ledger.begin_round()
            send(ledger, models + number, refs)
            ledger.record_up("round", "m:train", [torch.zeros(4, P)])
        return ledger.totals()["down"] + ledger.totals()["up"]

    one = total(table(1), [0] * 4)
    many = total(table(*range(clusters)) * 10, [list(range(clusters))] * 4)
    assert many / one == (1 + clusters) / 2


def test_work_of_clients_is_counted_by_phase():
    ledger = Ledger()
    ledger.record_work("start", "m:train", 30)
    ledger.record_work("round", "m:train", 10)
    ledger.record_work("round", "m:other", 5)
    assert ledger.totals()["gradients"] == {"start": 30, "round": 15, "repair": 0, "evaluate": 0}
