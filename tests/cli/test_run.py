"""`coterie run`, `resume`, `show`: the run folder, every refusal, and going on after anything."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from coterie.runs.folder import RunFolder

from .conftest import TINY, Command

FILES = {
    *("config.toml", "environment.json", "rounds.jsonl", "clients.npz", "labels.npy", "summary.json"),
    *("checkpoint", "artifacts", ".lock"),
}


def outcome(path: Path) -> dict[str, Any]:
    """Centers, labels, scores and rows of a finished run, bit for bit, but for the seconds."""
    last = sorted((path / "checkpoint").glob("round-*"))[-1]
    tensors = safetensors.torch.load_file(last / "tensors.safetensors")
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((path / "summary.json").read_text())
    assert "state.centers" in tensors
    return {
        "tensors": {name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
        "labels": np.load(path / "labels.npy", allow_pickle=False).tolist(),
        "rows": [{k: v for k, v in row.items() if k != "seconds"} for row in rows],
        "summary": {k: v for k, v in summary.items() if k not in ("seconds", "path", "notes")},
    }


def no_run_was_made() -> bool:
    return not list(Path().glob("runs/*"))


# ---- the run folder ----


def test_a_run_leaves_a_folder_with_everything(command: Command):
    done = command("run", "-a", "fesem", *TINY, "--clusters", 4, "--name", "a", "--seed", 5)
    assert done.code == 0
    path = Path("runs/a")
    assert {p.name for p in path.iterdir()} == FILES
    config = tomllib.loads((path / "config.toml").read_text())
    assert config["schema"] == 1
    assert config["run"].items() >= {"algorithm": "fesem", "clients": 8, "rounds": 2, "seed": 5}.items()
    assert config["work"].items() >= {"epochs": 1, "lr": 0.2, "batch_size": 20}.items()  # the dataset's own
    assert config["algorithm"]["num_clusters"] == 4
    assert len((path / "rounds.jsonl").read_text().splitlines()) == 2
    assert np.load(path / "labels.npy", allow_pickle=False).shape == (3, 8)
    with np.load(path / "clients.npz", allow_pickle=False) as arrays:
        assert set(arrays.files) >= {"name", "group", "train_samples", "round", "samples", "accuracy", "f1", "loss"}
        assert arrays["accuracy"].shape == (2, 8)
    assert json.loads((path / "artifacts" / "failures.json").read_text()) == []
    assert json.loads((path / "environment.json").read_text())["command"]
    assert not list(path.rglob("*.tmp"))


def test_every_key_of_the_summary(command: Command):
    done = command("run", "-a", "fesem", *TINY, "--json", "--seed", 2)
    summary = done.json
    assert done.err == ""
    assert json.loads(Path(summary["path"], "summary.json").read_text()) == summary
    assert summary.keys() >= {
        *("algorithm", "dataset", "model", "seed", "rounds", "clients", "clients_met", "clusters", "accuracy", "f1"),
        *("ari", "nmi", "purity", "cluster_sizes", "repairs", "failures", "bytes", "seconds", "engine", "device"),
        "digest",
    }
    assert summary["accuracy"].keys() == {"micro", "macro", "bottom5", "worst_decile", "best5"}
    assert summary["f1"].keys() == {"micro", "macro"}
    assert summary["bytes"].keys() >= {"down", "up", "by_step"}
    assert summary["seconds"].keys() >= {"total", "train", "server", "evaluate"}
    words = {key: summary[key] for key in ("algorithm", "dataset", "model", "engine", "device")}
    assert words == {
        "algorithm": "fesem",
        "dataset": "rotated-digits",
        "model": "mlp",
        "engine": "vectorized",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    numbers = {key: summary[key] for key in ("seed", "rounds", "clients", "clients_met", "clusters", "failures")}
    assert numbers == {"seed": 2, "rounds": 2, "clients": 8, "clients_met": 8, "clusters": 4, "failures": 0}
    assert summary["ari"] == summary["nmi"] == summary["purity"] == 1.0
    assert summary["cluster_sizes"] == [2, 2, 2, 2]
    assert summary["repairs"] == []
    scores = [*summary["accuracy"].values(), *summary["f1"].values()]
    assert all(0.5 < score <= 1 for score in scores)
    assert summary["accuracy"]["worst_decile"] <= summary["accuracy"]["bottom5"] <= summary["accuracy"]["macro"]
    model = 4 * (64 * 64 + 64 + 64 * 10 + 10)  # bytes of mlp with 64 hidden
    assert summary["bytes"]["down"] == summary["bytes"]["up"] == 2 * 8 * model
    assert re.fullmatch("[0-9a-f]{32}", summary["digest"])


def test_clip_and_noise_are_recorded_and_shown(command: Command):
    done = command("run", "-a", "fedavg", *TINY, "--json", "--update-clip", 1, "--update-noise", 0.5)
    told = done.json["privacy"]
    assert (told["clip"], told["noise"], told["participation"], told["rounds"], told["releases"]) == (1, 0.5, 1, 2, 2)
    shown = command("show", done.json["path"]).out
    assert "a client sent up to 2 noised vectors" in shown
    assert "epsilon" in shown
    assert "not covered, sent without noise: samples, scores" in shown


def test_agreement_is_null_where_there_are_no_true_groups(command: Command):
    summary = command("run", "--dataset", "digits", *TINY, "--clusters", 2, "--json").json
    assert [summary[key] for key in ("ari", "nmi", "purity")] == [None, None, None]


def test_for_people_the_result_is_on_stdout_and_the_rest_on_stderr(command: Command):
    done = command("run", "-a", "fesem", *TINY, "--name", "a")
    assert "fesem on rotated-digits" in done.out
    assert "runs/a" in done.out
    first, *rounds = done.err.splitlines()
    # The defaults that the dataset brought are shown.
    assert first.startswith("fesem on rotated-digits · 8 clients · model mlp(hidden=64) · lr 0.2, 1 epoch, batch 20")
    assert [line.split("  ")[0] for line in rounds] == ["fesem: round 1/2", "fesem: round 2/2"]


def test_quiet_shows_the_result_only(command: Command):
    done = command("run", *TINY, "--quiet")
    assert done.err == ""
    assert "accuracy" in done.out


def test_default_names_never_collide(command: Command):
    paths = [command("run", *TINY, "--rounds", 1, "-a", "fedavg", "--json").json["path"] for _ in range(2)]
    assert paths == ["runs/rotated-digits-fedavg-s0", "runs/rotated-digits-fedavg-s0-2"]


def test_equal_commands_give_equal_runs(command: Command):
    for name in ("a", "b"):
        command("run", *TINY, "--name", name, "--quiet")
    assert outcome(Path("runs/a")) == outcome(Path("runs/b"))


def test_the_default_method_is_coterie(command: Command):
    found = command("run", *TINY, "--json").json
    assert (found["algorithm"], found["path"]) == ("coterie", "runs/rotated-digits-coterie-s0")


# ---- settings ----


def settings(command: Command, *arguments: object) -> dict[str, Any]:
    done = command("run", *TINY, "--rounds", 1, "--model", "mclr", "--name", "a", "--quiet", *arguments)
    assert done.code == 0, done.err
    return tomllib.loads(Path("runs/a/config.toml").read_text())


def test_every_flag_arrives(command: Command):
    found = settings(
        command,
        *("--algorithm", "ifca", "--dataset", "digits", "--clusters", 2, "--steps", 3, "--batch-size", 7),
        *("--lr", 0.25, "--momentum", 0.5, "--participation", 0.5, "--seed", 9, "--engine", "loop"),
        *("--device", "cpu", "--evaluate-every", 2, "--checkpoint-every", 5, "--scenario", "iid"),
        *("--unseen", 0.25, "--dropout", 0.1, "--attack", "gaussian", "--attackers", 0.25, "--corrupt", 0.05),
    )
    assert found["run"] == dict(  # noqa: C408
        algorithm="ifca",
        dataset="digits",
        scenario="iid",
        model="mclr",
        clients=8,
        loss="cross_entropy",
        engine="loop",
        device="cpu",
        rounds=1,
        participation=0.5,
        seed=9,
        evaluate_every=2,
        checkpoint_every=5.0,
        unseen=0.25,
        dropout=0.1,
        attack="gaussian",
        attackers=0.25,
        corrupt=0.05,
        keep_pictures=True,
        keep_models=64,
    )
    assert found["algorithm"]["num_clusters"] == 2
    assert found["work"].items() >= {"steps": 3, "batch_size": 7, "lr": 0.25, "momentum": 0.5}.items()


def test_batch_size_full_takes_all_samples_in_one_step(command: Command):
    assert settings(command, "--batch-size", "full")["work"]["batch_size"] == "full"
    whole = outcome(Path("runs/a"))
    command("run", *TINY, "--rounds", 1, "--model", "mclr", "--name", "b", "--batch-size", 100_000, "--quiet")
    command("run", *TINY, "--rounds", 1, "--model", "mclr", "--name", "c", "--batch-size", 20, "--quiet")
    loss, large, small = (found["rows"][0]["loss"]["macro"] for found in (whole, *map(outcome, OTHERS)))
    assert loss == pytest.approx(large, rel=1e-5)
    assert loss != pytest.approx(small, rel=1e-2)


OTHERS = (Path("runs/b"), Path("runs/c"))


def test_set_reaches_every_table(command: Command):
    found = settings(
        command,
        *(
            "-a",
            "fesem",
            "--set",
            "algorithm.prox=0.1",
            "--set",
            "work.weight_decay=1e-4",
            "--set",
            "scenario.groups=2",
        ),
        *("--set", "engine.precision=float64", "--set", "run.participation=0.5", "--clusters", 2),
    )
    assert found["algorithm"]["prox"] == 0.1
    assert found["work"]["weight_decay"] == 1e-4
    assert found["scenario"]["groups"] == 2
    assert found["engine"] == {"precision": "float64"}
    assert found["run"]["participation"] == 0.5


def test_flags_override_the_file_and_set_overrides_flags(command: Command):
    Path("e.toml").write_text(
        '[run]\nalgorithm = "ifca"\nseed = 1\nrounds = 9\n'
        "[work]\nlr = 0.5\nmomentum = 0.5\n[algorithm]\nnum_clusters = 3\n"
    )
    found = settings(command, "--config", "e.toml", "--lr", 0.25, "--seed", 3, "--set", "work.lr=0.125")
    assert found["run"].items() >= {"algorithm": "ifca", "seed": 3, "rounds": 1}.items()
    assert found["work"].items() >= {"lr": 0.125, "momentum": 0.5}.items()
    assert found["algorithm"]["num_clusters"] == 3


def test_the_settings_of_a_run_are_a_config_file(command: Command):
    command("run", *TINY, "--name", "a", "--seed", 4, "--quiet")
    command("run", "--config", "runs/a/config.toml", "--name", "b", "--quiet")
    assert outcome(Path("runs/a")) == outcome(Path("runs/b"))


def test_clusters_without_use_are_a_note(command: Command):
    done = command("run", *TINY, "-a", "fedavg", "-k", 3)
    assert done.code == 0
    assert "note: fedavg has no clusters; --clusters is ignored" in done.err


def test_a_network_of_ones_own(command: Command):
    Path("own_network_ok.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    assert command("run", *TINY, "--model", "own_network_ok:build", "--json").json["model"] == "own_network_ok:build"


def test_a_step_size_far_too_large_is_told_and_still_json(command: Command):
    summary = command("run", *TINY, "-a", "fedavg", "--lr", 1e30, "--json").json
    assert summary["failures"] > 0
    assert "is lr too large?" in " ".join(summary["notes"])


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["--algorithm", "fesm"], "fesem"),
        (["--dataset", "rotated-digit"], "rotated-digits"),
        (["--model", "mlpp"], "mlp"),
        (["--engine", "lop"], "loop"),
        (["--scenario", "rotate"], "rotated"),
        (["--set", "algorithm.proxx=1"], "prox"),
        (["--set", "algoritm.prox=1"], "algorithm"),
        (["--set", "run.round=3"], "rounds"),
        (["--set", "work.batchsize=3"], "batch_size"),
        (["--set", "model.hiden=3"], "hidden"),
        (["--set", "scenario.group=3"], "groups"),
        (["--set", "engine.chnk=3"], "chunk"),
        (["--set", "run.loss=crossentropy"], "cross_entropy"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "compare"])
def test_unknown_names_are_refused_with_the_nearest(command: Command, verb: str, arguments: list[str], nearest: str):
    assert f"Did you mean '{nearest}'?" in command(verb, "-a", "fesem", *TINY, *arguments).error
    assert no_run_was_made()


@pytest.mark.parametrize(
    "flag",
    [
        *("--clients", "--clusters", "--rounds", "--epochs", "--steps", "--batch-size", "--lr", "--participation"),
        *("--evaluate-every", "--momentum", "--seed", "--checkpoint-every"),
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf", "many", "", "1e999"])
def test_impossible_numbers_are_refused_with_what_was_typed(command: Command, flag: str, value: str):
    if value == "0" and flag in ("--momentum", "--seed", "--checkpoint-every"):
        return  # which is a fine value there
    said = command("run", *TINY, f"{flag}={value}", "--quiet").error
    assert re.search(rf"Got '?{re.escape(value)}(\.0)?'? instead\.$", said), said
    assert flag.strip("-").split("-")[-1].split("_")[-1] in said
    assert no_run_was_made()


@pytest.mark.parametrize(("flag", "value"), [("--participation", "1.5"), ("--momentum", "1"), ("--rounds", "2.5")])
def test_numbers_that_are_too_large_or_not_whole_are_refused(command: Command, flag: str, value: str):
    assert f"{value.removesuffix('.0')}" in command("run", *TINY, flag, value).error
    assert no_run_was_made()


@pytest.mark.parametrize("algorithm", ["fesem", "ifca"])
def test_more_clusters_than_clients(command: Command, algorithm: str):
    said = command("run", *TINY, "-a", algorithm, "--clusters", 9).error
    assert "must be at most the number of clients, 8. Got 9 instead." in said
    assert no_run_was_made()


@pytest.mark.parametrize("text", ["prox", "prox=1", "algorithm.prox", "algorithm.=1", "=1", ""])
def test_set_in_a_wrong_form(command: Command, text: str):
    said = command("run", *TINY, "--set", text).error
    assert said == f"--set takes TABLE.FIELD=VALUE, such as algorithm.prox=0.1. Got '{text}' instead."
    assert no_run_was_made()


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("algorithm.distance=far", "distance of FeSEM must be 'l2' or 'cosine'. Got 'far' instead."),
        ("algorithm.prox=nan", "Got nan instead."),
        ("algorithm.prox=", "Got '' instead."),
        ("model.hidden=0", "hidden of the model must be an int >= 1. Got 0 instead."),
        ("engine.chunk=0", "Got 0 instead."),
        ("engine.precision=float16", "Got 'float16' instead."),
        ("scenario.groups=0", "Got 0 instead."),
        ("scenario.valid=1", "Got 1.0 instead."),
        ("run.loss=nowhere:loss", "loss nowhere:loss cannot be imported"),
        ("run.data_dir=3", "data_dir of RunSettings must be a string or None. Got 3 instead."),
    ],
)
def test_set_to_what_cannot_be(command: Command, assignment: str, said: str):
    assert said in command("run", "-a", "fesem", *TINY, "--set", assignment).error
    assert no_run_was_made()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[run\n", "cannot be read"),
        ("[runs]\nseed = 1\n", "Did you mean 'run'?"),
        ("[run]\nround = 1\n", "Did you mean 'rounds'?"),
        ("[work]\nlr = nan\n", "lr of SGD must be a number > 0. Got nan instead."),
        ("[work]\nbatch_size = 'half'\n", "Got 'half' instead."),
        ("[run]\nrounds = 'ten'\n", "rounds of Schedule must be an int >= 1. Got 'ten' instead."),
        ("[run]\nalgorithm = 3\n", "algorithm of RunSettings must be a string. Got 3 instead."),
        ("run = 3\n", "must be a table, [run]"),
        (None, "There is no config file e.toml. Check the path."),
    ],
)
def test_a_bad_config_file(command: Command, content: str | None, said: str):
    if content is not None:
        Path("e.toml").write_text(content)
    assert said in command("run", "--config", "e.toml").error
    assert no_run_was_made()


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:banana"])
def test_a_device_that_is_none(command: Command, device: str):
    said = command("run", *TINY, "--device", device).error
    assert said == f"device must be 'auto', 'cpu' or 'cuda'. Got '{device}' instead."
    assert no_run_was_made()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(command: Command):
    assert "torch sees no GPU here; use --device cpu" in command("run", *TINY, "--device", "cuda").error
    assert no_run_was_made()


NETWORKS = """
from torch import nn

