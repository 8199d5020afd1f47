"""What the tests of the command line share: the command itself, in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.cli.main import main
from coterie.runs.execution import execute
from coterie.runs.experiment import resolve
from coterie.runs.folder import RunFolder
from coterie.runs.settings import merge

TINY = ("--clients", "8", "--rounds", "2", "--epochs", "1")


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout, which must be JSON and nothing else."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def error(self) -> str:
        """The one sentence of a command that was refused; fails if it was anything else."""
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.code == 2, (self.code, self.err)
        assert len(errors) == 1, self.err
        assert self.err.splitlines()[-1] == errors[0], self.err
        assert "Traceback" not in self.err
        assert self.out == ""
        return errors[0].removeprefix("error: ")


Command = Callable[..., Done]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`coterie ARGUMENTS...` in an empty folder, wide enough that nothing is broken into lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are tiny here: more threads only wait for each other

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        code = stopped.value.code
        assert isinstance(code, int)
        return Done(code, printed.out, printed.err)

    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of FedAvg with pictures; to change it, copy it."""
    head = {"algorithm": "fedavg", "clients": 8, "rounds": 2}
    experiment = resolve(merge({"run": head, "work": {"epochs": 1}}))
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "x", "x", experiment.tables())
    execute(experiment, folder)
    return folder.path
