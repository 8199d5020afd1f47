"""Which clusters are compared, when they are merged, and what a merged cluster is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie.methods.base import Decision
from coterie.methods.parts.found import CoterieState, united, without
from coterie.methods.parts.mergers import COMPARED, with_comparisons, with_mergers
from coterie.methods.parts.personal import NUM_MIXES, SHIFTS
from coterie.randomness import Rng

MEMBERS = 6  # of each cluster
NOISE = 0.1 * Rng.seed(2).normal(2 * MEMBERS)
NOISE -= NOISE.mean()


def state_of(places: list[float], **more: object) -> CoterieState:
    """Clusters of six clients whose centers are at these places; all were made in round 2."""
    count = len(places)
    rows = torch.tensor(places).unsqueeze(1)
    labels = torch.arange(count).repeat_interleave(MEMBERS)
    made = CoterieState(
        common=torch.zeros(3),
        centers=rows.repeat(1, 3),
        labels=labels,
        counts=torch.ones(len(labels), 2, dtype=torch.int64),
        shares=torch.ones(count, 2),
        curves=rows.repeat(1, NUM_MIXES) + 1,
        served=10 * rows.repeat(1, 3),
        behind=torch.arange(count) + 4.0,
        tried=torch.full_like(labels, -1),
        trials=torch.empty(0, 3),
        made_in=torch.full((count,), 2),
        due_in=torch.full((count,), 5),
        merged=torch.zeros(count, dtype=torch.bool),
    )
    return replace(made, **more)  # type: ignore[arg-type]


def pairs(state: CoterieState, number: int = 5, participation: float = 1.0, least_k: int = 1) -> list[list[int]]:
    return [one["clusters"] for one in with_comparisons(state, number, participation, least_k).proposals]


# ---- which are compared ----


def test_parts_are_compared_three_rounds_after_their_cut():
    state = state_of([0.0, 4.0])
    assert [pairs(state, number) for number in (2, 3, 4, 5, 9)] == [[], [], [], [[0, 1]], [[0, 1]]]


def test_each_is_compared_with_the_nearest_and_no_cluster_twice():
    assert pairs(state_of([0.0, 10.0, 1.0, 13.0])) == [[0, 2], [1, 3]]
    assert pairs(state_of([0.0, 10.0, 1.0])) == [[0, 2]]


def test_a_new_cluster_is_compared_with_an_old_one_too():
    due = torch.tensor([0, 0, 7])
    assert pairs(state_of([0.0, 9.0, 7.0], due_in=due), 6) == []
    assert pairs(state_of([0.0, 9.0, 7.0], due_in=due), 7) == [[1, 2]]


def test_the_least_number_of_clusters_is_kept():
    state = state_of([0.0, 10.0, 1.0, 13.0])
    assert [pairs(state, least_k=least) for least in (2, 3, 4)] == [[[0, 2], [1, 3]], [[0, 2]], []]


def test_too_few_are_not_asked():
    """A third of twelve members are four."""
    assert pairs(state_of([0.0, 1.0]), participation=1 / 3) == [[0, 1]]
    assert pairs(state_of([0.0, 1.0]), participation=0.3) == []


def test_a_cluster_without_members_and_one_that_diverged_are_not_compared():
    state = state_of([0.0, 1.0, 5.0])
    gone = replace(state, labels=torch.where(state.labels == 1, -1, state.labels))
    assert pairs(gone) == [[0, 2]]
    assert pairs(state_of([0.0, torch.nan, 5.0])) == [[0, 2]]


def test_members_try_the_mean_of_both_centers_by_members():
    state = state_of([0.0, 8.0, 30.0])
    state = replace(state, labels=state.labels.index_fill(0, torch.tensor([0, 1, 2]), 1))  # 3 and 9
    after = with_comparisons(state, 5, 1.0, 1)
    assert after.trials.tolist() == [[6.0] * 3]
    assert after.tried.tolist() == [0] * 12 + [-1] * 6
    assert after.proposals == [{"round": 5, "what": COMPARED, "clusters": [0, 1], "sizes": [3, 9]}]
    assert after.decisions == []


# ---- when they are merged ----


def judged(state: CoterieState, extra: Tensor, number: int = 6, **mixes: Tensor) -> CoterieState:
    """The state after clusters 0 and 1 have tried the mean, whose loss is higher by `extra` [n] than 1."""
    clients = torch.arange(len(extra))
    own = torch.ones(len(extra), NUM_MIXES, dtype=torch.float64)
    tried = own + extra.unsqueeze(1)
    if "own_models" in mixes:
        own[:, len(SHIFTS) :] = tried[:, len(SHIFTS) :] = 0.5
    proposal = Decision(round=5, what=COMPARED, clusters=[0, 1], sizes=[MEMBERS, MEMBERS])
    return with_mergers(state, [proposal], number, (clients, own, tried))


SMALL = state_of([0.0, 1.0, 9.0])


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (NOISE, "merged"),  # as good
        (NOISE - 0.3, "merged"),  # better
        (NOISE + 0.3, "apart"),
        (torch.where(torch.arange(12) < 6, NOISE + 0.3, NOISE - 0.3), "apart"),  # worse for one cluster
        (torch.where(torch.arange(12) == 3, -1e6, NOISE.abs() + 0.1), "apart"),  # one says the contrary, loudly
    ],
)
def test_clusters_are_merged_unless_members_clearly_prefer_their_own(extra: Tensor, what: str):
    after = judged(SMALL, extra)
    assert [(one["round"], one["what"], one["clusters"]) for one in after.decisions] == [(6, what, [0, 1])]
    assert (after.decisions[0]["t"] < 2) == (what == "merged")
    assert after.num_clusters == (2 if what == "merged" else 3)


def test_own_models_do_not_hide_the_center():
    """All do best with their own models, whatever the center is."""
    after = judged(SMALL, NOISE + 0.3, own_models=torch.ones(()))
    assert after.decisions[0]["what"] == "apart"


@pytest.mark.parametrize(("extra", "what"), [(0.2, "apart"), (0.01, "merged")])
def test_of_a_few_members_the_size_of_the_loss_decides(extra: float, what: str):
    """Cluster 1 has two members."""
    labels = torch.tensor([0] * 10 + [1] * 2 + [2] * 6)
    better = NOISE[:10] - NOISE[:10].mean() - 0.05
    after = judged(replace(SMALL, labels=labels), torch.cat([better, torch.full((2,), extra)]))
    assert after.decisions[0]["what"] == what


def test_if_too_few_answer_nothing_is_merged():
    after = judged(SMALL, NOISE[:3] - 0.3)
    assert after.decisions[0]["what"] == "apart"


def test_clusters_that_clearly_differ_are_compared_once():
    after = judged(SMALL, NOISE + 0.3)
    assert after.due_in.tolist() == [0, 0, 5]
    assert pairs(after) == [[1, 2]]  # cluster 2 has not been compared


def test_those_that_differ_a_little_are_compared_again_when_they_are_twice_as_old():
    """They were made in round 2; in round 6 the mean is worse by 1.2 standard errors."""
    worse = NOISE + 1.2 * NOISE.std() / math.sqrt(len(NOISE))
    after = judged(replace(SMALL, due_in=torch.tensor([5, 0, 5])), worse)
    assert after.decisions[0]["what"] == "apart"
    assert after.due_in.tolist() == [10, 0, 5]
    assert judged(replace(SMALL, merged=after.merged), worse, 11).due_in.tolist() == [20, 20, 5]


def test_one_member_with_an_enormous_loss_merges_nothing():
    after = judged(SMALL, torch.where(torch.arange(12) == 3, 1e6, NOISE))
    assert after.decisions[0]["what"] == "apart"


def test_several_mergers_of_one_round():
    state = state_of([0.0, 20.0, 21.0, 1.0])
    asked = with_comparisons(state, 5, 1.0, 1)
    clients = torch.arange(4 * MEMBERS)
    ones = torch.ones(len(clients), NUM_MIXES, dtype=torch.float64)
    after = with_mergers(state, asked.proposals, 6, (clients, ones, ones))
    assert [one["clusters"] for one in after.decisions] == [[0, 3], [1, 2]]
    assert after.centers[:, 0].tolist() == [0.5, 20.5]
    assert after.labels.tolist() == [0] * 6 + [1] * 12 + [0] * 6
    assert after.made_in.tolist() == [6, 6]
    assert after.due_in.tolist() == [9, 9]
    assert after.merged.tolist() == [True, True]


# ---- a merged cluster ----


def test_a_merged_cluster_is_the_mean_of_both():
    state = replace(SMALL, labels=torch.tensor([0] * 3 + [1] * 9 + [2] * 6))
    both = united(state, 0, 1, 6)
    assert both.centers[:, 0].tolist() == [0.75, 1, 9]
    assert both.served[:, 0].tolist() == [7.5, 10, 90]
    assert both.curves[:, 0].tolist() == [1.75, 2, 10]
    assert both.behind.tolist() == [9, 5, 6]
    assert both.made_in.tolist() == [6, 2, 2]
    assert both.due_in.tolist() == [9, 5, 5]
    assert both.merged.tolist() == [True, False, False]
    assert both.labels.tolist() == [0] * 12 + [2] * 6
    assert SMALL.behind.tolist() == [4, 5, 6]


def test_unknown_losses_are_not_mixed_with_known_ones():
    unknown = replace(SMALL, curves=SMALL.curves * torch.tensor([[1.0], [0.0], [1.0]]))
    assert united(unknown, 0, 1, 6).curves[0].tolist() == [1.0] * NUM_MIXES


def test_clusters_that_are_gone_leave_no_gap():
    state = replace(SMALL, labels=torch.tensor([0] * 9 + [2] * 8 + [-1]))
    after = without(state, torch.tensor([False, True, False]))
    assert after.labels.tolist() == [0] * 9 + [1] * 8 + [-1]
    assert after.centers[:, 0].tolist() == [0, 9]
    assert after.behind.tolist() == [4, 6]
