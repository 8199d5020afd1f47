"""A fake Grid in this process, for tests of the server: pushing a message calls the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from coterie.client.task import Task
from coterie.data.federation import Federation
from coterie.engines.flower.client import simulated_client_app
from coterie.engines.flower.engine import FlowerEngine, FlowerSettings
from coterie.engines.flower.link import Link
from coterie.engines.flower.storage import save_federation

Fault = Callable[[Message], Message | None]


class FakeGrid:
    """Nodes by number; the `fault` of a node may change or drop its replies."""

    def __init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self.nodes: dict[int, Any] = {}
        self.keys: dict[int, bytes] = {}
        self.faults: dict[int, Fault] = {}
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}

    def add(self, number: int, app: Any, key: bytes = b"", **config: Any) -> None:
        context = Context(run_id=1, node_id=number, node_config=config, state=RecordDict(), run_config={})
        self.nodes[number] = lambda message: app(message, context)
        self.keys[number] = key

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=number, public_key=self.keys[number]) for number in self.nodes]

    def push_messages(self, messages: Any) -> list[str]:
        ids = []
        for message in messages:
            name = str(uuid4())
            message.metadata.__dict__["_message_id"] = name
            ids.append(name)
            self.sent.append(message)
            if message.metadata.dst_node_id not in self.nodes:
                continue
            reply = self.nodes[message.metadata.dst_node_id](message)
            fault = self.faults.get(message.metadata.dst_node_id)
            if fault is not None and message.metadata.message_type != "query":
                reply = fault(reply)
            if reply is not None:
                self._replies[name] = reply
        return ids

    def pull_messages(self, message_ids: Any) -> list[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]


def simulated_app(folder: Path, task: Task, federation: Federation) -> Any:
    """The ClientApp of a simulation over that federation."""
    save_federation(folder, federation)
    assert task.make is not None
    return simulated_client_app(task.make, task.loss, federation.views, str(folder))  # type: ignore[arg-type]


def engine_over(
    folder: Path, task: Task, federation: Federation, grid: FakeGrid | None = None, **settings: Any
) -> tuple[FlowerEngine, FakeGrid]:
    """An engine whose nodes are the clients of a federation, all connected."""
    grid = FakeGrid() if grid is None else grid
    app = simulated_app(folder, task, federation)
    for number in range(len(federation)):
        grid.add(100 + number, app, **{"partition-id": number})
    past = settings.pop("past", {})  # earlier engines over the same folder
    chosen = FlowerSettings(**{"precision": "float64", "deadline": 5.0, "poll": 0.001} | settings)
    engine = FlowerEngine(task, federation, Link(grid, "claimed", 0.001), chosen, run="test", past=past)
    engine.link.roll_call()
    return engine, grid
