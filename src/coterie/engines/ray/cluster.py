"""Ray on this machine, started here, or a cluster that is running already."""

from __future__ import annotations

import logging
import socket
import warnings
from typing import Any

import ray

from coterie.engines.ray.place import Place, find_place
from coterie.engines.settings import RaySettings
from coterie.errors import ConfigError, EngineError

_STORE = 256 << 20  # bytes of shared memory for messages
_REACH = 20.0  # seconds for a cluster to accept a connection

_started_here = False  # Ray on this machine, by this process


def connect(settings: RaySettings, device: str, data_bytes: int) -> Place:
    """Start Ray on this machine, or connect to the cluster of the settings; find a place for the workers."""
    if not ray.is_initialized():
        _start(settings.address, data_bytes)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return find_place(settings, device, nodes, counts_cpus=not _started_here)


def _start(address: str | None, data_bytes: int) -> None:
    global _started_here
    more: dict[str, Any] = {}
    if address is None:
        # One core: the number decides only how many idle processes Ray starts beside the workers.
        more = {"include_dashboard": False, "num_cpus": 1, "object_store_memory": _STORE + data_bytes}
    host, _, port = (address or "").rpartition(":")
    if address not in (None, "auto") and not (host and port.isdecimal()):
        raise ConfigError(f"engine.address must be 'auto' or HOST:PORT. Got '{address}' instead.")
    try:
        if host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _REACH).close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **more)
    except (OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address is None else f"at engine.address={address}"
        hint = "" if address is None else "; start a cluster with 'ray start --head', or leave engine.address out"
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise EngineError(f"Ray cannot be reached {where}: {reason}{hint}.") from error
    _started_here = address is None
