"""Decisions as sentences."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.views.decisions import legend, sentence, sentences, without_repeats


def move(*clients: str, rose: int) -> dict[str, Any]:
    moves = [{"client": client, "from_cluster": 2, "to_cluster": 0} for client in clients]
    return {"round": 12, "what": "move", "clusters": [], "moves": moves, "loss_rose": rose}


def looked_at(number: int, cluster: int, z: float, q: float, **more: Any) -> dict[str, Any]:
    return {"round": number, "what": "refused", "clusters": [cluster], "sizes": [3, 2], "z": z, "q": q, **more}


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (
            {"round": 4, "what": "cut", "clusters": [0, 1], "sizes": [6, 4], "z": 387.4, "q": 55.2},
            "Round 4: cluster 0 was cut into 2 (6, 4 clients), z = 387, q = 55.",
        ),
        (
            {"round": 5, "what": "cut", "clusters": [1, 4], "sizes": [6, 4], "z": 1e9, "q": 0.45, "t": 3.14},
            "Round 5: cluster 1 was cut into 2 (6, 4 clients) after a trial, z = ∞, q = 0.45, t = 3.1.",
        ),
        (
            {"round": 9, "what": "cut", "clusters": list(range(20)), "sizes": [1] * 20, "z": 30.0, "q": 12.0},
            "Round 9: cluster 0 was cut into 20 (1, 1, 1, 1, 1, 1, 1, 1 and 12 more clients), z = 30, q = 12.",
        ),
        (
            {"round": 4, "what": "proposed", "clusters": [2], "sizes": [5, 3], "z": 11.0, "q": 0.9},
            "Round 4: members of cluster 2 try a cut into 2 (5, 3 clients), z = 11, q = 0.9.",
        ),
        (looked_at(7, 3, -1.304, -0.49), "Round 7: cluster 3 was not cut (3, 2 clients), z = -1.3, q = -0.49."),
        (
            looked_at(7, 3, 12.0, 0.5, t=0.25),
            "Round 7: cluster 3 was not cut (3, 2 clients) after a trial, z = 12, q = 0.5, t = 0.25.",
        ),
        (move("a", rose=1), "Round 12: a moved from cluster 2 to 0, after its loss rose."),
        (move("a", rose=0), "Round 12: a moved from cluster 2 to 0, because its place was in doubt."),
        (move("a", "b", "c", rose=3), "Round 12: a and 2 more moved, after their loss rose."),
        (move("a", "b", "c", rose=1), "Round 12: a and 2 more moved, 1 of them after its loss rose."),
        (move("a", "b", "c", rose=2), "Round 12: a and 2 more moved, 2 of them after their loss rose."),
        (move("a", "b", rose=0), "Round 12: a and 1 more moved, because their place was in doubt."),
        (
            {"round": 3, "what": "removed", "clusters": [1]},
            "Round 3: cluster 1 was empty and removed; the others are numbered anew.",
        ),
        (
            {"round": 3, "what": "removed", "clusters": [1, 4]},
            "Round 3: clusters 1, 4 were empty and removed; the others are numbered anew.",
        ),
        (
            {"round": 6, "what": "merged", "clusters": [1, 4], "sizes": [7, 3], "t": 1.42},
            "Round 6: clusters 1, 4 were merged (7, 3 clients) after a trial, t = 1.4; the others are numbered anew.",
        ),
        (
            {"round": 6, "what": "apart", "clusters": [0, 2], "sizes": [7, 3], "t": 9.28},
            "Round 6: clusters 0, 2 were not merged after a trial, t = 9.3.",
        ),
        ({"round": 3, "what": "joined", "clusters": [1, 4], "z": 0.2}, "Round 3: joined, clusters 1, 4, z = 0.2."),
    ],
)
def test_a_decision_in_words(decision: dict[str, Any], text: str):
    assert sentence(decision) == text


def test_cuts_refused_one_after_another_are_one_sentence():
    cut = {"round": 4, "what": "cut", "clusters": [0, 1], "sizes": [6, 4], "z": 20.0, "q": 11.0}
    first = [looked_at(10, 0, 4.2, 0.3), looked_at(10, 1, 1.0, 0.84)]
    later = [looked_at(12, 1, 458.2, 0.1), looked_at(46, 1, -2.0, -0.3)]
    tried = [looked_at(47, 1, 11.0, 0.5, t=-1.5), looked_at(47, 3, 12.0, 0.4, t=-0.5)]
    assert sentences([cut, *first, move("a", rose=1), *later, *tried]) == [
        sentence(cut),
        "Round 10: clusters 0, 1 were not cut, z up to 4.2, q up to 0.84.",
        sentence(move("a", rose=1)),
        "Rounds 12 to 46: cluster 1 was not cut, z up to 458, q up to 0.1.",
        "Round 47: clusters 1, 3 were not cut after a trial, z up to 12, q up to 0.5, t up to -0.5.",
    ]
    assert sentences(first[:1]) == [sentence(first[0])]


def test_clusters_that_stay_apart_one_after_another_are_one_sentence():
    pairs = [
        {"round": number, "what": "apart", "clusters": clusters, "sizes": [5, 5], "t": t}
        for number, clusters, t in ((6, [2, 3], 92.3), (7, [1, 3], 25.1), (10, [0, 3], 45.0))
    ]
    told = "Rounds 6 to 10: clusters 0, 1, 2, 3 were not merged after trials, t from 25."
    assert sentences(pairs) == [told]
    untold = [{key: value for key, value in pair.items() if key != "t"} for pair in pairs]  # a damaged file
    assert sentences(untold) == ["Rounds 6 to 10: clusters 0, 1, 2, 3 were not merged after trials."]
    assert sentences([looked_at(6, 0, 3.0, 1.0), *pairs[:1]])[1:] == [
        "Round 6: clusters 2, 3 were not merged after a trial, t = 92."
    ]


def test_a_refusal_on_the_same_evidence_is_not_repeated():
    one, other = looked_at(10, 0, 4.2, 0.3), looked_at(10, 1, 1.0, 0.84)
    news = looked_at(13, 1, 1.1, 0.84)
    assert without_repeats([one, other, one | {"round": 12}, other | {"round": 12}, news]) == [one, other, news]
    back = [one, looked_at(11, 0, 5.0, 0.3), one | {"round": 12}]
    assert without_repeats(back) == back


def test_a_proposal_is_told_by_its_outcome():
    proposal = looked_at(10, 2, 12.0, 0.5) | {"what": "proposed"}
    other, outcome = proposal | {"clusters": [3]}, looked_at(11, 2, 12.0, 0.5, t=0.3)
    assert sentences([proposal, other]) == [sentence(proposal), sentence(other)]
    assert sentences([proposal, other, outcome]) == [sentence(other), sentence(outcome)]
    assert sentences([proposal, outcome | {"round": 14}]) == [sentence(proposal), sentence(outcome | {"round": 14})]


def test_of_many_the_cuts_and_the_last_moves_are_told():
    cuts = [{"round": i, "what": "cut", "clusters": [0, i], "sizes": [2, 1]} for i in (4, 9)]
    many = [cuts[0], *[move(f"c{i}", rose=1) for i in range(3)], looked_at(8, 0, 1.0, 1.0), cuts[1], move("d", rose=1)]
    told = [sentence(one) for one in many]
    assert sentences(many, most=7) == told
    assert sentences(many, most=6) == [*told[:1], *told[2:4], *told[5:], "... and 2 more."]
    assert sentences(many, most=3) == [told[0], told[5], "... and 5 more."]


def test_only_letters_that_occur_are_explained():
    assert legend([move("a", rose=1)]) == []
    assert [line[:2] for line in legend([looked_at(1, 0, 1.0, 1.0)])] == ["z:", "q:"]
    assert [line[:2] for line in legend([looked_at(1, 0, 1.0, 1.0, t=1.0)])] == ["z:", "q:", "t:"]
