"""Run folders and names from somebody else: shown as text, or refused in one sentence."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from coterie.runs.folder import RunFolder, to_toml
from tests.cli.conftest import TINY, Command, Done

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
NAMES = [ESCAPE, "[/]", "[bold]x[/bold]", r"$\frac$", "\\", "[red", "\u202eevil", "a\nb", "link=[link=http://x]y"]


@pytest.fixture
def path(command: Command, tmp_path: Path, small_run: Path) -> Path:
    shutil.copytree(small_run, tmp_path / "runs" / "x")
    return tmp_path / "runs" / "x"


def is_refused_or_done(done: Done) -> None:
    """Exit 0, or exit 2 with one sentence; nothing of others reaches the terminal as it is."""
    assert done.code in (0, 2), done
    assert "Traceback" not in done.err
    assert "\x1b" not in done.err + done.out
    if done.code == 2:
        assert done.error


# ---- names ----


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_are_shown_as_text(command: Command, path: Path, name: str):
    tables = RunFolder.open(path).config()
    tables["run"] |= {"algorithm": name, "dataset": name}
    RunFolder(path).write_text("config.toml", to_toml(tables))
    summary = json.loads((path / "summary.json").read_text())
    summary |= {"algorithm": name, "dataset": name, "notes": [name], "failures": 1, "failures_by_reason": {name: 1}}
    (path / "summary.json").write_text(json.dumps(summary))
    with np.load(path / "clients.npz") as found:
        arrays = dict(found) | {"name": np.array([f"{name}{i}" for i in range(8)])}
    RunFolder(path).write_arrays("clients.npz", arrays)
    shown = command("show", path)
    assert shown.code == 0
    for found in (shown, command("list", "runs", "runs"), command("report", path, "--no-tsne", "--png", "pictures")):
        assert found.code == 0, found
        is_refused_or_done(found)
    if name.isprintable():
        assert name in "".join(line.strip(" │┃") for line in shown.out.splitlines())
    (path / "summary.json").unlink()
    is_refused_or_done(command("show", path))
    is_refused_or_done(command("resume", path, "--override"))


@pytest.mark.parametrize("name", NAMES)
def test_odd_arguments_are_shown_as_text(command: Command, name: str):
    for asked in (("show", name), ("run", "-a", name), ("run", "--dataset", f"{name}.npz"), ("report", name)):
        assert command(*asked).code == 2
        is_refused_or_done(command(*asked))


@pytest.mark.parametrize("name", NAMES)
def test_clients_of_odd_names_are_trained_and_shown(command: Command, name: str):
    users = np.array([f"{name}{i % 4}" for i in range(40)])
    np.savez("own.npz", x=np.random.default_rng(0).random((40, 3)), y=np.arange(40) % 2, user=users)
    done = command("run", "-a", "fedavg", "--dataset", "own.npz", "--rounds", "1", "--name", "a", "--unseen", "0.3")
    is_refused_or_done(done)
    assert done.code == 0, done
    for asked in (("show", "runs/a"), ("report", "runs/a", "--no-tsne"), ("data", "show", "own.npz")):
        found = command(*asked)
        assert found.code == 0, found
        is_refused_or_done(found)
    is_refused_or_done(command("export", "runs/a", "--client", f"{name}9"))
    is_refused_or_done(command("onboard", "runs/a", "--dataset", "own.npz"))


def test_a_trillion_clients_are_refused_in_a_sentence(command: Command):
    assert (
        "--clients must be an int >= 1 and <= 10,000,000. Got '1000000000000'"
        in command("run", "--clients", 10**12).error
    )


# ---- files without what they should have ----


@pytest.mark.parametrize("file", ["summary.json", "environment.json"])
@pytest.mark.parametrize("key", [None, "digest", "plan", "clusters", "bytes", "seconds", "notes", "repairs", "rounds"])
def test_a_summary_or_environment_without_a_key(command: Command, path: Path, file: str, key: str | None):
    content = json.loads((path / file).read_text())
    if key is not None and key not in content:
        pytest.skip("there is no such key")
    keep = ("rounds",) if key is None else [name for name in content if name != key]
    (path / file).write_text(json.dumps({name: content[name] for name in keep if name in content}))
    for asked in (("show", path), ("report", path, "--no-tsne"), ("export", path, "--cluster", "0")):
        is_refused_or_done(command(*asked))
    if file == "environment.json":
        (path / "summary.json").unlink()
    is_refused_or_done(command("resume", path))


@pytest.mark.parametrize("name", ["round-x", "round-", "round-000003x", "round-٣٣٣٣٣٣", "round-" + "9" * 40, "other"])
def test_odd_folders_among_the_checkpoints_are_ignored(command: Command, path: Path, name: str):
    (path / "checkpoint" / name).mkdir()
    (path / "summary.json").unlink()
    assert command("resume", path, "--quiet").code == 0
    assert (path / "checkpoint" / name).is_dir()


# ---- checkpoints with right digests ----


def rewrite(path: Path, tensors: Callable[[dict[str, Any]], Any] | None, plain: Callable[[dict[str, Any]], Any] | None):
    """Change the last checkpoint, and make its digests right again."""
    last = sorted((path / "checkpoint").glob("round-*"))[-1]
    stored = safetensors.torch.load_file(last / "tensors.safetensors")
    state = json.loads((last / "state.json").read_text())
    if tensors is not None:
        stored = tensors(stored)
    if plain is not None:
        state = plain(state)
    safetensors.torch.save_file(stored, last / "tensors.safetensors")
    (last / "state.json").write_text(json.dumps(state))
    digests = {
        name: hashlib.sha256((last / name).read_bytes()).hexdigest() for name in ("tensors.safetensors", "state.json")
    }
    (last / "digests.json").write_text(json.dumps(digests))


TENSORS = ["state.common", "state.centers", "state.labels", "history.labels", "history.scores.samples"]
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda found: None,
    "empty": lambda found: found[:0],
    "wide": lambda found: torch.cat([found, found], -1),
    "flat": lambda found: found.flatten()[0],
    "other type": lambda found: found.to(torch.float16 if found.dtype == torch.int64 else torch.int64),
    "large labels": lambda found: torch.full_like(found, 1 << 40) if found.dtype == torch.int64 else found.double(),
}


# The run is at its end: it needs no centers, and there may be as many samples as it says.
HARMLESS = [("state.centers", "empty"), ("history.scores.samples", "large labels")]
HARMLESS += [("history.scores.samples", "other type")]


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("name", TENSORS)
def test_a_checkpoint_of_another_form_is_refused(command: Command, path: Path, name: str, form: str):
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        found = FORMS[form](tensors[name])
        rest = {key: value for key, value in tensors.items() if key != name}
        return rest if found is None else rest | {name: found.clone()}

    rewrite(path, change, None)
    opened = command("export", path, "--cluster", "0")
    (path / "summary.json").unlink()
    resumed = command("resume", path, "--quiet")
    if (name, form) in HARMLESS:
        return is_refused_or_done(resumed)
    assert "does not fit the run" in resumed.error
    assert "does not fit the run" in opened.error
    return None


@pytest.mark.parametrize(
    "key", ["state", "ledger", "failures", "score_rounds", "seconds", "notes", "rows_bytes", "round"]
)
@pytest.mark.parametrize("value", [..., None, [], {}, "x", -1, 1e400, [{}], {"a": 1}])
def test_a_checkpoint_with_other_values_is_refused(command: Command, path: Path, key: str, value: Any):
    rewrite(
        path, None, lambda state: {k: v for k, v in state.items() if k != key} | ({} if value is ... else {key: value})
    )
    (path / "summary.json").unlink()
    is_refused_or_done(command("resume", path, "--quiet"))


def test_a_run_that_was_trained_is_resumed_as_before(command: Command, path: Path):
    rewrite(path, lambda tensors: tensors, lambda state: state)
    (path / "summary.json").unlink()
    assert command("resume", path, "--quiet").code == 0
    assert command("run", *TINY, "--name", "y", "--quiet").code == 0
