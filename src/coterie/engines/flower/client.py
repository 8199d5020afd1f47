"""The ClientApp of a simulation, whose nodes are the clients of one federation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coterie.data.federation import SplitName
from coterie.data.transforms import View
from coterie.engines.flower.link import hello_of
from coterie.engines.flower.site import Site
from coterie.nets.flat import Loss
from coterie.nets.registry import ModelMaker

SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


def simulated_client_app(make: ModelMaker, loss: Loss, views: Sequence[View], folder: str) -> ClientApp:
    """Answers for all clients of a federation that lies in a folder; a node is the client of its partition id."""
    app = ClientApp()
    kept = tuple(views)

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        federation = _simulated(folder, make, loss, kept).federation
        client = int(context.node_config["partition-id"])
        sizes = {str(s): int(federation.split(s).sizes[client]) for s in SPLITS}
        return Message(hello_of(federation.names[client], sizes), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        return Message(_simulated(folder, make, loss, kept).answer(message.content), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    return app


_sites: dict[str, Site] = {}  # of this worker process


def _simulated(folder: str, make: ModelMaker, loss: Loss, views: tuple[View, ...]) -> Site:
    if folder not in _sites:
        import torch

        from coterie.engines.flower.world import read_world

        torch.set_num_threads(1)
        _sites.clear()
        _sites[folder] = Site(read_world(Path(folder), views), make, loss, Path(folder) / "memory")
    return _sites[folder]
