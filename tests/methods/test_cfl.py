"""CFL: members are clients, through any number of splits; no client is lost, none is in two clusters."""

from __future__ import annotations

import pytest
import torch

import coterie
from coterie.engines.mock import MockEngine
from coterie.methods.cfl import CFL, contrast_of, is_confirmed
from coterie.randomness import Rng, name_keys
from tests.helpers import setup_of, trainer_of

# Eight kinds in a tree of three levels: the first axis parts four from four, the second two from two, then one.
AXES = torch.tensor([[4.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]])


def home_of(kind):
    """Where clients of a kind (0 ... 7) want to go."""
    signs = torch.tensor([1.0 if kind >> bit & 1 else -1.0 for bit in (2, 1, 0)])
    return signs @ AXES


def run_on(kinds, names=None, rounds=30, cohorts=None, **settings):
    """Clients that go a third of the way home in each round; the mock's models have three numbers."""

    def respond(step, client, sent):
        if step == "choose":
            return {"choice": (sent - home_of(kinds[client])).norm(dim=1).argmin()}
        jitter = 0.01 * torch.tensor([client % 3 - 1.0, client % 5 - 2.0, client % 2 - 0.5])
        return {"params": sent + (home_of(kinds[client]) + jitter - sent) / 3, "samples": 1}

    engine = MockEngine(respond, num_clients=len(kinds), size=3, chunk=4)
    if names is not None:
        engine.names, engine.keys = names, name_keys(names)
    method = CFL(**{"thresholds": "relative", "eps1": 0.1, "eps2": 0.15, "rest": 2, "least": 1} | settings)
    engine.begin(0, "start")
    state = method.start(engine.task, engine, Rng.seed(0))
    for number in range(1, rounds + 1):
        engine.begin(number, "round")
        cohort = torch.tensor(cohorts[number % len(cohorts)]) if cohorts else engine.everyone()
        state = method.round(state, engine, cohort, Rng.seed(0).at(number))
        members = torch.bincount(state.labels[state.labels >= 0], minlength=len(state.centers))
        assert int(members.sum()) == int((state.labels >= 0).sum())
        assert int(members.min()) > 0  # a partition, after every round
        assert int(state.labels.max()) < len(state.centers) == len(state.tree) + 1
    return method, engine, state


