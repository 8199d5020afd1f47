"""Runs over real sites with Flower; see docs/deployment.md.

    from coterie.deploy import client_app, server_app   # in a Flower app

Requires `pip install 'coterie[flower]'`; Flower is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.engines.flower import require_flower

__all__ = ["client_app", "server_app"]


def client_app(site: Any, mods: Sequence[Any] = ()) -> Any:
    """The ClientApp of a site: `site` is the user's module with `model()` and `load_data(context)`.

    `mods` are Flower mods, such as `coterie.deploy.mods.clip_and_noise`.
    """
    require_flower("coterie.deploy")
    from coterie.deploy.client import deployed_client_app

    return deployed_client_app(site, mods)


def server_app(site: Any) -> Any:
    """The ServerApp of a run over sites."""
    require_flower("coterie.deploy")
    from coterie.deploy.server import deployed_server_app

    return deployed_server_app(site)
