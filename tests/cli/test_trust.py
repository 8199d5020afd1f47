"""A run folder from somebody else runs no code: what its settings name is imported only if the user says so."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

import pytest

from coterie import api
from coterie.client.settings import WorkSettings
from coterie.engines.settings import RaySettings
from coterie.errors import CoterieError, RunError
from coterie.methods.base import algorithms
from coterie.runs.folder import RunFolder, to_toml
from coterie.runs.settings import RunSettings, Schedule
from coterie.settings import fields_of
from tests.cli.conftest import TINY, Command

LOSS = (
    "from torch.nn.functional import cross_entropy\ndef loss(x, y):\n    return cross_entropy(x, y, reduction='none')\n"
)
EVIL = "open('executed', 'w').close()\n" + LOSS


@pytest.fixture
def foreign(command: Command, tmp_path: Path, small_run: Path) -> Path:
    """A finished run whose settings name a file inside it."""
    path = tmp_path / "runs" / "x"
    shutil.copytree(small_run, path)
    (path / "artifacts" / "evil.py").write_text(EVIL)
    change(path, 'loss = "cross_entropy"', 'loss = "runs.x.artifacts.evil:loss"')
    return path


def change(path: Path, old: str, new: str) -> None:
    text = (path / "config.toml").read_text()
    assert old in text
    (path / "config.toml").write_text(text.replace(old, new))


def commands(path: Path) -> dict[str, tuple[object, ...]]:
    return {
        "resume": ("resume", path),
        "export": ("export", path, "--cluster", "0", "--format", "torch.export"),
        "onboard": ("onboard", path, "--dataset", "rotated-digits", "--clients", "4"),
        "run": ("run", "--config", path / "config.toml", "--name", "again"),
        "compare": ("compare", "-a", "fedavg", "--config", path / "config.toml", "--name", "again"),
        "sweep": (
            "sweep",
            "--config",
            path / "config.toml",
            "--name",
            "again",
            "-a",
            "fedavg",
            "--grid",
            "work.lr=0.1,0.2",
        ),
        "choose-k": ("choose-k", "--config", path / "config.toml"),
    }


@pytest.mark.parametrize("name", list(commands(Path())))
def test_code_inside_a_run_folder_is_never_imported(command: Command, foreign: Path, name: str):
    if name == "resume":
        (foreign / "summary.json").unlink()
    said = command(*commands(foreign)[name]).error
    assert "run.loss = 'runs.x.artifacts.evil:loss'" in said
    assert "Say --trust" in said
    changed = ("--override",) if name in ("resume", "export", "onboard") else ()
    trusted = command(*commands(foreign)[name], "--trust", *changed).error
    assert "is inside the run folder" in trusted
    assert not Path("executed").exists()


@pytest.mark.parametrize("asked", [("show",), ("report", "--no-tsne"), ("list", "runs")])
def test_looking_at_a_run_imports_nothing(command: Command, foreign: Path, asked: tuple[str, ...]):
    where = foreign.parent if asked[0] == "list" else foreign
    assert command(*asked, where).code == 0
    assert not Path("executed").exists()


def test_code_elsewhere_is_imported_when_the_user_trusts_it_or_names_it_again(command: Command, tmp_path: Path):
    Path("own_loss_of_trust.py").write_text("open('imported', 'w').close()\n" + LOSS)
    own = ("--loss", "own_loss_of_trust:loss")
    assert command("run", *TINY, "-a", "fedavg", "--name", "x", "--quiet", *own).code == 0
    path = tmp_path / "runs" / "x"
    Path("imported").unlink()
    sys.modules.pop("own_loss_of_trust")
    assert command("export", path, "--cluster", "0").code == 0  # weights need no code
    assert not Path("imported").exists()
    assert "own_loss_of_trust:loss" in command("onboard", path, "--dataset", "rotated-digits").error
    assert command("onboard", path, "--dataset", "rotated-digits", "--clients", 4, "--trust").code == 0
    with pytest.raises(RunError, match=r"own_loss_of_trust:loss.*trust=True"):
        api.open_run(path)
    assert api.open_run(path, trust=True).summary["rounds"] == 2
    again = ("run", "--config", path / "config.toml", "--quiet")
    assert "own_loss_of_trust:loss" in command(*again, "--name", "y").error
    assert command(*again, "--name", "y", *own).code == 0
    assert command(*again, "--name", "z", "--set", "run.loss=own_loss_of_trust:loss").code == 0
    shutil.copy(path / "config.toml", tmp_path / "mine.toml")  # the user's own file
    assert command("run", "--config", "mine.toml", "--name", "w", "--quiet").code == 0
    Path("link.toml").symlink_to(path / "config.toml")
    assert "own_loss_of_trust:loss" in command("run", "--config", "link.toml", "--name", "v").error


@pytest.mark.parametrize("field", ["run.algorithm", "run.model", "work.optimizer"])
def test_every_kind_of_code_is_named(command: Command, foreign: Path, field: str):
    table, _, key = field.partition(".")
    tables = RunFolder.open(foreign).config()
    tables["run"]["loss"] = "cross_entropy"
    tables[table][key] = "runs.x.artifacts.evil:loss"
    RunFolder(foreign).write_text("config.toml", to_toml(tables))
    name = "onboard" if key == "algorithm" else "export"  # centers are exported without the method
    assert f"{field} = 'runs.x.artifacts.evil:loss'" in command(*commands(foreign)[name]).error
    assert not Path("executed").exists()


def test_a_ray_cluster_of_somebody_else_is_not_connected_to(command: Command, foreign: Path):
    change(foreign, 'loss = "runs.x.artifacts.evil:loss"', 'loss = "cross_entropy"')
    change(foreign, "[engine]", '[engine]\naddress = "203.0.113.1:6379"')
    change(foreign, 'engine = "vectorized"', 'engine = "ray"')
    (foreign / "summary.json").unlink()
    assert "engine.address = '203.0.113.1:6379'" in command("resume", foreign).error


def test_no_other_field_imports_what_it_names(command: Command, foreign: Path):
    """A new field that imports code must be added to `coterie.trust`."""
    change(foreign, 'loss = "runs.x.artifacts.evil:loss"', 'loss = "cross_entropy"')
    tables = RunFolder.open(foreign).config()
    fields = [("run", RunSettings), ("run", Schedule), ("work", WorkSettings), ("engine", RaySettings)]
    fields += [("algorithm", cls) for cls in algorithms().values()]
    tried = 0
    for table, cls in fields:
        for key in fields_of(cls):
            changed = {name: dict(values) if isinstance(values, dict) else values for name, values in tables.items()}
            changed[table][key] = "runs.x.artifacts.evil:loss"
            if table == "algorithm":
                changed["run"]["algorithm"], changed["algorithm"] = cls.key, {key: "runs.x.artifacts.evil:loss"}
            RunFolder(foreign).write_text("config.toml", to_toml(changed))
            with contextlib.suppress(CoterieError):
                api.open_run(foreign)
            tried += 1
    assert tried > 100
    assert not Path("executed").exists()


def test_a_file_of_situations_inside_a_run_folder_names_no_code(command: Command, foreign: Path):
    (foreign / "more.toml").write_text('[a]\nrun.loss = "runs.x.artifacts.evil:loss"\n')
    assert "runs.x.artifacts.evil:loss" in command("compare", "--scenarios", foreign / "more.toml").error
    assert not Path("executed").exists()