def few():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))

def narrow():
    return nn.Linear(3, 10)

def number():
    return 3

class Typo(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        return super().forward(x.flat(1))

class Unknown(Typo):
    def forward(self, x):
        return flatten(x)

def unready():
    return [][1]

thing = 3
"""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("lenet", "model lenet takes images of at least 12x12; samples have shape (1, 8, 8)."),
        ("refused_networks:few", "has 5 outputs, but digits has labels up to 9: it needs 10 outputs."),
        ("refused_networks:narrow", "cannot take samples of shape (1, 8, 8)"),
        ("refused_networks:number", "must return a torch.nn.Module. Got int instead."),
        ("refused_networks:thing", "is not callable"),
        ("refused_networks:none", "cannot be imported"),
        ("no_such_module:none", "cannot be imported"),
    ],
)
def test_networks_that_do_not_fit(command: Command, model: str, said: str):
    Path("refused_networks.py").write_text(NETWORKS)
    assert said in command("run", *TINY, "--model", model).error
    assert no_run_was_made()


@pytest.mark.parametrize(
    ("model", "said", "line"),
    [
        ("Typo", "Typo cannot take samples of shape (1, 8, 8): AttributeError: ", "x.flat(1)"),
        ("Unknown", "Unknown cannot take samples of shape (1, 8, 8): NameError: ", "return flatten(x)"),
        ("unready", "model refused_networks:unready could not be built: IndexError: ", "return [][1]"),
    ],
)
def test_a_mistake_in_a_network_has_its_line(command: Command, model: str, said: str, line: str):
    Path("refused_networks.py").write_text(NETWORKS)
    error = command("run", *TINY, "--model", f"refused_networks:{model}").error
    assert error.startswith(said)
    assert error.endswith(f"refused_networks.py, line {NETWORKS[: NETWORKS.index(line)].count(chr(10)) + 1})")
    assert no_run_was_made()


def samples(**changes: Any) -> dict[str, Any]:
    """Six users with ten pictures each."""
    x = np.random.default_rng(0).integers(0, 255, (60, 8, 8)).astype(np.uint8)
    return {"x": x, "y": np.arange(60) % 3, "user": np.repeat(np.arange(6), 10)} | changes


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(b ^ 0xFF for b in content[middle : middle + 200]) + content[middle + 200 :]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_train": np.repeat(np.arange(6), 10) != 2}, "User '2' of own has no samples in the official training set"),
        ({"user": np.minimum(np.arange(60), 5)}, "User '0' of own has 1 sample,"),
        ({"y": np.arange(60) % 3 - 1}, "labels must be 0 or larger. Got -1 instead."),
        ({"y": np.arange(50)}, "60 samples but 50 labels"),
        ({"user": np.arange(50)}, "60 samples but 50 entries in 'user'"),
        ({"x": np.full((60, 4), np.nan)}, "x has NaN or infinite values"),
        ({"x": np.arange(60)}, "x must have shape [samples, ...]"),
        ({"y": np.array([1j] * 60)}, "it holds values of type complex128"),
        ({"x": np.array([{}] * 60)}, "contains Python objects"),
    ],
)
def test_data_that_cannot_be_used(command: Command, changes: dict[str, Any], said: str):
    np.savez("own.npz", **samples(**changes))
    assert said in command("run", "--dataset", "own.npz", "--rounds", 1, "--clusters", 2).error
    assert no_run_was_made()


def test_labels_outside_the_outputs_of_a_users_own_network(command: Command):
    np.savez("own.npz", **samples(y=np.arange(60) % 7))
    Path("refused_networks.py").write_text(NETWORKS)
    said = command("run", "--dataset", "own.npz", "--rounds", 1, "-k", 2, "--model", "refused_networks:few").error
    assert "has 5 outputs, but own has labels up to 6: it needs 7 outputs." in said
    assert no_run_was_made()


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "altered", "text", "array", "folder", "no y"])
def test_a_missing_or_damaged_file(command: Command, harm: str):
    file = Path("own.npz")
    if harm == "folder":
        file.mkdir()
    elif harm == "no y":
        np.savez(file, x=np.zeros((4, 2)))
    elif harm == "array":
        with file.open("wb") as out:
            np.save(out, np.zeros(3))
    elif harm != "missing":
        np.savez(file, **samples())
        content = file.read_bytes()
        file.write_bytes({"empty": b"", "cut": content[:2000], "altered": damaged(content), "text": b"hello\n"}[harm])
    said = command("run", "--dataset", "own.npz", "--rounds", 1, "--clusters", 2).error
    assert "own.npz" in said
    assert no_run_was_made()


def test_a_run_folder_that_exists_is_left_as_it_is(command: Command):
    command("run", *TINY, "--name", "a", "--quiet")
    before = {p: p.stat().st_mtime_ns for p in Path("runs/a").rglob("*")}
    said = command("run", *TINY, "--name", "a", "--seed", 1).error
    assert said == "runs/a already exists. Resume it with 'coterie resume runs/a', or choose another --name."
    assert {p: p.stat().st_mtime_ns for p in Path("runs/a").rglob("*")} == before


def test_a_place_for_runs_that_is_a_file(command: Command):
    Path("runs").write_text("mine")
    assert command("run", *TINY).error == "The folder runs cannot be created: File exists."
    assert Path("runs").read_text() == "mine"


@pytest.mark.parametrize("verb", ["resume", "show"])
def test_what_is_no_run_can_be_neither_resumed_nor_shown(command: Command, verb: str):
    assert command(verb, "nowhere").error == "nowhere is not a run folder: it has no config.toml."


@pytest.mark.parametrize("verb", ["resume", "show"])
def test_a_newer_schema_is_refused_by_name(command: Command, verb: str):
    command("run", *TINY, "--name", "a", "--quiet")
    config = Path("runs/a/config.toml")
    config.write_text(config.read_text().replace("schema = 1", "schema = 99"))
    said = command(verb, "runs/a").error
    assert said == "runs/a has schema 99; this coterie reads up to 1. Use a newer coterie."


# ---- stopping and going on, in this process ----

LONG = (
    "run",
    "-a",
    "fesem",
    "--clients",
    8,
    "--rounds",
    5,
    "--epochs",
    1,
    "--checkpoint-every",
    0,
    "--quiet",
    "--name",
)


def stop_after(monkeypatch: pytest.MonkeyPatch, round: int, presses: int = 1) -> None:
    """Press Ctrl-C when that round is written."""
    real = RunFolder.append

    def append(self: RunFolder, row: Any) -> None:
        real(self, row)
        if row["round"] == round:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunFolder, "append", append)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that several tests begin with are made once and copied from here."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def whole(command: Command, kept: Path) -> Path:
    """A run of 5 rounds that was not stopped."""
    if not (kept / "whole").exists():
        assert command(*LONG, "whole").code == 0
        shutil.copytree("runs/whole", kept / "whole")
        shutil.rmtree("runs/whole")
    return kept / "whole"


@pytest.fixture
def stopped(command: Command, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run, stopped after the third round."""
    if not (kept / "stopped").exists():
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            done = command(*LONG, "a")
        assert done.code == 130
        assert done.err == "error: Stopped after round 3 of 5. Resume with 'coterie resume runs/a'.\n"
        shutil.copytree("runs/a", kept / "stopped")
        shutil.rmtree("runs/a")
    shutil.copytree(kept / "stopped", "runs/a")
    return Path("runs/a")


def test_ctrl_c_keeps_a_checkpoint_and_resume_finishes(command: Command, stopped: Path, whole: Path):
    assert not (stopped / "summary.json").exists()
    assert (stopped / "checkpoint" / "round-000003").is_dir()
    done = command("resume", stopped)
    assert done.code == 0
    assert "round 5/5" in done.err
    assert "round 3/5" not in done.err
    assert outcome(stopped) == outcome(whole)


def test_a_second_ctrl_c_stops_at_once_and_resume_finishes(
    command: Command, whole: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        stop_after(patch, 3, presses=2)
        done = command(*LONG, "a")
    assert done.code == 130
    assert "Stopped at once" in done.err
    assert "coterie resume runs/a" in done.err
    assert command("resume", "runs/a", "--json").json["rounds"] == 5
    assert outcome(Path("runs/a")) == outcome(whole)


def test_a_finished_run_says_so_and_is_left_alone(command: Command):
    first = command("run", *TINY, "--name", "a", "--json")
    before = {p: p.stat().st_mtime_ns for p in Path("runs/a").rglob("*")}
    done = command("resume", "runs/a")
    assert done.code == 0
    assert "runs/a is already finished: 2 rounds; nothing to do." in done.err
    assert "accuracy" in done.out
    assert command("resume", "runs/a", "--json").json == first.json
    assert {p: p.stat().st_mtime_ns for p in Path("runs/a").rglob("*")} == before


def test_show_on_a_finished_run(command: Command):
    first = command("run", *TINY, "--name", "a", "--json")
    assert command("show", "runs/a", "--json").json == first.json
    done = command("show", "runs/a")
    assert done.err == ""
    assert f"macro {100 * first.json['accuracy']['macro']:.2f}" in done.out


def test_show_on_a_run_that_is_not_finished(command: Command, stopped: Path):
    done = command("show", stopped)
    assert done.code == 0
    said, numbers, way_out = done.out.splitlines()
    assert said == "runs/a: fesem on rotated-digits, not finished: round 3 of 5."
    assert re.fullmatch(r"accuracy \d\d\.\d\d  sizes 2 2 2 2", numbers)
    assert way_out == "Resume with 'coterie resume runs/a'."
    found = command("show", stopped, "--json").json
    assert (found["finished"], found["rounds_done"], found["last"]["round"]) == (False, 3, 3)


def test_show_tells_the_decisions_so_far(command: Command, stopped: Path):
    rows = (stopped / "rounds.jsonl").read_text().splitlines()
    cut = {"what": "cut", "clusters": [0, 1, 2, 3], "sizes": [2, 2, 2, 2], "z": 41.0}
    rows[-1] = json.dumps(json.loads(rows[-1]) | {"decisions": [cut]})
    (stopped / "rounds.jsonl").write_text("\n".join(rows) + "\n")
    assert command("show", stopped).out.splitlines()[2:-1] == [
        "4 kinds found.",
        "Round 3: cluster 0 was cut into 4 (2, 2, 2, 2 clients), z = 41.",
        "z: evidence that the parts differ, in standard deviations of noise.",
    ]


def test_show_on_a_run_that_is_going_on(command: Command, stopped: Path):
    with RunFolder.open(stopped).held():
        assert re.fullmatch(r"It is running, about 0:\d\d left\.", command("show", stopped).out.splitlines()[-1])
        found = command("show", stopped, "--json").json
    assert found["state"] == "running"
    assert found["seconds_left"] >= 0


def test_show_before_the_first_round(command: Command, stopped: Path):
    (stopped / "rounds.jsonl").unlink()
    assert "round 0 of 5" in command("show", stopped).out
    assert command("show", stopped, "--json").json["last"] is None


def test_a_run_in_use_is_not_touched(command: Command, stopped: Path):
    before = sorted(stopped.rglob("*"))
    with RunFolder.open(stopped).held():
        assert command("resume", stopped).error == "runs/a is in use by another process."
        assert command("show", stopped).code == 0  # looking is allowed
    assert sorted(stopped.rglob("*")) == before
    assert command("resume", stopped).code == 0


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["cut short", "altered"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(
    command: Command, stopped: Path, whole: Path, name: str, harm: str
):
    file = stopped / "checkpoint" / "round-000003" / name
    content = file.read_bytes()
    file.write_bytes(content[:-20] if harm == "cut short" else damaged(content))
    done = command("resume", stopped, "--json")
    assert done.code == 0
    told = " ".join(done.json["notes"])
    assert f"checkpoint/round-000003/{name} is truncated or altered; this checkpoint is not used." in told
    assert "The checkpoint of round 2 is used." in told
    assert outcome(stopped) == outcome(whole)


def test_both_checkpoints_damaged_begins_again(command: Command, stopped: Path, whole: Path):
    for file in stopped.glob("checkpoint/*/state.json"):
        file.write_text("{}")
    notes = command("resume", stopped, "--json").json["notes"]
    assert [("round-000003" in notes[0]), ("round-000002" in notes[1])] == [True, True]
    assert "starts again from the first round" in notes[2]
    assert outcome(stopped) == outcome(whole)


def test_rows_that_were_removed_are_noticed(command: Command, stopped: Path):
    (stopped / "rounds.jsonl").write_text("")
    assert "rounds.jsonl is shorter than the checkpoint says" in command("resume", stopped).error


@pytest.mark.parametrize("name", ["config.toml", "environment.json", "rounds.jsonl", "summary.json"])
def test_other_damaged_files_are_refused_by_name(command: Command, stopped: Path, name: str):
    file = stopped / name
    file.write_bytes(b"[{'\n" * 2000)
    assert f"runs/a/{name} is damaged" in command("resume", stopped).error


def test_data_that_has_changed_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch):
    np.savez("own.npz", **samples())
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        done = command("run", "--dataset", "own.npz", "-k", 2, "--rounds", 3, "--name", "a", "--checkpoint-every", 0)
    assert done.code == 130
    np.savez("own.npz", **samples(y=np.arange(60) % 2))
    said = command("resume", "runs/a", "--quiet").error
    assert "own.npz has changed since the run in runs/a began: it has 2 classes, not " in said
    Path("own.npz").unlink()
    assert "own.npz; say where it is now with --data PATH" in command("resume", "runs/a", "--quiet").error
    np.savez("own.npz", **samples())
    assert command("resume", "runs/a", "--json").json["rounds"] == 3


def test_a_run_from_python_is_resumed_from_python(command: Command, stopped: Path):
    config = stopped / "config.toml"
    config.write_text(config.read_text().replace("[run]\n", "[run]\nfrom_python = true\n"))
    assert (
        "was started from Python with its own data and model; give it again there" in command("resume", stopped).error
    )


def test_a_full_disk_while_checkpointing_keeps_the_checkpoint_before(
    command: Command, whole: Path, monkeypatch: pytest.MonkeyPatch
):
    real = os.replace

    def full_from_round_3(source: Any, target: Any) -> None:
        if "round-000003" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_from_round_3)
        said = command(*LONG, "a").error
    assert said == (
        "The checkpoint of round 3 of runs/a could not be written: No space left on device. "
        "The checkpoint of round 2 is kept. Free some space and resume with 'coterie resume runs/a'."
    )
    assert sorted(p.name for p in Path("runs/a/checkpoint").iterdir()) == ["round-000001", "round-000002"]
    assert command("resume", "runs/a", "--quiet").code == 0
    assert outcome(Path("runs/a")) == outcome(whole)


# ---- stopping and going on, for real ----

# Round 3 finds a disk that takes no file of more than 20 kB; centers alone take 77 kB.
FILL_THE_DISK = """
import resource, sys
from coterie.cli.main import main
from coterie.runs.folder import RunFolder

save = RunFolder.save_checkpoint

def save_on_a_small_disk(self, checkpoint):
    if checkpoint.round == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    save(self, checkpoint)

RunFolder.save_checkpoint = save_on_a_small_disk
main(sys.argv[1:])
"""


def test_a_file_that_the_system_refuses_keeps_the_checkpoint_before(command: Command, whole: Path):
    arguments = [str(argument) for argument in (*LONG, "a")]
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, *arguments], capture_output=True, text=True, check=False, env=ONE_THREAD
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "The checkpoint of round 3 of runs/a could not be written" in done.stderr
    assert "File too large" in done.stderr
    assert "The checkpoint of round 2 is kept. Free some space and resume with 'coterie resume runs/a'." in done.stderr
    assert sorted(p.name for p in Path("runs/a/checkpoint").iterdir()) == ["round-000001", "round-000002"]
    assert command("resume", "runs/a", "--json").json["notes"] == []
    assert outcome(Path("runs/a")) == outcome(whole)


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "250"}


