"""Moves of clients between clusters."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coterie.views.report.flow import MOST_CLUSTERS, MOST_COLUMNS, NOT_SEEN, OTHERS, flow_of, is_alone, shown_clusters


def test_columns_stand_where_clients_move():
    labels = np.zeros((101, 10), dtype=np.int64)
    for number, place in enumerate((3, 4, 5, 6, 7, 40, 41, 42, 43, 90)):
        labels[place:, number] = 1
    flow = flow_of(labels, [0, 1])
    assert flow.rounds[0] == 0
    assert flow.rounds[-1] == 100
    assert len(flow.rounds) <= MOST_COLUMNS
    assert not any(43 < number < 90 for number in flow.rounds)
    assert sum(n for links in flow.links for a, b, n in links if a != b) == 10


def test_nobody_moves_in_a_long_run():
    flow = flow_of(np.zeros((101, 4), dtype=np.int64), [0])
    assert flow.rounds == [0, 33, 67, 100]
    assert all(links == [(0, 0, 4)] for links in flow.links)


def test_small_clusters_of_many_are_taken_together():
    sizes = [[1] * 20 + [30]]
    shown = shown_clusters(sizes)
    assert len(shown) == MOST_CLUSTERS - 1
    assert 20 in shown
    labels = np.array([[*range(21), -1]] * 2)
    flow = flow_of(labels, shown)
    assert dict(flow.nodes[0])[OTHERS] == 21 - len(shown)
    assert dict(flow.nodes[0])[NOT_SEEN] == 1


def test_clients_that_are_all_alone():
    assert is_alone([[1] * 40])
    assert not is_alone([[10, 10]])
    assert not is_alone([[1, 1]])
    assert not is_alone([])


@given(arrays(np.int64, st.tuples(st.integers(2, 30), st.integers(1, 8)), elements=st.integers(-1, 5)))
def test_no_client_is_lost_on_the_way(labels: np.ndarray):  # type: ignore[type-arg]
    flow = flow_of(labels, shown_clusters([np.bincount(row[row >= 0]).tolist() for row in labels]))
    clients = labels.shape[1]
    assert all(sum(n for _, n in column) == clients for column in flow.nodes)
    for column, links, after in zip(flow.nodes[:-1], flow.links, flow.nodes[1:], strict=True):
        assert sum(n for _, _, n in links) == clients
        for k, n in column:
            assert sum(m for a, _, m in links if a == k) == n
        for k, n in after:
            assert sum(m for _, b, m in links if b == k) == n
