"""What clip and noise at the clients guarantee: epsilon, computed by the accountant of the extra `privacy`.

Imports no torch: `show` is fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from coterie.errors import MissingExtra, RunError

DELTA = 1e-5  # the probability with which epsilon may not hold


def epsilon(noise: float, releases: int, delta: float = DELTA) -> float:
    """Epsilon of one client against the server, which sees each of its `releases` noised vectors.

    Two datasets of a client may differ in everything, so a clipped vector may change by twice the clip. That others
    take part, or that not all do, does not help: the server knows whose vector it is. MissingExtra without the
    accountant.
    """
    if not releases:
        return 0.0
    if not noise:
        return math.inf
    try:
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise MissingExtra("Computing epsilon", "privacy") from error
    accountant = RdpAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise / 2), releases))
    return float(accountant.get_epsilon(delta))


def with_epsilon(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary whose `privacy` has epsilon and delta; epsilon is None without noise, or without the accountant."""
    found = summary.get("privacy")
    if not found:
        return summary
    try:
        value = _of(found)
    except MissingExtra:
        value = math.inf
    told = {"epsilon": value if math.isfinite(value) else None, "delta": DELTA}
    return {**summary, "privacy": {**found, **told}}


def privacy_lines(privacy: Mapping[str, Any]) -> list[str]:
    """The record of a run in words: what was noised, what that guarantees, and what it does not cover."""
    noised, exact = (", ".join(map(str, privacy[key])) or "nothing" for key in ("noised", "exact"))
    try:
        value = _of(privacy)
        said = f"epsilon {value:.4g} at delta {DELTA:g}" if math.isfinite(value) else "no noise, so no guarantee"
    except MissingExtra as error:
        said = f"epsilon is not known. {error}"
    return [
        f"clip {privacy['clip']:g}, noise {privacy['noise']:g}, participation {privacy['participation']:g}, "
        f"{privacy['rounds']} rounds; a client sent up to {privacy['releases']} noised vectors",
        f"for {noised}, against the server: {said}",
        f"not covered, sent without noise: {exact}",
    ]


def _of(privacy: Mapping[str, Any]) -> float:
    noise, releases = privacy.get("noise"), privacy.get("releases")
    if isinstance(noise, (int, float)) and isinstance(releases, int) and noise >= 0 and 0 <= releases < 1 << 53:
        return epsilon(noise, releases)
    raise RunError("The summary is damaged: noise or releases of its privacy are not numbers.")
