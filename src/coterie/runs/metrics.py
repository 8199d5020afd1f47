"""Numbers of a round: accuracy, F1, fairness, agreement with true groups, churn.

"micro" weighs a client by its test samples, "macro" is the plain mean over clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BEST_ROUNDS = 5
BOTTOM_CLIENTS = 5
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def spread(values: Floats, samples: Ints) -> dict[str, float] | None:
    """Micro and macro mean of a client score; None where no client has samples.

    >>> spread(np.array([1.0, 0.0]), np.array([3, 1]))
    {'micro': 0.75, 'macro': 0.5}
    """
    has = samples > 0
    if not has.any():
        return None
    micro = float(np.average(values[has], weights=samples[has]))
    return {"micro": micro, "macro": float(values[has].mean())}


def fairness(accuracy: Floats, samples: Ints) -> dict[str, float]:
    """Mean accuracy of the 5 worst clients, and of the worst tenth."""
    ordered = np.sort(accuracy[samples > 0])
    tenth = max(1, round(0.1 * len(ordered)))
    return {"bottom5": float(ordered[:BOTTOM_CLIENTS].mean()), "worst_decile": float(ordered[:tenth].mean())}


def quantiles(scores: Mapping[str, NDArray[Any]]) -> dict[str, list[float]]:
    """How a score is spread over the clients: the tenth, quarter, half, three quarters and nine tenths.

    >>> quantiles({"samples": np.ones(5), "accuracy": np.array([0.0, 0.25, 0.5, 0.75, 1.0])})
    {'accuracy': [0.1, 0.25, 0.5, 0.75, 0.9]}
    """
    has = scores["samples"] > 0
    names = [name for name in ("accuracy", "f1", "loss") if name in scores and has.any()]
    return {name: np.quantile(scores[name][has], QUANTILES).tolist() for name in names}


def best_rounds(micro: Sequence[float]) -> float | None:
    """Mean of the five best rounds' micro accuracy (FedDSMIC's way of reporting)."""
    if not micro:
        return None
    return float(np.sort(np.asarray(micro))[::-1][:BEST_ROUNDS].mean())


def contingency(labels: Ints, groups: Ints) -> NDArray[np.float64]:
    """How many clients are in each pair of (cluster, group)."""
    _, rows = np.unique(labels, return_inverse=True)
    _, columns = np.unique(groups, return_inverse=True)
    table = np.zeros((rows.max() + 1, columns.max() + 1))
    np.add.at(table, (rows, columns), 1)
    return table


def adjusted_rand(labels: Ints, groups: Ints) -> float:
    """Adjusted Rand index (Hubert and Arabie 1985): 1 for the same partition, about 0 for chance.

    >>> adjusted_rand(np.array([0, 0, 1, 1]), np.array([5, 5, 2, 2]))
    1.0
    """
    from sklearn.metrics import adjusted_rand_score

    return min(1.0, float(adjusted_rand_score(groups, labels)))  # rounding may go beyond


def normalized_mutual_information(labels: Ints, groups: Ints) -> float:
    """Mutual information over the mean of both entropies."""
    from sklearn.metrics import normalized_mutual_info_score

    return min(1.0, float(normalized_mutual_info_score(groups, labels)))


def purity(labels: Ints, groups: Ints) -> float:
    """Share of clients that are in a cluster where their group is the largest."""
    return float(contingency(labels, groups).max(1).sum() / len(labels))


def agreement(labels: Ints, groups: Ints | None) -> dict[str, float | None]:
    """ARI, NMI and purity over the clients met so far; None where there are no true groups."""
    met = labels >= 0
    if groups is None or not met.any():
        return {"ari": None, "nmi": None, "purity": None}
    found, true = labels[met], groups[met]
    return {
        "ari": adjusted_rand(found, true),
        "nmi": normalized_mutual_information(found, true),
        "purity": purity(found, true),
    }


def churn(before: Ints, after: Ints) -> float:
    """Share of the clients met before whose label has changed."""
    met = before >= 0
    known = after[: len(before)]  # clients may have joined since
    return float((before[met] != known[met]).mean()) if met.any() else 0.0


def cluster_sizes(labels: Ints, num_clusters: int) -> list[int]:
    """Members of each cluster, empty ones included."""
    met = labels[labels >= 0]
    return np.bincount(met, minlength=num_clusters).tolist() if len(met) or num_clusters else []


def evaluation(scores: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The numbers of one evaluation from the clients' scores [N]."""
    samples = scores["samples"].astype(np.int64)
    found: dict[str, Any] = {"accuracy": None, "f1": None, "loss": None}
    if "loss" in scores:
        found["loss"] = spread(scores["loss"], samples)
    if "accuracy" in scores and (samples > 0).any():
        found["accuracy"] = (spread(scores["accuracy"], samples) or {}) | fairness(scores["accuracy"], samples)
        found["f1"] = spread(scores["f1"], samples)
    return found
