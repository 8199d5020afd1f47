"""The command `coterie`: one sentence for every error, exit codes, and one command under two names."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer

import coterie
from coterie.cli import main as cli
from coterie.errors import ConfigError, Interrupted
from coterie.methods.base import algorithms
from tests.views.report.made import make_run

from .conftest import TINY, Command

VERBS = ("run", "resume", "show", "compare", "list")


def test_version(command: Command):
    done = command("--version")
    assert (done.code, done.out, done.err) == (0, f"{coterie.__version__}\n", "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(command: Command, verb: str):
    done = command(verb, "--help")
    assert done.code == 0
    assert "Usage:" in done.out
    assert done.err == ""


def test_the_flags_of_run(command: Command):
    shown = command("run", "--help").out
    for flag in (
        *("algorithm", "dataset", "model", "clients", "clusters", "rounds", "epochs", "steps", "batch-size", "lr"),
        *("momentum", "participation", "seed", "engine", "device", "out", "name", "config", "set"),
        *("checkpoint-every", "json", "quiet"),
    ):
        assert f"--{flag} " in shown, flag


def test_without_arguments_the_verbs_are_shown_and_no_empty_error(command: Command):
    done = command()
    assert done.code == 2
    assert done.err == ""
    for verb in VERBS:
        assert verb in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["run", "--roundz", "3"], "--rounds"),
        (["run", "extra"], "(extra)"),
        (["run", "--rounds"], "'--rounds' requires an argument"),
        (["list"], "Missing argument 'WHAT'"),
        (["resume"], "Missing argument 'RUN'"),
        (["show", "a", "b"], "(b)"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(command: Command, arguments: list[str], said: str):
    assert said in command(*arguments).error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("lr is [bad] and [/] odd."), 2, "error: lr is [bad] and [/] odd.\n"),
        (Interrupted("Stopped."), 130, "error: Stopped.\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (typer.Abort(), 130, "stopped\n"),
        (
            OSError(28, "No space left on device", "x/table.json"),
            2,
            "x/table.json cannot be used: No space left on device",
        ),
        (BrokenPipeError(), 0, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes_and_what_is_said(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
):
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    done = command()
    assert done.code == code
    assert said in done.err
    assert done.err.count("\n") <= 1
    assert done.out == ""


def test_a_long_sentence_stays_on_one_line(command: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert command("run", "--algorithm", "fesm").error.endswith(f", {max(algorithms())}.")


def test_errors_of_the_program_itself_are_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def fail(**_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


# ---- help is instant ----

NOTHING = [["--version"], ["--help"], ["run", "--help"], ["compare", "--help"], ["data", "show", "--help"], []]
SENTENCE = [["run", "--roundz", "3"], ["run", "--rounds", "x"], ["rnu"], ["list", "algorithm"], ["show", "nowhere"]]
TABLE = [["list", "algorithms"], ["list", "settings"], ["list", "metrics"], ["show", "done"]]
ARRAYS = [["show", "live"], ["list", "runs", "."]]
ASK = """
import sys
from coterie.cli.main import main
for slow, commands in {groups!r}:
    for arguments in commands:
        try:
            main(arguments)
        except SystemExit:
            pass
        assert not set(slow) & set(sys.modules), (arguments, set(slow) & set(sys.modules))
"""


def test_what_trains_nothing_imports_no_torch(command: Command, tmp_path: Path):
    assert command("run", "-a", "fedavg", *TINY, "--out", ".", "--name", "done", "--quiet").code == 0
    make_run(tmp_path, "live", rounds=2, finished=False)
    slow = ["torch", "sklearn", "scipy"]
    groups = [([*slow, "numpy", "rich"], NOTHING), ([*slow, "numpy"], SENTENCE + TABLE), (slow, ARRAYS)]
    code = ASK.format(groups=groups)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_imports_neither_the_compiler_of_torch_nor_scikit_learn(tmp_path: Path):
    code = """
import sys
from coterie.cli.main import main
try:
    main(["run", "-a", "fedavg", "--clients", "4", "--rounds", "1", "--set", "engine.plan=layers", "--quiet"])
except SystemExit as done:
    assert not done.code
assert not {"torch._dynamo", "sklearn", "scipy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_shows_type_default_and_choices(command: Command):
    shown = " ".join(command("run", "--help").out.split())
    for said in (
        "--rounds INTEGER Number of rounds. [default: 20]",
        "--attack [none|sign_flip|gaussian|label_flip|alie|ipm|min_max|hijack|backdoor] Simulated attack.",
        "--lr FLOAT Learning rate; by default the dataset's.",
        "--batch-size INTEGER|full",
        "--set TEXT Set any field: algorithm.prox=0.1, a list as [a, b]; repeatable.",
        "-k, --clusters INTEGER Number of clusters K; auto: coterie finds it",
    ):
        assert said in shown


# ---- completion ----


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("coterie re", {"resume", "report", "reproduce"}),
        ("coterie run --algorithm fesem", {"fesem", "fesem_ma"}),
        ("coterie compare -a fedav", {"fedavg"}),
        ("coterie run --engine v", {"vectorized"}),
        ("coterie run --check", {"--checkpoint-every"}),
    ],
)
def test_a_shell_completes(typed: str, offered: set[str]):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_COTERIE_COMPLETE": "complete_bash"}
    code = "import sys; sys.argv = ['coterie']; from coterie.cli.main import main; main()"
    ask = [sys.executable, "-c", code]
    done = subprocess.run(ask, env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert (done.returncode, set(done.stdout.split()), done.stderr) == (0, offered, "")


# ---- `python -m coterie` is `coterie` ----


def test_the_console_script_is_main():
    (script,) = entry_points(group="console_scripts", name="coterie")
    assert script.load() is cli.main


def test_the_module_does_what_the_script_does(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script = command("list", "algorithms", "--json")
    monkeypatch.setattr(sys, "argv", ["coterie", "list", "algorithms", "--json"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("coterie", run_name="__main__")
    assert stopped.value.code == script.code == 0
    assert capsys.readouterr().out == script.out


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--version"], ["list", "models", "--json"], ["run", "--algorithm", "fesm"]])
def test_both_names_in_processes_of_their_own(arguments: list[str]):
    script = Path(sys.executable).with_name("coterie")
    one, other = (
        subprocess.run([*start, *arguments], capture_output=True, text=True, check=False)
        for start in ([str(script)], [sys.executable, "-m", "coterie"])
    )
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
    assert one.returncode == (2 if "fesm" in arguments else 0)
    assert one.stdout or one.stderr
