"""SR-FCA: the graph of cross losses, its threshold, moves and mergers by cluster ids, and the trimmed mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.engines.mock import MockEngine
from coterie.methods.srfca import SRFCA, SrfcaState, clusters_within, found_reach
from coterie.randomness import Rng
from coterie.runs.loop import Schedule
from tests.helpers import finished, setup_of, trainer_of

PLACES = [0.0, 1.0, 2.0, 3.0, 20.0, 21.0, 22.0]


def mock(places=PLACES, train=None):
    """A client's model is its place; the loss of a model is its distance from the place."""

    def respond(step, client, sent):
        if step == "judge":
            return {"losses": (sent[:, 0] - places[client]).abs()}
        if step == "choose":
            return {"choice": (sent[:, 0] - places[client]).abs().argmin()}
        made = torch.full((2,), float(places[client])) if train is None else train(client, sent)
        return {"params": made, "samples": 1}

    return MockEngine(respond, num_clients=len(places))


def state_of(engine, labels, centers, reach=1.0):
    start = SrfcaState.common_start(engine, 1)
    centers = torch.tensor(centers).unsqueeze(1).expand(-1, 2).clone()
    return replace(start, labels=torch.tensor(labels), centers=centers, reach=reach)


def test_clusters_are_components_and_those_outside_join_the_nearest():
    x = np.array([0.0, 1.0, 2.0, 9.0, 10.0, 4.0])
    apart = np.abs(x[:, None] - x[None])
    assert clusters_within(apart, 1.0, 2).tolist() == [0, 0, 0, 1, 1, 0]
    assert clusters_within(apart, 1.0, 1).tolist() == [0, 0, 0, 1, 1, 2]
    assert clusters_within(apart, 0.5, 2).tolist() == [0, 1, 2, 3, 4, 5]  # nobody has a neighbour


def test_the_threshold_is_the_first_percentile_with_more_clusters():
    groups = np.arange(40) // 10
    apart = np.where(groups[:, None] == groups[None], 1.0, 5.0) + 0.001 * np.abs(np.arange(40)[:, None] - np.arange(40))
    np.fill_diagonal(apart, 0)
    # 23 % of the pairs are within groups: the 25th percentile reaches across, the 22nd does not.
    pairs = apart[~np.eye(40, dtype=bool)]
    reach = found_reach(apart, 2)
    assert reach == pytest.approx(np.percentile(pairs, 22) + 1e-4)
    assert len(set(clusters_within(apart, reach, 2))) == 4
    line = np.abs(np.arange(5.0)[:, None] - np.arange(5.0))
    assert found_reach(line, 2) == pytest.approx(np.percentile(line[~np.eye(5, dtype=bool)], 25))


def test_one_shot_takes_both_losses_of_a_pair():
    """The loss of i on the data of j alone would connect the two."""

    def respond(step, client, sent):
        if step == "judge":
            return {"losses": 6.0 * client * (sent[:, 0] < 0.5)}  # only the model of client 0 is bad for client 1
        return {"params": sent + client, "samples": 1}

    engine = MockEngine(respond, num_clients=2)
    apart = SRFCA(threshold=2.0, least=1).start(engine.task, engine, Rng.seed(0))
    joined = SRFCA(threshold=3.0, least=1).start(engine.task, engine, Rng.seed(0))
    assert apart.labels[0] != apart.labels[1]
    assert joined.labels[0] == joined.labels[1]


def test_the_start_finds_the_clusters_and_their_trimmed_means():
    engine = mock()
    method = SRFCA(threshold=1.5, robust_share=0.25)
    state = method.start(engine.task, engine, Rng.seed(0))
    low, high = int(state.labels[0]), int(state.labels[4])
    assert state.labels.tolist() == [low] * 4 + [high] * 3
    assert low != high
    assert state.centers[low].tolist() == [1.5, 1.5]  # of 1 and 2: 0 and 3 are dropped
    assert state.centers[high].tolist() == [21.0, 21.0]
    assert torch.equal(state.common, engine.initial())


def test_members_train_from_the_model_of_their_cluster():
    """In public code it was never sent back."""
    seen = {}

    def train(client, sent):
        seen[client] = sent.clone()
        return sent

    engine = mock(train=train)
    state = state_of(engine, [0, 0, 0, 0, 1, 1, 1], [1.0, 21.0])
    for number in (1, 9):
        seen.clear()
        engine.begin(number, "round")
        SRFCA().round(state, engine, engine.everyone(), Rng.seed(number))
        assert {client: float(sent[0]) for client, sent in seen.items()} == {
            client: 1.0 if client < 4 else 21.0 for client in range(7)
        }


