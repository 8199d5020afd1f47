"""Clusters by round, thinned out for display: sizes, moves between clusters, and the true groups of members."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.runs.reading import RunData

Ints = NDArray[np.int64]

MOST_CLUSTERS = 12  # shown one by one; the smallest of more are shown as one
MOST_COLUMNS = 10  # rounds shown in a flow
NOT_SEEN, OTHERS = -1, -2  # labels that are not cluster numbers


@dataclass(frozen=True)
class Flow:
    """Moves of clients between clusters."""

    rounds: list[int]  # one per column; 0 is the start
    nodes: list[list[tuple[int, int]]]  # for each column: cluster, clients
    links: list[list[tuple[int, int, int]]]  # between columns: from, to, clients


def shown_clusters(sizes: list[list[int]]) -> list[int]:
    """The clusters to show one by one: all, or the largest over all rounds, in order of their numbers.

    >>> shown_clusters([[3, 1], [2, 1, 1]])
    [0, 1, 2]
    """
    count = max((len(row) for row in sizes), default=0)
    total = np.zeros(count)
    for row in sizes:
        total[: len(row)] += row
    if count <= MOST_CLUSTERS:
        return list(range(count))
    largest = np.argsort(-total, kind="stable")[: MOST_CLUSTERS - 1]
    return sorted(int(number) for number in largest)


def is_alone(sizes: list[list[int]]) -> bool:
    """Whether every client is a cluster of its own: then there is nothing to show."""
    return bool(sizes) and len(sizes[-1]) > MOST_CLUSTERS and max(sizes[-1]) <= 1


def sizes_of(run: RunData) -> tuple[list[int], Ints]:
    """The clusters to show, OTHERS last if there are more, and their sizes by round [T, K]."""
    shown = shown_clusters(run.sizes)
    table = np.zeros((len(run.sizes), max(len(row) for row in run.sizes)), dtype=np.int64)
    for i, row in enumerate(run.sizes):
        table[i, : len(row)] = row
    if len(shown) == table.shape[1]:
        return shown, table
    rest = table.sum(1) - table[:, shown].sum(1)
    return [*shown, OTHERS], np.column_stack([table[:, shown], rest])


def confusion_of(run: RunData) -> tuple[list[int], Ints] | None:
    """The non-empty clusters and their clients of each true group [K, G]; None if clusters or groups are unknown."""
    clusters, groups = run.clusters, run.group_positions()
    if clusters is None or groups is None or not (clusters >= 0).any():
        return None
    seen = clusters >= 0
    numbers, rows = np.unique(clusters[seen], return_inverse=True)
    table = np.zeros((len(numbers), int(groups.max()) + 1), dtype=np.int64)
    np.add.at(table, (rows, groups[seen]), 1)
    return numbers.tolist(), table


def flow_of_run(run: RunData) -> Flow | None:
    """The moves between clusters in a run; None before its first round."""
    if run.labels is None or len(run.labels) < 2:
        return None
    return flow_of(run.labels, shown_clusters([np.bincount(row[row >= 0]).tolist() for row in run.labels]))


def flow_of(labels: Ints, shown: list[int]) -> Flow:
    """The flow of clients, from their labels [S, N] after the start and each round.

    Columns are the start, the last round, and rounds in between that divide the moves into equal parts.

    >>> flow_of(np.array([[0, 0, 1], [0, 1, 1], [0, 1, 1]]), [0, 1])
    Flow(rounds=[0, 1, 2], nodes=[[(0, 2), (1, 1)], [(0, 1), (1, 2)], [(0, 1), (1, 2)]], \
links=[[(0, 0, 1), (0, 1, 1), (1, 1, 1)], [(0, 0, 1), (1, 1, 2)]])
    """
    known = np.isin(labels, [*shown, NOT_SEEN])
    seen = np.where(known, labels, OTHERS)
    columns = _columns((seen[1:] != seen[:-1]).sum(1))
    nodes = [[(int(k), int(n)) for k, n in zip(*np.unique(seen[c], return_counts=True), strict=True)] for c in columns]
    links = []
    for one, other in itertools.pairwise(columns):
        pairs, counts = np.unique(np.stack([seen[one], seen[other]], axis=1), axis=0, return_counts=True)
        links.append([(int(a), int(b), int(n)) for (a, b), n in zip(pairs, counts, strict=True)])
    return Flow(columns, nodes, links)


def _columns(moves: Ints) -> list[int]:
    """The states (0: the start) to show as columns, given the number of moves before each later state."""
    last = len(moves)
    if last + 1 <= MOST_COLUMNS:
        return list(range(last + 1))
    total = moves.cumsum()
    picked = {0, last}
    if total[-1]:
        parts = np.linspace(0, total[-1], MOST_COLUMNS - 1)[1:]
        picked |= {int(np.searchsorted(total, part)) + 1 for part in parts}
    elif last > 1:
        picked |= {round(place) for place in np.linspace(0, last, 4)}
    return sorted(picked)
