"""The engine over Flower: simulated by `coterie run --engine flower`, at real sites by `coterie.deploy`."""

from __future__ import annotations

from coterie.errors import MissingExtra


def require_flower(what: str) -> None:
    """Raise MissingExtra unless Flower is installed."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise MissingExtra(what, "flower") from error
