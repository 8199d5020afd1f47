"""Flower's simulation (Ray): every method equals the loop engine. `make test-flower`."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("ray", reason="needs pip install 'coterie[flower]'")

from coterie.methods.base import algorithms, find_algorithm
from coterie.runs.execution import execute
from coterie.runs.experiment import merge, resolve
from tests.helpers import ragged_federation, setup_of

pytestmark = pytest.mark.flower


def digits(name, engine):
    """A method on some clients of rotated digits."""
    head = {"algorithm": name, "dataset": "rotated-digits", "clients": 8, "rounds": 2, "engine": engine}
    return resolve(merge({"run": head, "engine": {"precision": "float64"}, "work": {"epochs": 2}})).loaded()


@pytest.mark.parametrize("name", algorithms())
@pytest.mark.filterwarnings("ignore")  # of Ray and Flower
def test_every_method_gives_what_the_loop_gives(name):
    ours, theirs = execute(digits(name, "flower")), execute(digits(name, "loop"))
    assert np.array_equal(ours.labels.numpy(), theirs.labels.numpy())
    for key in ("accuracy", "loss", "f1", "ari"):
        assert ours.summary[key] == pytest.approx(theirs.summary[key], rel=1e-6)
    for key in ("down", "up", "start", "repair", "scalars", "gradients"):
        assert ours.summary["bytes"][key] == theirs.summary["bytes"][key]
    assert ours.summary["failures"] == 0


@pytest.mark.filterwarnings("ignore")
def test_rotated_digits_from_the_command_line(tmp_path, capsys):
    from coterie.cli.main import main

    found = {}
    for engine in ("loop", "flower"):
        command = [
            "run",
            "--rounds",
            "2",
            "--clients",
            "8",
            "--engine",
            engine,
            "--json",
            "--out",
            str(tmp_path / engine),
        ]
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code in (0, None)
        found[engine] = json.loads(capsys.readouterr().out)
    assert found["loop"]["accuracy"] == found["flower"]["accuracy"]
    assert found["loop"]["ari"] == found["flower"]["ari"]


@pytest.mark.filterwarnings("ignore")
def test_a_stopped_simulation_resumes(tmp_path):
    """`local`: client memory is restored from the checkpoint, because the simulation's disk is gone."""
    from coterie.errors import Interrupted
    from coterie.runs.folder import RunFolder
    from coterie.runs.loop import Schedule

    setup = setup_of(
        find_algorithm("local")(), ragged_federation(clients=4), engine="flower", schedule=Schedule(rounds=3)
    )
    folder = RunFolder.create(tmp_path, "run", "run", setup.tables())
    calls = iter([True])
    with pytest.raises(Interrupted):
        execute(setup, folder, should_stop=lambda: next(calls, False))
    again = execute(setup, RunFolder.open(folder.path))
    whole = execute(setup_of(find_algorithm("local")(), ragged_federation(clients=4), engine="loop"))
    assert again.summary["loss"] == pytest.approx(whole.summary["loss"], rel=1e-9)
    assert [row["round"] for row in again.rows] == [1, 2, 3]