def begin(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "coterie", *(str(argument) for argument in arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ONE_THREAD,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Until a file is there."""
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


def test_a_process_that_runs_holds_its_folder_and_ctrl_c_stops_it(command: Command):
    process = begin("run", "--clients", 8, "--rounds", 5000, "--epochs", 1, "--name", "a")
    try:
        wait_for(Path("runs/a/rounds.jsonl"), process)
        assert command("resume", "runs/a").error == "runs/a is in use by another process."
        assert "exists" in command("run", *TINY, "--name", "a").error
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    *_, last = err.splitlines()
    stopped_after = re.fullmatch(
        r"error: Stopped after round (\d+) of 5000\. Resume with 'coterie resume runs/a'\.", last
    )
    assert stopped_after is not None, err
    done = int(stopped_after[1])
    assert Path(f"runs/a/checkpoint/round-{done:06d}").is_dir()
    config = Path("runs/a/config.toml")  # 5000 rounds were never meant
    config.write_text(config.read_text().replace("rounds = 5000", f"rounds = {done + 1}"))
    assert command("resume", "runs/a", "--json", "--override").json["rounds"] == done + 1
    assert [row["round"] for row in RunFolder.open(Path("runs/a")).rows()] == list(range(1, done + 2))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fesem", "local"])
def test_killed_at_random_moments_five_times_over_and_resumed(command: Command, algorithm: str):
    arguments = ("run", "-a", algorithm, "--clients", 8, "--rounds", 60, "--epochs", 1, "--checkpoint-every", 0, "-q")
    whole = begin(*arguments, "--name", "whole")
    whole.communicate(timeout=300)
    assert whole.returncode == 0
    seed = random.randrange(1 << 30)
    print(f"random moments of seed {seed}")
    moments = random.Random(seed)
    path, killed, doubled = Path("runs/a"), 0, 0
    before = -1
    while killed < 5:
        process = begin(*arguments, "--name", "a") if not path.exists() else begin("resume", path, "-q")
        try:
            if killed == 0:
                wait_for(path / "config.toml", process)
            else:
                environment = path / "environment.json"
                written = environment.stat().st_mtime_ns if environment.exists() else 0
                end = time.monotonic() + 60
                while not environment.exists() or environment.stat().st_mtime_ns == written:
                    assert process.poll() is None, process.communicate()
                    assert time.monotonic() < end
                    time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.5))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert process.returncode == -signal.SIGKILL, "it finished before it was killed: give it more rounds"
        killed += 1
        saved = sorted(path.glob("checkpoint/round-*"))
        now = int(saved[-1].name[6:]) if saved else 0
        doubled += now > before
        before = now
    assert doubled >= 1  # some life got somewhere; on a busy machine the others may be killed too early
    last = begin("resume", path, "-q")
    _, err = last.communicate(timeout=300)
    assert last.returncode == 0, err
    assert outcome(path) == outcome(Path("runs/whole"))
    assert [row["round"] for row in RunFolder.open(path).rows()] == list(range(1, 61))
