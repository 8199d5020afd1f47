"""`coterie init`: the file is read back as the experiment that it describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coterie.cli.init import commented
from coterie.methods.base import algorithms
from coterie.runs.experiment import resolve
from coterie.runs.settings import merge, read_tables

from .conftest import TINY, Command

COMMENTED_OUT = re.compile(r"^#(?=\w+ = )", re.MULTILINE)  # text has a space after the #


def test_a_run_takes_the_file(command: Command):
    made = command("init", "-a", "fedavg", *TINY, "--lr", "0.3")
    assert (made.code, made.err) == (0, "")
    assert made.out == "created experiment.toml; edit it, then: coterie run --config experiment.toml\n"
    text = Path("experiment.toml").read_text()
    assert '\nalgorithm = "fedavg"\n' in text
    assert "\n# Learning rate; by default the dataset's. Allowed: a number > 0.\nlr = 0.3\n" in text
    assert "\n#momentum = 0.0\n" in text
    done = command("run", "--config", "experiment.toml", "--json", "--quiet")
    assert (done.code, done.json["rounds"], done.json["clients"]) == (0, 2, 8)


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_what_is_commented_out_is_what_holds_without_it(tmp_path: Path, name: str):
    given = merge({"run": {"algorithm": name, "clients": 8}, "scenario": {"alpha": 0.5}})
    wanted = resolve(given)
    (tmp_path / "few.toml").write_text(commented(wanted, given))
    (tmp_path / "all.toml").write_text(COMMENTED_OUT.sub("", commented(wanted, given)))
    few, every = (read_tables(tmp_path / file) for file in ("few.toml", "all.toml"))
    assert few["run"] == {"algorithm": name, "dataset": "rotated-digits", "clients": 8, "rounds": 20, "seed": 0}
    assert resolve(few).tables() == wanted.tables()
    assert resolve(every).tables() == {**wanted.tables(), "engine": every["engine"]}
    assert {"lr", "epochs", "optimizer"} <= every["work"].keys()
    assert every["engine"]["plan"] == "auto"


def test_every_setting_is_there_with_its_help(command: Command):
    assert command("init", "x.toml", "--engine", "ray").code == 0
    text = " ".join(Path("x.toml").read_text().replace("\n# ", " ").split())
    for field in command("list", "settings", "--json").json:
        name = field["name"].partition(".")[2]
        assert re.search(rf"#?{name} =", text), field["name"]
        if not field["name"].startswith("engine.workers"):  # of ray and of the others
            assert field["about"] in text or name == "num_clusters"


def test_a_file_that_exists_is_kept(command: Command):
    Path("experiment.toml").write_text("mine")
    assert command("init").error == "experiment.toml exists already; choose another name, or remove it."
    assert Path("experiment.toml").read_text() == "mine"


def test_wrong_settings_are_refused_before_anything_is_written(command: Command):
    assert "There is no algorithm 'fesm'" in command("init", "-a", "fesm").error
    assert not Path("experiment.toml").exists()


def test_auto_is_kept_for_the_run(command: Command):
    assert command("init", "-a", "ifca", "-k", "auto").code == 0
    assert read_tables(Path("experiment.toml"))["algorithm"] == {"num_clusters": "auto"}