# The kinds are ordered so that positions inside a cluster are never the ids of its clients.
KINDS = [(5 * i + i // 8) % 8 for i in range(24)]


def same_partition(labels, kinds):
    one = torch.as_tensor(labels)
    other = torch.as_tensor(kinds)
    return torch.equal(one.unsqueeze(0) == one.unsqueeze(1), other.unsqueeze(0) == other.unsqueeze(1))


def test_three_levels_of_splits_end_with_the_true_partition():
    """The fault of five public repositories: positions in a sub-matrix kept as ids, right only at the first split."""
    _, _, state = run_on(KINDS)
    assert len(state.centers) == 8
    assert same_partition(state.labels, KINDS)
    depth = {0: 0}
    for split in state.tree:
        depth[split["cluster"]] += 1
        depth[split["into"]] = depth[split["cluster"]]
    assert set(depth.values()) == {3}
    for kind in range(8):
        center = state.centers[int(state.labels[KINDS.index(kind)])]
        assert torch.allclose(center, home_of(kind), atol=0.6)


def test_renaming_clients_changes_nothing_else():
    names = tuple(f"site {chr(120 - i % 24)}{i}" for i in range(24))
    _, _, one = run_on(KINDS)
    _, _, other = run_on(KINDS, names)
    assert same_partition(one.labels, other.labels.tolist())
    assert len(one.tree) == len(other.tree)


def test_alike_clients_are_not_split():
    _, _, state = run_on([3] * 12)
    assert state.tree == []
    assert state.labels.tolist() == [0] * 12


def test_the_papers_gamma_keeps_halves_that_are_not_different_enough():
    _, _, free = run_on(KINDS, gamma_max=0.0)
    _, _, held = run_on(KINDS, gamma_max=0.999)
    assert len(free.tree) == 7
    assert len(held.tree) < 7


def test_absolute_thresholds_are_taken_as_they_are():
    _, _, none = run_on(KINDS, thresholds="absolute", eps2=1e6)
    _, _, some = run_on(KINDS, thresholds="absolute", eps1=0.15, eps2=0.25)
    assert none.tree == []
    assert same_partition(some.labels, KINDS)


def test_no_split_beyond_the_largest_number():
    _, _, state = run_on(KINDS, max_clusters=3)
    assert len(state.centers) == 3


def test_absent_members_go_with_those_they_are_like():
    kinds = [0, 7, 0, 7, 0, 7]
    everyone, some = [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]
    _, _, state = run_on(kinds, rounds=2, cohorts=[some, everyone], rest=1)  # round 1: everyone; round 2: some
    assert [split["round"] for split in state.tree] == [2]
    assert same_partition(state.labels, kinds)


def test_who_was_not_seen_before_a_split_chooses_by_loss():
    kinds = [0, 7, 0, 7, 0, 7]
    _, engine, state = run_on(kinds, rounds=3, cohorts=[[2, 3, 4, 5], [0, 1, 2, 3], [2, 3, 4, 5]], rest=0)
    assert [who for step, who in engine.calls if step == "choose"] == [[4, 5]]  # in round 1 there was one model
    assert [split["round"] for split in state.tree] == [1]
    assert same_partition(state.labels, kinds)


def test_a_split_waits_until_every_member_has_shown_an_update_in_its_cluster():
    everyone, half = list(range(24)), list(range(12))
    _, _, state = run_on(KINDS, cohorts=[half if number > 3 else everyone for number in range(31)])
    assert len(state.tree) == 1
    assert len(run_on(KINDS)[2].tree) == 7


def test_newcomers_get_all_models_and_choose_by_loss():
    """Each newcomer names the model nearest to its home; no training and no signature is asked of it."""
    method, _, state = run_on(KINDS)
    kinds = [6, 0, 3]
    sent_to = {}

    def respond(step, client, sent):
        sent_to[client] = sent.tolist()
        return {"choice": (sent - home_of(kinds[client])).norm(dim=1).argmin()}

    fresh = MockEngine(respond, num_clients=3, size=3)
    found = method.assign(state, fresh, fresh.everyone(), Rng.seed(5))
    assert found.tolist() == [int(state.labels[KINDS.index(kind)]) for kind in kinds]
    assert fresh.calls == [("choose", [0, 1, 2])]
    assert sent_to == dict.fromkeys(range(3), state.centers.tolist())


def test_a_newcomer_that_does_not_answer_is_in_no_cluster():
    method, _, state = run_on(KINDS)

    def respond(step, client, sent):
        if client == 1:
            raise TimeoutError("gone")
        return {"choice": 2 + client}

    fresh = MockEngine(respond, num_clients=3, size=3)
    assert method.assign(state, fresh, fresh.everyone(), Rng.seed(5)).tolist() == [2, -1, 4]


def test_where_updates_do_not_fit_the_same_models_are_asked_for_again():
    """Sketches decide, and a second, identical training adds the models into the two halves."""
    settings = {"thresholds": "relative", "eps1": 10.0, "eps2": 0.01, "rest": 0, "least": 2}
    held, sketched = (trainer_of(setup_of(CFL(**settings))) for _ in range(2))
    sketched.engine.memory_budget = lambda: 1
    for run in (held, sketched):
        run._start()
        run._round(1)
    assert len(held.state.tree) >= 1
    assert torch.equal(held.state.labels, sketched.state.labels)
    assert torch.allclose(held.state.centers, sketched.state.centers)
    assert sketched.engine.ledger.totals()["repair"]["up"] > 0 == held.engine.ledger.totals()["repair"]["up"]


def test_splits_are_recorded_with_round_and_reason():
    _, _, state = run_on(KINDS)
    assert len(state.repairs) == len(state.tree)
    assert "was split into 12 and 12 clients" in state.repairs[0]["reason"]
    assert state.repairs[0]["round"] == state.tree[0]["round"]


@pytest.mark.parametrize("seed", [0, 1])
def test_finds_two_kinds_of_real_clients(seed):
    from coterie.runs.experiment import merge, resolve

    tables = {"run": {"clients": 10, "seed": seed}, "scenario": {"groups": 2}}
    experiment = resolve(merge(tables))
    result = coterie.run("cfl", experiment.federation(), experiment.model, work=experiment.work, rounds=10, seed=seed)
    assert result.summary["ari"] == 1.0
    assert result.summary["clusters"] == 2


def test_a_cluster_of_absent_members_is_left_alone():
    method, engine, state = run_on(KINDS, rounds=6)
    engine.begin(7, "round")
    here = (state.labels == 0).nonzero().flatten()
    after = method.round(state, engine, here, Rng.seed(9))
    others = list(range(1, len(state.centers)))
    assert torch.equal(after.centers[others], state.centers[others])
    assert len(others) > 0


# ---- confirmed splits ----


def updates_of(kinds, spread=1.0, width=400, scale=1.0):
    """Updates [m, D]: a common part, one direction for each kind, and noise."""
    rng = Rng.seed(7)
    ways = torch.stack([rng.at("kind", kind).normal(width) for kind in kinds])
    noise = torch.stack([rng.at("noise", client).normal(width) for client in range(len(kinds))])
    return scale * (0.2 * rng.at("common").normal(width) + ways + spread * noise)


def confirmed(rows, shown=None, **settings):
    shown = torch.ones(len(rows), dtype=torch.bool) if shown is None else shown
    return CFL(**settings)._confirmed_halves(rows, shown, torch.arange(len(rows)))


def test_contrast_by_hand():
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    halves = torch.tensor([[True, True, False, False], [True, False, True, False]])
    # Right halves: 1 within, -1 across. Mixed halves: -1 within; across two pairs of 1 and two of -1.
    assert contrast_of(rows, halves).tolist() == [2.0, -1.0]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_two_kinds_are_confirmed_and_one_is_not_whatever_the_scale(scale):
    kinds = [0, 1, 1, 0, 1, 0, 0, 1, 0, 1]
    assert same_partition(confirmed(updates_of(kinds, scale=scale)).long(), kinds)
    assert confirmed(updates_of([0] * 10, scale=scale)) is None


def test_a_contrast_that_random_halves_also_have_is_not_confirmed():
    kinds = [0, 0, 1, 1]  # of the three ways to halve four clients, one is as good by chance: p = 1 / 3
    assert not is_confirmed(updates_of(kinds).double(), torch.tensor([False, False, True, True]), 0.25)
    rows, halves = updates_of([0, 1] * 5).double(), torch.tensor([False, True] * 5)
    assert is_confirmed(rows, halves, 0.25)
    assert not is_confirmed(rows, halves, 1.9)


def test_members_that_move_together_are_not_split_yet():
    kinds = [0, 1] * 6
    together = updates_of(kinds) + 20 * Rng.seed(1).normal(400)
    assert confirmed(together) is None
    assert confirmed(together, small=1.0) is not None


def test_who_sent_nothing_in_the_cluster_follows_its_older_update():
    kinds = [0, 1] * 8
    rows, shown = updates_of(kinds), torch.arange(16) < 10
    rows[10:] = 3 * rows[10:] + Rng.seed(2).normal(400)  # from another model
    assert same_partition(confirmed(rows, shown).long(), kinds)
    assert confirmed(rows, torch.arange(16) < 7) is None  # too few have sent one


@pytest.mark.parametrize("groups", [1, 4])
def test_with_few_clients_in_a_round_kinds_are_found(groups):
    from coterie.runs.experiment import merge, resolve

    setup = resolve(merge({"run": {"seed": 0}, "scenario": {"groups": groups}}))
    data = setup.federation()
    result = coterie.run("cfl", data, setup.model, work=setup.work, rounds=40, seed=0, participation=0.2)
    assert result.summary["ari"] > 0.8  # of one kind: one cluster
    assert result.summary["clusters"] >= groups