def test_clients_move_to_the_nearest_cluster_while_refining():
    engine = mock()
    state = state_of(engine, [0, 0, 0, 1, 1, 1, 1], [1.0, 16.0])
    engine.begin(4, "round")
    after = SRFCA(robust="none").round(state, engine, engine.everyone(), Rng.seed(0))
    assert after.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert after.centers[:, 0].tolist() == [1.5, 21.0]  # the means of the new members
    engine.begin(5, "round")
    later = SRFCA(robust="none").round(state, engine, engine.everyone(), Rng.seed(0))
    assert torch.equal(later.labels, state.labels)


def test_a_client_does_not_judge_its_own_model():
    """Alone in its cluster it would stay for ever, because its own model fits it best."""
    engine = mock([0.0, 1.0, 2.0, 8.0])
    state = state_of(engine, [0, 0, 0, 1], [1.0, 5.0])
    losses = torch.tensor([[0.0, 1.0, 2.0, 8.0], [1.0, 0.0, 1.0, 7.0], [2.0, 1.0, 0.0, 6.0], [8.0, 7.0, 6.0, 0.0]])
    of_centers = torch.tensor([[1.0, 5.0], [0.0, 4.0], [1.0, 3.0], [4.0, 6.0]])
    # The last one: (8 + 7 + 6) / 3 and 4, halved, is 5.5; its own cluster has no other member, and a loss of 6.
    moved = SRFCA()._reclustered(state, torch.arange(4), torch.cat([losses, of_centers], 1).double())
    assert moved.labels.tolist() == [0, 0, 0, 0]


def test_a_client_does_not_leave_a_cluster_that_nobody_judged():
    engine = mock([0.0, 1.0, 8.0])
    state = state_of(engine, [0, 0, 1], [0.5, 8.0])
    losses = torch.tensor([[0.0, 1.0, 8.0, 0.5, 8.0], [1.0, 0.0, 7.0, 0.5, 7.0], [torch.nan] * 5]).double()
    # The last one did not judge, and it is the only member of its cluster; the others have judged its model.
    assert SRFCA()._reclustered(state, torch.arange(3), losses).labels.tolist() == [0, 0, 1]


def test_merging_renames_clusters_and_not_clients():
    """Public code wrote the ids of merged clusters to the clients with those indices."""
    engine = mock([50.0, 51.0, 0.0, 1.0, 2.0, 3.0])
    state = state_of(engine, [2, 2, 0, 0, 1, 1], [0.5, 2.5, 50.5], reach=2.5)
    engine.begin(1, "round")
    after = SRFCA(robust="none").round(state, engine, engine.everyone(), Rng.seed(0))
    assert after.labels.tolist() == [2, 2, 0, 0, 0, 0]
    assert after.centers[:, 0].tolist() == [1.5, 2.5, 50.5]  # the row of the merged cluster stays
    assert "merged with 0" in after.repairs[0]["reason"]
    absent = SRFCA(robust="none").round(state, engine, torch.tensor([2, 4]), Rng.seed(0))
    assert absent.labels.tolist() == [2, 2, 0, 0, 0, 0]  # the members of a cluster stay together


def test_an_empty_cluster_attracts_nobody():
    engine = mock()
    state = state_of(engine, [0, 0, 0, 0, 1, 1, 1], [1.0, 21.0, 1.5])
    engine.begin(1, "round")
    after = SRFCA().round(state, engine, engine.everyone(), Rng.seed(0))
    assert after.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert bool(torch.isfinite(after.centers).all())
    lost = replace(state, labels=torch.tensor([0, -1, 0, 0, 1, 1, 1]))
    assert SRFCA().assign(lost, engine, torch.tensor([1, 6]), Rng.seed(0)).tolist() == [0, 1]


def test_small_clusters_are_averaged_too():
    engine = mock([0.0, 2.0, 20.0])
    engine.begin(9, "round")
    state = state_of(engine, [0, 0, 1], [5.0, 5.0])
    after = SRFCA().round(state, engine, engine.everyone(), Rng.seed(0))
    assert after.centers[:, 0].tolist() == [1.0, 20.0]


def test_costs_the_models_of_all_others_while_refining_and_then_as_much_as_fedavg():
    run = trainer_of(setup_of(SRFCA(refine=1), schedule=Schedule(rounds=3)))
    run._start()
    size = run.engine.task.layout.size * 8
    assert run.engine.ledger.totals()["start"]["down"] == 9 * (1 + 9) * size
    run._round(1)
    run._round(2)
    before = run.engine.ledger.totals()["down"]
    run._round(3)
    assert run.engine.ledger.totals()["down"] - before == 9 * size


@pytest.mark.parametrize("seed", range(2))
def test_finds_the_groups_of_rotated_digits(seed):
    import coterie

    assert coterie.run("srfca", "rotated-digits", rounds=2, seed=seed).summary["ari"] == 1.0


def test_stragglers_at_the_start_are_placed_later():
    run = finished(setup_of(SRFCA(), schedule=Schedule(rounds=6, dropout=0.3)))
    assert run.summary()["clients_met"] == 9
