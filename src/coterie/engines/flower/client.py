"""The ClientApp of a simulation: its nodes are the clients of one federation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn

from coterie.data.transforms import View
from coterie.engines.flower.link import hello_of
from coterie.engines.flower.site import Site
from coterie.nets.flat import Loss
from coterie.randomness import Rng


def simulated_client_app(make: Callable[[Rng], nn.Module], loss: Loss, views: Sequence[View], folder: str) -> ClientApp:
    """The app of all clients of the federation stored in `folder`; a node's partition id is its client."""
    app = ClientApp()
    kept = tuple(views)

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        federation = _simulated(folder, make, loss, kept).federation
        return Message(hello_of(federation, int(context.node_config["partition-id"])), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        return Message(_simulated(folder, make, loss, kept).answer(message.content), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    return app


_sites: dict[str, Site] = {}  # in this worker process


def _simulated(folder: str, make: Callable[[Rng], nn.Module], loss: Loss, views: tuple[View, ...]) -> Site:
    if folder not in _sites:
        import torch

        from coterie.engines.flower.storage import load_federation

        torch.set_num_threads(1)
        _sites.clear()
        _sites[folder] = Site(load_federation(Path(folder), views), make, loss, Path(folder) / "memory")
    return _sites[folder]
