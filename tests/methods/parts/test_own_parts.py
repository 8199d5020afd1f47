"""Own parts: a method declares what stays with the clients, and nothing else of a model stays there or travels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from coterie.engines import make_engine
from coterie.errors import ConfigError
from coterie.methods.base import Algorithm, PartOf, find_algorithm
from coterie.methods.parts.own_parts import OwnParts, head_of, named
from coterie.runs.execution import execute
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule, Trainer
from tests.helpers import setup_of


def network(input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """16 * 5 + 5 entries of a first layer, 2 * 5 and 2 * 5 of a norm, 5 * 3 + 3 of a head."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, outputs))


FIRST, NORM, HEAD = 16 * 5 + 5, 4 * 5, 5 * 3 + 3
ALL = FIRST + NORM + HEAD


@dataclass(frozen=True)
class OwnFirstLayer(OwnParts):
    """A user's own: nothing but the declaration."""

    key: ClassVar[str] = "own-first-layer"
    keeps: ClassVar[PartOf] = named("1.*")


SENT = {"fedavg": ALL, "fedper": ALL - HEAD, "fedrep": ALL - HEAD, "fedbn": ALL - NORM, "own": ALL - FIRST}


def method(name: str) -> Algorithm:
    return OwnFirstLayer() if name == "own" else find_algorithm(name)()


@pytest.mark.parametrize("name", SENT)
def test_ledger_and_checkpoint_have_only_what_travels(name: str, tmp_path: Path):
    what = setup_of(method(name), model=network, model_settings={}, schedule=Schedule(rounds=2))
    clients, size = len(what.federation()), SENT[name]
    folder = RunFolder.create(tmp_path, "a", "a", what.tables())
    result = execute(what, folder)
    totals = result.summary["bytes"]
    every_round = 2 * clients * size * 8  # float64
    assert (totals["down"], totals["up"], totals["evaluate"]["down"]) == (every_round, every_round, every_round)
    checkpoint, _ = folder.load_checkpoint()
    assert checkpoint is not None
    found = {key: tensor.shape for key, tensor in checkpoint.tensors.items() if not key.startswith("history.")}
    assert (found["state.common"], found["state.centers"]) == ((size,), (1, size))
    assert found.get("memory.value.part", (clients, 0)) == (clients, ALL - size)
    assert result.centers.shape == (1, ALL)
    assert set(result.cluster_state_dict(0)) == set(network((1, 4, 4), 3).state_dict())


@pytest.mark.parametrize("name", ["fedper", "fedbn", "own"])
def test_messages_have_only_what_travels(name: str, tmp_path: Path):
    pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")
    from tests.flower.fakes import engine_over

    what = setup_of(method(name), model=network, model_settings={})
    engine, grid = engine_over(tmp_path, what.task(), what.federation())
    over = Trainer(what.algorithm, engine, what.federation(), Schedule(rounds=2))
    over.run()
    models = [
        record.to_numpy_ndarrays()[0].size
        for message in grid.sent
        for key, record in message.content.array_records.items()
        if "model" in key
    ]
    assert set(models) == {SENT[name]}
    loop = make_engine("loop", what.task(), what.federation(), "cpu", {"precision": "float64"})
    alone = Trainer(what.algorithm, loop, what.federation(), Schedule(rounds=2))
    alone.run()
    torch.testing.assert_close(over.state.centers, alone.state.centers)
    ours, theirs = ([row["loss"]["macro"] for row in trainer.progress.rows] for trainer in (over, alone))
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize("name", ["fedper", "own"])
def test_all_engines_agree_and_a_resumed_run_ends_as_one(name: str, tmp_path: Path):
    what = setup_of(method(name), model=network, model_settings={}, schedule=Schedule(rounds=3, checkpoint_every=0.0))
    whole = execute(what)
    loop = execute(replace(what, engine="loop"))
    torch.testing.assert_close(loop.centers, whole.centers)
    folder = RunFolder.create(tmp_path, "a", "a", what.tables())
    with pytest.raises(Exception, match="Stopped after round 2"):
        execute(what, folder, should_stop=lambda: len(folder.rows()) == 2)
    assert torch.equal(execute(what, RunFolder.open(folder.path)).centers, whole.centers)


def test_checkpoints_of_earlier_versions_hold_whole_models(tmp_path: Path):
    what = setup_of(find_algorithm("fedper")(), schedule=Schedule(rounds=2))
    folder = RunFolder.create(tmp_path, "a", "a", what.tables())
    result = execute(what, folder)
    trainer = result._trainer
    checkpoint, _ = folder.load_checkpoint()
    assert checkpoint is not None
    task = trainer.engine.task
    kept = checkpoint.tensors
    older = kept | {
        "state.centers": trainer.algorithm.whole(task, kept["state.centers"]),
        "state.common": trainer.algorithm.whole(task, kept["state.common"].unsqueeze(0))[0],
    }
    before = trainer.state
    trainer.load(replace(checkpoint, tensors=older))
    assert torch.equal(trainer.state.centers, before.centers)
    assert torch.equal(trainer.state.common, before.common)


def test_a_part_by_name():
    task = setup_of(find_algorithm("fedavg")(), model=network, model_settings={}).task()
    assert torch.equal(named("4.*")(task), head_of(task))
    assert int(named("2.*")(task).sum()) == NORM
    assert int(named("1.weight", "4.bias")(task).sum()) == 16 * 5 + 3
    with pytest.raises(ConfigError, match=r"No parameter is named head\.\*\. The network has 1\.weight, 1\.bias, "):
        named("head.*")(task)
