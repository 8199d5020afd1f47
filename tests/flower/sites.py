"""Real processes on loopback: a SuperLink, SuperNodes, and runs over them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from coterie.deploy.init import write_app, write_keys
from tests.flower import attacks

BIN = Path(sys.executable).parent

# A site that answers wrongly on purpose: `fault` of its node config says how.
FAULTY = """
import time
from collections import OrderedDict
import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from coterie.deploy import client_app
from sites import task


def faulty(message, context, call_next):
    fault = context.node_config.get("fault", "")
    if message.metadata.message_type == "query" or not fault:
        return call_next(message, context)
    if fault == "slow":
        time.sleep(300)
    if fault == "raise":
        raise ValueError("this site is out of order")
    reply = call_next(message, context)
    answer = reply.content["answer"]
    params = answer["params"].numpy() if "params" in answer else np.zeros((1, 3), np.float32)
    if fault == "nan":
        params = params * np.nan
    if fault == "shape":
        params = params[:, :-3]
    if fault == "huge":
        params = np.zeros((1, 40_000_000), np.float32)
    array = Array(params)
    if fault == "garbage":
        array = Array("float32", (1, 3), "numpy.ndarray", b"no numbers at all")
    if fault == "pickle":
        array = Array("float32", (1, 3), "pickle", b"cos\\nsystem\\n")
    reply.content["answer"] = ArrayRecord(OrderedDict({**dict(answer.items()), "params": array}))
    return reply


app = client_app(task, [faulty])
"""

# A site that attacks: `attack` of its node config says how, see attacks.py. Attackers do not work, so they start fast.
HOSTILE = """
import json
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from sites import attacks

SIZES = {"train": 100, "valid": 10, "test": 30}


def answer(message, context):
    attack = context.node_config.get("attack", "")
    if not attack:
        from coterie.deploy import client_app
        from sites import task

        return client_app(task)(message, context)
    name = str(context.node_config["name"])
    if message.metadata.message_type == "query":
        content = RecordDict()
        text = attacks.HELLOS.get(attack, json.dumps({"name": "NAME", **SIZES}))
        content["hello"] = ConfigRecord({"json": text.replace("NAME", name)})
    else:
        content = attacks.forged(message.content, SIZES)
        if attack != "none":
            content = attacks.ATTACKS[attack](content, Path(context.node_config["state-dir"]) / "hostile")
    return Message(content, reply_to=message)


app = ClientApp()
app.query()(answer)
app.train()(answer)
app.evaluate()(answer)
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Sites:
    """A deployment in a folder; everything is ended by `close`."""

    def __init__(self, folder: Path, secure: bool = False, nodes: int = 4) -> None:
        self.folder, self.secure = folder, secure
        write_app(folder, "sites-under-test", nodes)
        if secure:
            write_keys(folder, nodes, ["127.0.0.1"])
        self.env = os.environ | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "COTERIE_PORT": str(free_port()),
            "FLWR_HOME": str(folder / ".flwr"),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    # ---- processes ----

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.running[name] = process
        return process

    def superlink(self) -> None:
        self.start("superlink", "./superlink.sh", *self._mode())
        self.wait_for(lambda: _listens(int(self.env["COTERIE_PORT"])), 60, "the SuperLink does not listen")
        if self.secure:
            time.sleep(1)
            subprocess.run(
                ["./register.sh"], cwd=self.folder, env=self.env, check=True, capture_output=True, timeout=120
            )

    def node(self, number: int, **config: object) -> None:
        """Start a site; `config` is added to its node config."""
        script = (self.folder / "supernode.sh").read_text()
        if config:
            extra = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items()).replace('"', '\\"')
            script = re.sub(r'config="(.*)"\n', lambda m: f'config="{m[1]} {extra}"\n', script)
        path = self.folder / f"node-{number}.sh"
        path.write_text(script.replace("9300 + number", str(free_port())))
        path.chmod(0o755)
        self.start(f"node-{number}", f"./{path.name}", str(number), *self._mode())

    def run(self, **config: object) -> subprocess.Popen[bytes]:
        """Start a run; its log is run.log."""
        identity = "key" if self.secure else "claimed"
        values = {"poll": 0.2, "wait": 240, "evaluate-every": 1000, "identity": identity} | config
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        return self.start("run", "./run.sh", *self._mode(), "-c", pairs)

    def _mode(self) -> list[str]:
        return [] if self.secure else ["--insecure"]

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End a process and all it has started."""
        process = self.running.pop(name)
        for pid in [*_children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        process.wait(30)

    def kill_serverapp(self) -> None:
        found = subprocess.run(["pgrep", "-f", "flwr-serverapp"], capture_output=True, text=True, check=False)
        mine = [int(p) for p in found.stdout.split() if _flwr_home(int(p)) == str(self.folder / ".flwr")]
        assert mine, "no ServerApp is running"
        for pid in mine:
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)

    def turn_hostile(self) -> None:
        """Give the sites the code of attackers, and the SuperLink a database in memory: so many nodes lock a file."""
        script = self.folder / "superlink.sh"
        script.write_text(script.read_text().replace(' --database "$here/state/superlink.db"', ""))
        (self.folder / "sites" / "client.py").write_text(HOSTILE)
        (self.folder / "sites" / "attacks.py").write_text(Path(attacks.__file__).read_text())

    # ---- results ----

    def rows(self, name: str = "deployed") -> list[dict[str, object]]:
        path = self.folder / "runs" / name / "rounds.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def summary(self, name: str = "deployed") -> dict[str, object]:
        found: dict[str, object] = json.loads((self.folder / "runs" / name / "summary.json").read_text())
        return found

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, happened, seconds: float, what: str) -> None:
        ends = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > ends:
                raise AssertionError(f"{what} after {seconds} s; run.log ends: {self.log('run')[-1500:]}")
            time.sleep(0.3)

    def wait_for_round(self, number: int, seconds: float = 300, name: str = "deployed") -> None:
        self.wait_for(lambda: len(self.rows(name)) >= number, seconds, f"round {number} is not done")

    def wait_for_end(self, seconds: float = 300, name: str = "deployed") -> None:
        path = self.folder / "runs" / name / "summary.json"
        self.wait_for(path.exists, seconds, "the run has not ended")


def _listens(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def _children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    below = [int(child) for child in found.stdout.split()]
    return [deep for child in below for deep in [*_children(child), child]]


def _flwr_home(pid: int) -> str:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((p.partition(b"=")[2].decode() for p in pairs if p.startswith(b"FLWR_HOME=")), "")
