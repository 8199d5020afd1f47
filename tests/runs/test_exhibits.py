"""What a run leaves for its report beside its numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import coterie
from coterie.data.federation import Federation
from coterie.engines.base import Chunk
from coterie.errors import Interrupted, RunError
from coterie.methods.base import find_algorithm
from coterie.randomness import Rng
from coterie.runs.execution import execute
from coterie.runs.exhibits import MOST_MEMBERS, MOST_PICTURES, Sketches, fold, listening, member_pictures
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Schedule, Trainer
from tests.helpers import ragged_federation, setup_of, trainer_of


def run(name: str, root: Path, federation: Federation | None = None, **changes: Any) -> Path:
    cls = find_algorithm(name)
    algorithm = cls(**changes.pop("algorithm", {}))
    setup = setup_of(algorithm, federation, **changes)
    folder = RunFolder.create(root, None, name, setup.tables())
    execute(setup, folder)
    return folder.path


def arrays(path: Path, name: str) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(path / "artifacts" / f"{name}.npz", allow_pickle=False) as found:
        return {key: found[key] for key in found.files}


# ---- sketches ----


def test_the_sketch_of_a_client_is_that_of_the_model_it_sent_last():
    trainer = trainer_of(setup_of(find_algorithm("fedavg")(), schedule=Schedule(rounds=2)))
    sent: dict[int, torch.Tensor] = {}
    original = trainer.sketches.add

    def note(chunk: Chunk, round: int) -> None:
        sent.update(zip(chunk.clients.tolist(), chunk.answer.params, strict=True))
        original(chunk, round)

    trainer.sketches.add = note  # type: ignore[method-assign]
    trainer.run()
    size = trainer.engine.task.layout.num_parameters
    assert size < 128  # so few numbers that they are kept as they are
    assert sorted(sent) == list(range(9))
    for client, params in sent.items():
        np.testing.assert_array_equal(trainer.sketches.rows[client], params[:size].float().numpy())
    assert trainer.sketches.rounds.tolist() == [2] * 9


@pytest.mark.parametrize("size", [3, 128, 129, 2048, 2049, 5000])
def test_folding_adds_every_entry_once(size: int):
    rows, signs = torch.randn(4, size, dtype=torch.float64), torch.randn(size, dtype=torch.float64).sign()
    found = fold(rows, signs, 128)
    if size <= 128:
        assert torch.equal(found, rows)  # short enough as it is
        return
    expected = torch.zeros(4, 128, dtype=torch.float64)
    expected.index_add_(1, torch.arange(size) % 128, rows * signs)
    torch.testing.assert_close(found, expected)


def test_distances_of_sketches_are_right_within_a_tenth():
    models, signs = Rng.seed(0).normal(40, 20_000), Rng.seed(1).normal(20_000).sign()
    off = torch.pdist(fold(models, signs, 128)) / torch.pdist(models) - 1
    assert float(off.square().mean().sqrt()) < 0.1


def test_clients_that_were_never_asked_have_no_sketch(tmp_path: Path):
    path = run("fedavg", tmp_path, schedule=Schedule(rounds=1, participation=0.3))
    found = arrays(path, "sketches")
    assert sorted(found["round"].tolist()) == [0] * 6 + [1] * 3
    assert (found["sketch"][found["round"] == 0] == 0).all()
    assert (found["sketch"][found["round"] == 1] != 0).any(1).all()


@pytest.mark.parametrize("name", ["local", "fedfomo", "ifca", "fesem", "cfl", "robust_tkm"])
def test_methods_of_every_kind_leave_sketches(tmp_path: Path, name: str):
    found = arrays(run(name, tmp_path), "sketches")
    assert (found["round"] > 0).all()
    assert len(np.unique(found["sketch"], axis=0)) == 9  # no two clients have trained to the same model


def test_a_method_that_sends_no_models_leaves_no_sketches(tmp_path: Path):
    path = run("fedsgd", tmp_path)
    assert not (path / "artifacts" / "sketches.npz").exists()


def test_repairs_are_not_listened_to():
    trainer = trainer_of(setup_of(find_algorithm("fedavg")()))
    from coterie.client.steps import train

    heard = listening(trainer.engine, trainer.sketches)
    models, refs = trainer.engine.initial().unsqueeze(0), torch.zeros(2, dtype=torch.int64)
    for phase, expected in (("repair", 0), ("round", 2)):
        trainer.engine.begin(1, phase)  # type: ignore[arg-type]
        list(heard.call(train, torch.tensor([0, 1]), models=models, refs=refs, rng=Rng.seed(0)))
        assert int((trainer.sketches.rounds > 0).sum()) == expected
    assert heard.num_clients == 9


def test_clients_that_join_find_room():
    trainer = trainer_of(setup_of(find_algorithm("fedavg")()))
    sketches = Sketches(trainer.engine)
    params = trainer.engine.initial().repeat(1, 1)
    sketches._put(np.array([11]), params, 3)
    assert sketches.rows.shape[0] == 12
    assert sketches.rounds.tolist() == [0] * 11 + [3]


def test_a_resumed_run_has_the_same_exhibits(tmp_path: Path):
    schedule = Schedule(rounds=4, participation=0.4, checkpoint_every=0.0, keep_pictures=True)
    setup = setup_of(find_algorithm("fesem")(), schedule=schedule)
    whole = RunFolder.create(tmp_path, "whole", "whole", setup.tables())
    execute(setup, whole)
    cut = RunFolder.create(tmp_path, "cut", "cut", setup.tables())
    with pytest.raises(Interrupted):
        execute(setup, cut, None, lambda: len(cut.rows()) == 2)
    execute(setup, RunFolder.open(cut.path))
    for name in ("sketches", "members"):
        one, other = arrays(whole.path, name), arrays(cut.path, name)
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)


def no_zip(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 no zip")


def words(path: Path) -> None:
    with np.load(path) as found:
        rows, rounds = found["sketch"], found["round"]
    np.savez(path, sketch=rows, round=np.full(len(rounds), "", dtype="U1"))


@pytest.mark.parametrize("damage", [no_zip, words])
def test_a_damaged_sketch_file_does_not_stop_a_resume(damage, tmp_path: Path):
    setup = setup_of(find_algorithm("fesem")(), schedule=Schedule(rounds=3, checkpoint_every=0.0))
    folder = RunFolder.create(tmp_path, "cut", "cut", setup.tables())
    with pytest.raises(Interrupted):
        execute(setup, folder, None, lambda: len(folder.rows()) == 2)
    damage(folder.path / "artifacts" / "sketches.npz")
    execute(setup, RunFolder.open(folder.path))
    assert (arrays(folder.path, "sketches")["round"] == 3).all()


def test_a_row_without_its_round_is_named(tmp_path: Path):
    setup = setup_of(find_algorithm("fesem")(), schedule=Schedule(rounds=3, checkpoint_every=0.0))
    folder = RunFolder.create(tmp_path, "cut", "cut", setup.tables())
    with pytest.raises(Interrupted):
        execute(setup, folder, None, lambda: len(folder.rows()) == 2)
    rows = folder.path / "rounds.jsonl"
    rows.write_text(rows.read_text().replace('"round": 2', '"rouns": 2', 1))
    with pytest.raises(RunError, match="damaged in line 2: it has no round number"):
        execute(setup, RunFolder.open(folder.path))


# ---- pictures of members ----


def test_pictures_are_what_members_see():
    federation = ragged_federation()
    labels = np.array([0, 0, 1, 1, 1, 1, 1, -1, 0])
    found = member_pictures(federation, labels)
    assert found is not None
    low, high = float(federation.x.min()), float(federation.x.max())
    assert set(found["client"].tolist()) <= set(np.flatnonzero(labels >= 0).tolist())
    assert (labels[found["client"]] == found["cluster"]).all()
    for cluster in (0, 1):
        members = found["client"][found["cluster"] == cluster]
        assert len(np.unique(members)) == min(MOST_MEMBERS, int((labels == cluster).sum()))
        assert max(np.bincount(members)) <= MOST_PICTURES
    shown = found["picture"]
    assert shown.shape[1:] == (4, 4, 1)
    assert shown.dtype == np.uint8
    assert low < high
    first = int(found["client"][0])
    x, y = federation.samples(first)
    own = x * federation.std + federation.mean
    # Among the client's own samples there is one of that label that looks like the picture, up to black and white.
    alike = [
        float(np.corrcoef(sample.flatten().numpy(), shown[0].flatten())[0, 1])
        for sample, label in zip(own, y.tolist(), strict=True)
        if label == found["label"][0]
    ]
    assert max(alike) > 0.999


def test_tables_have_no_pictures_and_they_can_be_left_out(tmp_path: Path):
    flat = ragged_federation(shape=(6,))
    assert member_pictures(flat, np.zeros(9, dtype=np.int64)) is None
    path = run("fesem", tmp_path, schedule=Schedule(rounds=1, keep_pictures=False))
    assert (path / "artifacts" / "sketches.npz").exists()
    assert not (path / "artifacts" / "members.npz").exists()


def test_from_python_pictures_are_kept_on_request_only(tmp_path: Path):
    for asked, kept in (({}, False), ({"keep_pictures": True}, True), ({"keep_pictures": False}, False)):
        result = coterie.run("fesem", ragged_federation(), rounds=1, out=tmp_path, **asked)
        assert result.path is not None
        assert (result.path / "artifacts" / "members.npz").exists() is kept


# ---- while the run goes on ----


def test_a_look_at_a_running_run_is_given_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = sys.modules[Trainer.__module__]  # `coterie.runs.loop` is also the name of a client step
    monkeypatch.setattr(module, "_SHOW_EVERY", 0.0)
    monkeypatch.setattr(module, "_SHOW_SHARE", 0)
    setup = setup_of(find_algorithm("fesem")(), schedule=Schedule(rounds=3, checkpoint_every=1000.0))
    folder = RunFolder.create(tmp_path, "live", "live", setup.tables())
    looks: list[tuple[int, bool, bool]] = []

    def look(row: dict[str, Any]) -> None:
        labels = np.load(folder.path / "labels.npy") if (folder.path / "labels.npy").exists() else []
        looks.append((len(labels), folder.is_held(), (folder.path / "checkpoint").exists()))

    execute(setup, folder, look)
    # The start and each round so far; the last round is shown with the checkpoint, after it.
    assert looks == [(2, True, False), (3, True, False), (3, True, False)]
    assert not folder.is_held()
    assert len(np.load(folder.path / "labels.npy")) == 4


def test_rows_have_the_spread_over_clients(tmp_path: Path):
    path = run("fesem", tmp_path, schedule=Schedule(rounds=2))
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    with np.load(path / "clients.npz", allow_pickle=False) as clients:
        scores = {name: clients[name] for name in ("accuracy", "f1", "loss")}
    for name, values in scores.items():
        for i, row in enumerate(rows):
            assert row["spread"][name] == np.quantile(values[i], (0.1, 0.25, 0.5, 0.75, 0.9)).tolist()


# ---- what MD-ICFL shows ----


def test_md_icfl_shows_pseudo_samples_and_what_is_said_of_them(tmp_path: Path):
    settings = {"num_clusters": 2, "pseudo_samples": 4, "iterations": 60, "witness_rounds": 3}
    path = run("md_icfl", tmp_path, algorithm=settings)
    found = arrays(path, "method")
    assert found["pseudo"].shape == (2, 3, 3, 4, 4, 1)
    assert found["told"].shape == (2, 2, 3, 3)
    assert found["witness"].shape == (2, 3, 3)
    np.testing.assert_allclose(found["told"].sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(found["witness"].sum(-1), 1, atol=1e-5)
    for k in range(2):  # the search has made a center call its own samples what they are meant to be
        assert found["told"][k, k].argmax(-1).tolist() == [0, 1, 2]
        assert np.diagonal(found["told"][k, k]).mean() > 0.8
    summary = json.loads((path / "summary.json").read_text())
    assert summary["bytes"]["by_step"]["evaluate/train_only"]["up"] > 0  # witnesses are counted apart
    assert summary["bytes"]["up"] == summary["bytes"]["by_step"]["round/train_and_count"]["up"]


def test_without_witnesses_there_are_none_and_other_methods_show_nothing(tmp_path: Path):
    path = run("md_icfl", tmp_path, algorithm={"num_clusters": 2, "pseudo_samples": 2, "iterations": 5})
    assert arrays(path, "method").keys() == {"told", "pseudo"}
    assert not (run("fesem", tmp_path) / "artifacts" / "method.npz").exists()


def test_a_run_killed_before_its_last_sketches_writes_them_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    setup = setup_of(find_algorithm("fedavg")(), schedule=Schedule(rounds=3, checkpoint_every=0.0))
    whole = run("fedavg", tmp_path / "whole", schedule=setup.schedule)
    folder = RunFolder.create(tmp_path, "killed", "", setup.tables())
    write, count = RunFolder.write_arrays, [0]

    def killed(self: RunFolder, name: str, arrays: Any) -> None:
        count[0] += name == "artifacts/sketches.npz"
        if count[0] == 3:
            raise KeyboardInterrupt
        write(self, name, arrays)

    monkeypatch.setattr(RunFolder, "write_arrays", killed)
    with pytest.raises(KeyboardInterrupt):
        execute(setup, folder)
    monkeypatch.undo()
    execute(setup, RunFolder.open(folder.path))
    for name, array in arrays(whole, "sketches").items():
        np.testing.assert_array_equal(arrays(folder.path, "sketches")[name], array)
