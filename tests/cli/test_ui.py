"""`coterie ui`: where it listens, who may come, and what is refused."""

from __future__ import annotations

import builtins
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.cli.ui import token_for
from coterie.errors import ConfigError
from tests.views.report.made import make_run

from .conftest import Command


@contextmanager
def started(*arguments: str, cwd: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the first line that it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", "ui", *arguments],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "250"} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        yield process, line
    finally:
        process.kill()
        process.communicate()


def get(address: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_serves_this_machine_and_ends_by_ctrl_c(tmp_path: Path):
    make_run(tmp_path / "runs", "a")
    with started("--port", "0", cwd=tmp_path) as (process, line):
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found is not None, line
        assert "token" not in line
        status, body = get(found.group() + "api/runs")
        assert status == 200
        assert '"id":"a"' in body
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=20)
        assert "Traceback" not in rest
        assert process.returncode == 0


def test_beyond_this_machine_only_with_a_token(tmp_path: Path):
    make_run(tmp_path, "a")
    with started(str(tmp_path), "--host", "0.0.0.0", "--port", "0", cwd=tmp_path) as (_, line):
        found = re.search(r"http://localhost:(\d+)/\?token=([\w-]{32})", line)
        assert found is not None, line
        port, token = found.groups()
        assert get(f"http://127.0.0.1:{port}/api/runs")[0] == 401
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/runs", headers={"Authorization": f"Bearer {token}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=20) as answer:
            assert answer.status == 200


def test_a_token_of_ones_own_is_not_printed(tmp_path: Path):
    secret = "a-secret-of-my-own-0123"
    with started(str(tmp_path), "--with-token", "--port", "0", cwd=tmp_path, COTERIE_UI_TOKEN=secret) as (
        process,
        line,
    ):
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found is not None, line
        address = f"http://127.0.0.1:{found.group(1)}/"
        assert get(address)[0] == 401
        assert get(address + "?token=wrong")[0] == 401
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=20)
        assert secret not in line + rest


def test_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COTERIE_UI_TOKEN", raising=False)
    assert token_for("127.0.0.1", False) is None
    one, other = token_for("0.0.0.0", False), token_for("0.0.0.0", False)
    assert one is not None
    assert len(one) == 32
    assert one != other
    monkeypatch.setenv("COTERIE_UI_TOKEN", "short")
    assert token_for("localhost", False) is None
    with pytest.raises(ConfigError, match="must have at least 16 characters"):
        token_for("localhost", True)


def test_wrong_input_is_one_sentence(command: Command, tmp_path: Path):
    assert command("ui", "nowhere").error == "There is no folder nowhere."
    Path("file").write_text("")
    assert command("ui", "file").error == "file is a file; name a folder of runs."
    assert command("ui", "--port", "http").error == "--port must be an int >= 0 and <= 65535. Got 'http' instead."
    assert command("ui", "--port", "70000").error == "--port must be an int >= 0 and <= 65535. Got '70000' instead."
    assert "There is no address no.such.host.invalid" in command("ui", "--host", "no.such.host.invalid").error
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = command("ui", "--port", str(taken.getsockname()[1])).error
        assert "is not available" in said
        assert "choose another --port" in said


def test_without_the_extra_it_is_named(command: Command, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name.partition(".")[0] in ("uvicorn", "starlette"):
            raise ImportError(name)
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert command("ui").error == "coterie ui requires an optional dependency: pip install 'coterie[ui]'."
