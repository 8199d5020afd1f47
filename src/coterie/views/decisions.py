"""Decisions of a method about its clusters, as sentences: for the terminal and the page."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Found = Mapping[str, Any]  # a `Decision`, perhaps read from a file

ABOUT = {
    "z": "evidence that the parts differ, in standard deviations of noise",
    "q": "benefit of separate models divided by their cost; 1 means break-even",
    "t": "gain of the clients that tried separate models for a round, in standard errors",
}
_INFINITE = 1e9  # files have no infinity
_SHOWN = 8  # numbers that are listed one by one


def kinds_found(count: int) -> str:
    """The number of kinds that decisions led to.

    >>> kinds_found(1), kinds_found(4)
    ('1 kind found.', '4 kinds found.')
    """
    return f"{count} {'kind' if count == 1 else 'kinds'} found."


def legend(decisions: Iterable[Found]) -> list[str]:
    """What z, q and t mean, as far as they occur.

    >>> legend([{"z": 3.0}])
    ['z: evidence that the parts differ, in standard deviations of noise.']
    """
    used = {name for decision in decisions for name in ABOUT if name in decision}
    return [f"{name}: {about}." for name, about in ABOUT.items() if name in used]


def without_repeats(decisions: Iterable[Found]) -> list[Found]:
    """The decisions without refusals on the same evidence as the last refusal about that cluster."""
    last: dict[str, Found] = {}
    found: list[Found] = []
    for decision in decisions:
        if decision["what"] == "refused":
            place, content = str(decision["clusters"]), {k: v for k, v in decision.items() if k != "round"}
            if last.get(place) == content:
                continue
            last[place] = content
        found.append(decision)
    return found


def sentences(decisions: Sequence[Found], most: int | None = None) -> list[str]:
    """The decisions in words; of more than `most` sentences those about cuts, then the last ones.

    Cuts refused one after another are one sentence, and so are clusters that stayed apart. A proposal is told by its
    outcome, once there is one.
    """
    outcomes = {(one["round"] - 1, *one["clusters"][:1]) for one in decisions if "t" in one}
    told = [
        one
        for one in without_repeats(decisions)
        if one["what"] != "proposed" or (one["round"], *one["clusters"]) not in outcomes
    ]
    found: list[tuple[int, str]] = []  # rank, sentence
    for (what, _), group in itertools.groupby(told, key=lambda one: (one["what"], "t" in one)):
        some = list(group)
        grouped = {"refused": _refusals, "apart": _kept_apart}.get(what) if len(some) > 1 else None
        texts = [grouped(some)] if grouped else map(sentence, some)
        found += [({"cut": 0, "refused": 2, "apart": 2}.get(what, 1), text) for text in texts]
    if most is None or len(found) <= most:
        return [text for _, text in found]
    kept = sorted(sorted(range(len(found)), key=lambda i: (found[i][0], -i))[: most - 1])
    return [*(found[i][1] for i in kept), f"... and {len(found) - len(kept)} more."]


def sentence(decision: Found) -> str:
    """A decision in words.

    >>> sentence({"round": 4, "what": "cut", "clusters": [0, 1, 2], "sizes": [7, 2, 1], "z": 236.2, "q": 0.84})
    'Round 4: cluster 0 was cut into 3 (7, 2, 1 clients), z = 236, q = 0.84.'
    """
    what, clusters, sizes = decision["what"], decision.get("clusters") or [], decision.get("sizes") or []
    cluster, parts = f"cluster {clusters[0]}" if clusters else "a cluster", f"({listed(sizes)} clients)"
    tried = " after a trial" if "t" in decision else ""
    if what == "cut":
        text = f"{cluster} was cut into {len(sizes)} {parts}{tried}{_evidence(decision)}"
    elif what == "proposed":
        text = f"members of {cluster} try a cut into {len(sizes)} {parts}{_evidence(decision)}"
    elif what == "refused":
        text = f"{cluster} was not cut {parts}{tried}{_evidence(decision)}"
    elif what == "merged":
        text = (
            f"{_named(clusters)} were merged {parts} after a trial{_evidence(decision)}; the others are numbered anew"
        )
    elif what == "apart":
        text = f"{_named(clusters)} were not merged after a trial{_evidence(decision)}"
    elif what == "move":
        text = _moved(decision)
    elif what == "removed":
        verb = "was" if len(clusters) == 1 else "were"
        text = f"{_named(clusters)} {verb} empty and removed; the others are numbered anew"
    else:  # of a method of the user's own
        text = f"{what}, {_named(clusters)}{_evidence(decision)}"
    return f"Round {decision['round']}: {text}."


def number(value: float) -> str:
    """A number of evidence.

    >>> number(236.2), number(36.1), number(0.8388), number(1e9)
    ('236', '36', '0.84', '∞')
    """
    return "∞" if value >= _INFINITE else f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


def listed(values: Sequence[Any]) -> str:
    """Some values in a row.

    >>> listed([3, 1]), listed(range(20))
    ('3, 1', '0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    shown = ", ".join(str(value) for value in values[:_SHOWN])
    return f"{shown} and {len(values) - _SHOWN} more" if len(values) > _SHOWN else shown


def _named(clusters: Sequence[int]) -> str:
    return f"{'cluster' if len(clusters) == 1 else 'clusters'} {listed(clusters)}"


def _evidence(decision: Found) -> str:
    return "".join(f", {name} = {number(decision[name])}" for name in ABOUT if name in decision)


def _moved(decision: Found) -> str:
    """Who moved, and why."""
    moves, risen = decision["moves"], decision.get("loss_rose", 0)
    first, count = moves[0], len(moves)
    if count == 1:
        why = "after its loss rose" if risen else "because its place was in doubt"
        return f"{first['client']} moved from cluster {first['from_cluster']} to {first['to_cluster']}, {why}"
    why = f"after {'its' if risen == 1 else 'their'} loss rose" if risen else "because their place was in doubt"
    some = f"{risen} of them " if 0 < risen < count else ""
    return f"{first['client']} and {count - 1} more moved, {some}{why}"


def _refusals(decisions: Sequence[Found]) -> str:
    """Cuts that were refused one after another, as one sentence."""
    clusters = _all_clusters(decisions)
    verb = "was" if len(clusters) == 1 else "were"
    tried = " after a trial" if "t" in decisions[0] else ""
    largest = {name: max((one[name] for one in decisions if name in one), default=None) for name in ABOUT}
    evidence = "".join(f", {name} up to {number(value)}" for name, value in largest.items() if value is not None)
    return f"{_when(decisions)}: {_named(clusters)} {verb} not cut{tried}{evidence}."


def _kept_apart(decisions: Sequence[Found]) -> str:
    """Clusters that were compared one pair after another and not merged, as one sentence."""
    least = min((decision["t"] for decision in decisions if "t" in decision), default=None)
    evidence = "" if least is None else f", t from {number(least)}"
    return f"{_when(decisions)}: {_named(_all_clusters(decisions))} were not merged after trials{evidence}."


def _when(decisions: Sequence[Found]) -> str:
    first, last = decisions[0]["round"], decisions[-1]["round"]
    return f"Round {first}" if first == last else f"Rounds {first} to {last}"


def _all_clusters(decisions: Sequence[Found]) -> list[int]:
    return sorted({cluster for decision in decisions for cluster in decision.get("clusters") or []})
