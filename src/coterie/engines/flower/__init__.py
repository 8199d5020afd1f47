"""The engine over Flower messages: `coterie run --engine flower` simulates, `coterie.deploy` runs at real sites."""

from __future__ import annotations

from coterie.errors import MissingExtra


def require_flower(what: str) -> None:
    """Say which extra is missing, if it is."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise MissingExtra(what, "flower") from error
