"""A map of the clients' models: PCA and t-SNE of their sketches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.pictures import spread_evenly
from coterie.runs.reading import RunData

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_POINTS = 1000  # more are thinned out


def mapped_clients(run: RunData) -> Ints:
    """The clients on the map: those with a sketch, thinned out."""
    if run.sketches is None or run.sketched is None:
        return np.zeros(0, dtype=np.int64)
    has = np.flatnonzero(run.sketched > 0)
    return has[spread_evenly(len(has), MOST_POINTS)]


def principal(rows: Floats) -> tuple[Floats, list[float]]:
    """The first two principal components [n, 2], and the share of the variance that each explains.

    >>> points, share = principal(np.array([[0.0, 0.0], [2.0, 0.0], [4.0, 0.0]]))
    >>> points[:, 0].round(6).tolist(), [round(s, 6) for s in share]
    ([-2.0, 0.0, 2.0], [1.0, 0.0])
    """
    centered = rows - rows.mean(0)
    left, scale, right = np.linalg.svd(centered, full_matrices=False)
    points = np.zeros((len(rows), 2))
    wide = min(2, len(scale))
    points[:, :wide] = (left * scale)[:, :wide]
    for axis in range(wide):  # an SVD leaves the sign open: make the largest entry of an axis positive
        if right[axis, np.abs(right[axis]).argmax()] < 0:
            points[:, axis] *= -1
    total = float((scale**2).sum())
    share = [(float(value) ** 2 / total if total else 0.0) for value in scale[:2]]
    return points, [*share, 0.0, 0.0][:2]


def neighbours(rows: Floats) -> Floats | None:
    """t-SNE (van der Maaten and Hinton 2008) in two dimensions [n, 2]; None for fewer than 5 rows."""
    if len(rows) < 5:
        return None
    return _tsne(rows.astype(np.float32).tobytes(), rows.shape)


@functools.lru_cache(maxsize=64)
def _tsne(content: bytes, shape: tuple[int, int]) -> Floats:
    from sklearn.manifold import TSNE

    rows = np.frombuffer(content, dtype=np.float32).reshape(shape)
    scale = float(np.abs(rows - rows.mean(0)).max()) or 1.0
    perplexity = float(np.clip(len(rows) / 6, 1.0, 30.0))  # few clients have small neighbourhoods
    # A PCA of identical models has no spread, and TSNE would divide by zero.
    spread = float((rows - rows.mean(0)).std())
    start: Any = "pca" if spread > 1e-6 * scale and spread > 0 else "random"
    made = TSNE(2, perplexity=perplexity, init=start, random_state=0, max_iter=500, n_jobs=1)
    found: Floats = made.fit_transform((rows - rows.mean(0)) / scale).astype(np.float64)
    return found
