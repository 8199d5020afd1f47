"""A metric of your own: one function, named by the place where records keep it.

It appears in rounds, in the summary, in the tables of `compare` and in the report by itself. The names of the
function's parameters say what it is computed from; `coterie.runs.metrics` lists them.
"""

from __future__ import annotations

import numpy as np

import coterie
from coterie.runs.metrics import PERCENT, Floats, Ints, register_metric


@register_metric("accuracy.worst_cluster", "worst cluster", "mean accuracy of the worst cluster's clients", PERCENT)
def worst_cluster(accuracy: Floats, clusters: Ints) -> float:
    """Of the clients that have test samples: how good the model of the worst cluster is."""
    return min(float(accuracy[clusters == k].mean()) for k in np.unique(clusters))


if __name__ == "__main__":
    result = coterie.run("fesem", "rotated-digits", rounds=5)
    for key, value in result.summary["accuracy"].items():
        print(f"{key}: accuracy {value:.4f}")
