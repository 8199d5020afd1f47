"""The tree of cuts."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.views.report.tree import tree_of


def cut(number: int, clusters: list[int], sizes: list[int]) -> dict[str, Any]:
    return {"round": number, "what": "cut", "clusters": clusters, "sizes": sizes, "z": 20.5}


def removed(number: int, *clusters: int) -> dict[str, Any]:
    return {"round": number, "what": "removed", "clusters": list(clusters)}


def merged(number: int, *clusters: int) -> dict[str, Any]:
    return {"round": number, "what": "merged", "clusters": list(clusters), "sizes": [3, 2], "t": 0.5}


def shape(node: dict[str, Any]) -> Any:
    """A tree in short: leaves as cluster and size, those that are gone as text, cuts as their round and parts."""
    if "parts" in node:
        return node["round"], [shape(part) for part in node["parts"]]
    if "merged" in node:
        return f"merged in {node['merged']}"
    return f"gone in {node['removed']}" if "removed" in node else (node["cluster"], node["size"])


def test_cuts_branch_and_what_is_not_a_cut_does_not():
    refused = {"round": 6, "what": "refused", "clusters": [0], "sizes": [4, 1], "z": 2.0}
    found = tree_of([cut(4, [0, 1, 2], [5, 3, 2]), refused, cut(10, [1, 3], [2, 1])], [7, 2, 2, 3])
    assert found is not None
    assert shape(found) == (4, [(0, 7), (10, [(1, 2), (3, 3)]), (2, 2)])
    assert (found["size"], found["z"]) == (10, 20.5)
    assert found["text"] == "Round 4: cluster 0 was cut into 3 (5, 3, 2 clients), z = 20."


def test_numbers_after_a_removed_cluster_are_lower():
    decisions = [cut(4, [0, 1, 2, 3], [1, 1, 1, 1]), removed(7, 0, 2), cut(9, [1, 2], [2, 1])]
    found = tree_of(decisions, [5, 6, 7])
    assert found is not None
    assert shape(found) == (4, ["gone in 7", (0, 5), "gone in 7", (9, [(1, 6), (2, 7)])])


def test_two_mergers_of_one_round_and_a_later_cut():
    """Mergers of a round are told from the highest number down, in numbers of before the round."""
    decisions = [cut(2, [0, 1, 2, 3], [1] * 4), merged(6, 0, 3), merged(6, 1, 2), cut(9, [0, 2], [2, 1])]
    found = tree_of(decisions, [5, 6, 7])
    assert found is not None
    assert shape(found) == (2, [(9, [(0, 5), (2, 7)]), (1, 6), "merged in 6", "merged in 6"])


def test_without_a_cut_all_clients_are_one_cluster():
    assert tree_of([], [40]) == {"cluster": 0, "size": 40}


@pytest.mark.parametrize(
    ("decisions", "sizes"),
    [
        ([], [20, 20]),  # a method that starts with two
        ([cut(4, [0, 1], [1, 1])], [20, 10, 10]),
        ([cut(4, [0, 2], [1, 1])], [20, 20]),
        ([cut(4, [1, 2], [1, 1])], [20, 20]),
        ([cut(4, [], [])], [40]),
        ([cut(4, [0, 1], [1, 1]), merged(6, 0, 2)], [20]),
        ([cut(4, [0, 1], [1, 1]), merged(6, 1)], [20]),
    ],
)
def test_cuts_that_do_not_lead_to_the_clusters_are_no_tree(decisions: list[dict[str, Any]], sizes: list[int]):
    assert tree_of(decisions, sizes) is None
