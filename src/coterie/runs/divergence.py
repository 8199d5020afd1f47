"""Whether training has diverged, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.client.task import Task
from coterie.data.federation import Federation
from coterie.engines.base import NOT_FINITE, TOO_LARGE, Failure
from coterie.nets.flat import cross_entropy, mse

_FAR = 10  # times the loss of guessing, or of the first round where that is not known
_LARGE = 30.0  # root mean square of a feature that should be scaled
STANDARDIZE = "scale the features (--set dataset.standardize=true, in Python standardize=True)"


def divergence(
    rows: Sequence[Mapping[str, Any]], failures: Sequence[Failure], guessing: float | None, federation: Federation
) -> str | None:
    """Why a run has diverged and what to do, in one sentence; None if it has not."""
    losses = [row["loss"]["macro"] for row in rows if row.get("loss")]
    # All answers of the last round: clients whose models explode are left out, and the model stays as it is.
    lost = [f for f in failures if rows and f.round == rows[-1]["round"] and f.reason in (NOT_FINITE, TOO_LARGE)]
    limit = _FAR * (guessing if guessing is not None else losses[0]) if losses else math.inf
    if rows and len({failure.client for failure in lost}) >= rows[-1]["cohort"]:
        why = "in the last round no client had a usable model"
    elif losses and not math.isfinite(losses[-1]):
        why = "the loss is not finite"
    elif losses and losses[-1] > limit:
        than = f"guessing has {guessing:.4g}" if guessing is not None else f"it was {losses[0]:.4g} after one round"
        why = f"the loss is {losses[-1]:.4g}, where {than}"
    else:
        return None
    scaled = federation.x.dtype.is_floating_point and (federation.mean, federation.std) == (0.0, 1.0)
    return f"training diverged: {why}; use a smaller --lr" + (f", or {STANDARDIZE}." if scaled else ".")


def loss_of_guessing(task: Task, federation: Federation) -> float | None:
    """The loss of a model that knows nothing of the inputs; None if that is not known."""
    y = federation.y
    if task.loss is cross_entropy:
        classes = task.num_classes or (y.shape[1] if y.dim() > 1 else 1)
        return math.log(max(2, classes))
    if task.loss is mse and not task.num_classes and len(federation.train.index) and len(y):
        own = y[federation.train.index].double()
        return float(own.var(0, correction=0).mean()) or None
    return None


def large_features(federation: Federation) -> str | None:
    """A note about features that are not scaled and so large that training may diverge; None if there are none."""
    if not federation.x.is_floating_point() or federation.x.dim() != 2 or not len(federation.x):
        return None
    if (federation.mean, federation.std) != (0.0, 1.0):
        return None
    largest = float(federation.x[federation.train.index].double().square().mean(0).sqrt().max())
    return f"features are not scaled and have values around {largest:.3g}; {STANDARDIZE}" if largest > _LARGE else None
