"""The ClientApp of a site, and the settings of its `task.py`.

Flower starts a process for every message, so this module imports torch, Flower and little else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from coterie.engines.flower.link import hello_of
from coterie.engines.flower.site import Site, one_client
from coterie.errors import ConfigError
from coterie.methods.base import load_method_of
from coterie.nets.flat import LOSSES, Loss
from coterie.nets.registry import ModelMaker


def deployed_client_app(site: Any, mods: Sequence[Any] = ()) -> ClientApp:
    """The app of one site: `site` has `model()`, `load_data(context)`, `CLASSES`, `INPUT` and maybe `name(context)`."""
    app = ClientApp(mods=list(mods))

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        return Message(hello_of(_federation(site, context), 0), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        federation = _federation(site, context)
        device = str(context.node_config.get("device", "cpu"))
        folder = state_folder(context)
        answering = Site(federation, maker_of(site), loss_of(site), folder, device, load_method_of, secret=True)
        return Message(answering.answer(message.content), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    return app


def _federation(site: Any, context: Context) -> Any:
    name = str(site.name(context)) if hasattr(site, "name") else str(context.node_config.get("name", ""))
    if not name:
        raise ConfigError("This node has no name; start it with --node-config 'name=\"...\"' or define name(context).")
    made, said = one_client(name, site.load_data(context), classes_of(site)), dtype_of(site)
    if said is not None and made.x.dtype != said:
        raise ConfigError(f"DTYPE of task.py is {said}, and load_data returns samples of {made.x.dtype}.")
    return made


def state_folder(context: Context) -> Path:
    """The folder of this client's memory: `state-dir` of the node config, else in the user's data folder."""
    named = context.node_config.get("state-dir")
    if named:
        return Path(str(named))
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "coterie" / "memory"


def classes_of(site: Any) -> int:
    """The number of classes; 0 for regression."""
    found = getattr(site, "CLASSES", None)
    if not isinstance(found, int) or found < 0:
        raise ConfigError(f"CLASSES of task.py must be an int >= 0 (0 for regression). Got {found!r} instead.")
    return found


def dtype_of(site: Any) -> torch.dtype | None:
    """The type of the samples that `load_data` returns, if task.py says it: exported models say how they are scaled."""
    found = getattr(site, "DTYPE", None)
    known = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32}
    if found is not None and found not in known:
        raise ConfigError(f"DTYPE of task.py must be one of {', '.join(known)}. Got {found!r} instead.")
    return None if found is None else known[found]


def maker_of(site: Any) -> ModelMaker:
    """The maker of the site's model."""
    shape = getattr(site, "INPUT", None)
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ConfigError(f"INPUT of task.py must be a sample's shape, such as (1, 28, 28). Got {shape!r} instead.")
    if not callable(getattr(site, "model", None)):
        raise ConfigError("task.py must define model(), which returns a torch.nn.Module.")
    return ModelMaker(site.model, {}, shape, classes_of(site) or 1)


def loss_of(site: Any) -> Loss:
    """The loss: `LOSS` of the site, a name or a function; by default cross-entropy."""
    found = getattr(site, "LOSS", "cross_entropy")
    if callable(found):
        return found  # type: ignore[no-any-return]
    if found not in LOSSES:
        raise ConfigError(f"LOSS of task.py must be a function or one of {', '.join(LOSSES)}. Got '{found}' instead.")
    return LOSSES[found]
