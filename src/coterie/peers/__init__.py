"""Other simulators that `coterie bench` measures where they are installed, one file each.

A peer gets the clients, start weights and batches of our engine and trains the same round of FedAvg, used as its own
documentation says. It is imported only when it is measured.
"""

from __future__ import annotations

from coterie.errors import ConfigError, UnknownName
from coterie.peers.base import Peer, Round
from coterie.peers.fedlab import FedLab
from coterie.peers.flower import Flower
from coterie.peers.pfl_research import PflResearch

__all__ = ["PEERS", "Peer", "Round", "choose"]

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (PflResearch, FedLab, Flower)}


def choose(asked: str) -> list[str]:
    """The peers that `--peers` means: those installed (`auto`), none, or those named.

    >>> choose("none")
    []
    """
    if asked == "auto":
        return [name for name, peer in PEERS.items() if peer.installed()]
    if asked == "none":
        return []
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in PEERS:
            raise UnknownName("peer", name, [*PEERS, "auto", "none"])
        if not PEERS[name].installed():
            raise ConfigError(f"Peer '{name}' is not installed here. `make bench-peers` makes an environment with it.")
    return list(dict.fromkeys(names))
