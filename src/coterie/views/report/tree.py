"""The cuts of a run as a tree: from all clients to the clusters of the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.views.decisions import sentence

Node = dict[str, Any]


def tree_of(decisions: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> Node | None:
    """The cuts from one cluster of all clients to clusters of these sizes; None if they do not lead there.

    A node is a cut (round, z, text, parts, and as `size` the clients that gave evidence), a cluster of the end
    (cluster, size), or one that was removed, or merged with another (the round).

    >>> tree_of([{"round": 4, "what": "cut", "clusters": [0, 1], "sizes": [2, 1], "z": 20.5}], [3, 1])["parts"]
    [{'cluster': 0, 'size': 3}, {'cluster': 1, 'size': 1}]
    """
    root: Node = {}
    clusters = [root]
    for decision in decisions:
        numbers = decision["clusters"]
        if decision["what"] == "cut":
            first, *fresh = numbers or [-1]
            if not 0 <= first < len(clusters) or fresh != list(range(len(clusters), len(clusters) + len(fresh))):
                return None
            parts: list[Node] = [{} for _ in numbers]
            size, text = sum(decision["sizes"]), sentence(decision)
            clusters[first] |= {"round": decision["round"], "z": decision.get("z"), "size": size}
            clusters[first] |= {"text": text, "parts": parts}
            clusters = [*clusters[:first], parts[0], *clusters[first + 1 :], *parts[1:]]
        elif decision["what"] == "removed":
            for number, node in enumerate(clusters):
                if number in numbers:
                    node["removed"] = decision["round"]
            clusters = [node for node in clusters if "removed" not in node]
        elif decision["what"] == "merged":
            if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1] < len(clusters):
                return None
            clusters.pop(numbers[1])["merged"] = decision["round"]
    if len(clusters) != len(sizes):
        return None
    for number, (node, size) in enumerate(zip(clusters, sizes, strict=True)):
        node |= {"cluster": number, "size": size}
    return root
