from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import coterie
from coterie.client.steps import adapt
from coterie.client.work import SGD, FirstOrderMAML
from coterie.engines.mock import MockEngine
from coterie.errors import ConfigError
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedds import FedDS, FedDSMIC
from coterie.methods.parts.pseudo import Forward
from coterie.nets.flat import Network
from coterie.randomness import Rng
from coterie.runs.experiment import merge, resolve
from coterie.runs.loop import Schedule
from coterie.runs.result import personal_vector
from tests.helpers import finished, ragged_federation, setup_of, trainer_of

RNG = Rng.seed(0)
LOG3 = math.log(3)

# ---- the distance ----


def toy(respond=lambda *a: {}, clients=3, inputs=(1.0,)):
    """One input, two outputs (a x, b x) of models (a, b); the server holds these inputs."""
    engine = MockEngine(respond, num_clients=clients)
    engine.forward = Forward(Network(torch.nn.Linear(1, 2, bias=False), torch.float32, torch.device("cpu")), (1,))
    engine.reserved = (torch.tensor(inputs).unsqueeze(1), torch.zeros(len(inputs), dtype=torch.int64))
    return engine


def distances(method, engine, params, centers):
    return method.divergences(params, method.log_probabilities(centers, engine), engine)


def test_divergence_in_both_directions_by_hand():
    """One model says (3/4, 1/4), the other (1/2, 1/2)."""
    engine = toy()
    sure, dumb = torch.tensor([[LOG3, 0.0]]), torch.zeros(1, 2)
    forth = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)  # KL(sure || dumb)
    back = 0.5 * math.log(2 / 3) + 0.5 * math.log(2.0)  # KL(dumb || sure)
    assert forth != pytest.approx(back, rel=0.05)
    centers = torch.cat([dumb, sure])
    for kl, expected in (("client", forth), ("center", back)):
        found = distances(FedDS(num_clusters=2, kl=kl, temperature=1.0, label_bias="kept"), engine, sure, centers)
        assert found[0].tolist() == pytest.approx([expected, 0.0], abs=1e-6)


def test_divergence_is_summed_over_the_indicator_samples():
    sure, dumb = torch.tensor([[LOG3, 0.0]]), torch.zeros(1, 2)
    method = FedDS(num_clusters=1, label_bias="kept")
    one = distances(method, toy(), sure, dumb)
    many = distances(method, toy(inputs=(1.0, 0.0, 1.0, -1.0)), sure, dumb)
    assert many.item() == pytest.approx(3 * one.item())  # at 0 they agree; at -1 it is mirrored


def test_temperature_softens_what_is_compared():
    params, centers = RNG.at("models").normal(4, 2).float(), RNG.at("centers").normal(3, 2).float()
    engine = toy(inputs=(1.0, 2.0))
    soft = distances(FedDS(num_clusters=3, temperature=2.0), engine, params, centers)
    halved = distances(FedDS(num_clusters=3, temperature=1.0), engine, params / 2, centers / 2)
    assert torch.allclose(soft, halved, atol=1e-6)


@pytest.mark.parametrize("kl", ["client", "center"])
@pytest.mark.parametrize("models", [1, 4])
def test_divergence_is_that_of_torch(kl, models):
    engine = toy(inputs=tuple(RNG.at("x").normal(7).tolist()))
    params, centers = RNG.at("models").normal(models, 2).float(), RNG.at("centers").normal(3, 2).float()
    found = distances(FedDS(num_clusters=3, kl=kl, temperature=1.0, label_bias="kept"), engine, params, centers)
    x = engine.reserved[0]
    for i in range(models):
        for j in range(3):
            client, center = ((x * model).log_softmax(1) for model in (params[i], centers[j]))
            # torch's kl_div(input, target) is KL(target || input).
            target, given = (client, center) if kl == "client" else (center, client)
            expected = functional.kl_div(given, target, reduction="sum", log_target=True)
            assert found[i, j].item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert (found >= -1e-6).all()


def test_a_model_that_is_quite_sure_is_at_a_finite_distance():
    """Where a probability is 0 in floats its logarithm is not."""
    extreme = torch.tensor([[500.0, 0.0], [-500.0, 0.0]])
    for kl in ("client", "center"):
        found = distances(FedDS(num_clusters=2, kl=kl, label_bias="kept"), toy(), extreme, extreme)
        assert bool(torch.isfinite(found).all())
        assert found.argmin(1).tolist() == [0, 1]


def test_round_goes_to_the_center_that_says_the_like_and_weighs_by_samples():
    homes = torch.tensor([[LOG3, 0.0], [2 * LOG3, LOG3], [0.0, LOG3]])

    def respond(step, client, sent, watch=None):
        return {"params": homes[client], "samples": client + 1}

    engine = toy(respond)
    engine.begin(1, "round")
    method = FedDS(num_clusters=2, label_bias="kept", init="paper")  # the rule moves clients by itself
    state = method.empty_state(engine)
    # Client 1 is nearer to center 1 by L2, and says the same as center 0.
    centers = torch.tensor([[LOG3, 0.0], [2 * LOG3, 2 * LOG3 + 0.5]])
    state = replace(state, centers=centers, labels=torch.tensor([1, 1, 0]))
    after = method.round(state, engine, engine.everyone(), RNG)
    assert after.labels.tolist() == [0, 0, 1]
    assert after.centers[0].tolist() == pytest.approx([(1 * 1 + 2 * 2) / 3 * LOG3, 2 / 3 * LOG3])
    assert after.centers[1].tolist() == pytest.approx([0.0, LOG3])
    proposed = replace(method, init="warm").round(state, engine, engine.everyone(), RNG)
    assert proposed.labels.tolist() == [1, 1, 0]
    assert proposed.pending.tolist() == [True, True, True]


class Biased(torch.nn.Module):
    """One input, two classes, a weight and a bias for each: models (a, b, bias of a, bias of b)."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x * self.weight + self.bias


def biased(inputs=(1.0, 3.0, -2.0)):
    engine = toy(inputs=inputs)
    engine.forward = Forward(Network(Biased(), torch.float32, torch.device("cpu")), (1,))
    return engine


@pytest.mark.parametrize("kl", ["client", "center"])
def test_without_label_bias_a_constant_on_a_class_changes_nothing(kl):
    engine = biased()
    params, centers = RNG.at("models").normal(4, 4).float(), RNG.at("centers").normal(3, 4).float()
    shift = torch.tensor([0.0, 0.0, 7.0, -2.0])
    for who in ("client", "center"):
        moved = (params + shift, centers) if who == "client" else (params, centers + shift)
        for bias, is_same in (("removed", True), ("kept", False)):
            method = FedDS(num_clusters=3, kl=kl, label_bias=bias)
            plain, other = distances(method, engine, params, centers), distances(method, engine, *moved)
            assert torch.allclose(plain, other, atol=1e-5) == is_same


def test_the_label_bias_is_the_mean_output_over_all_indicator_samples():
    """Outputs 3x and 0 at x = 1, 3: their means are 6 and 0, so (-3, 0) and (3, 0) are compared."""
    method = FedDS(num_clusters=1, temperature=1.0)
    found = method.log_probabilities(torch.tensor([[3.0, 0.0, 5.0, 5.0]]), biased(inputs=(1.0, 3.0)))
    expected = torch.tensor([[[-3.0, 0.0], [3.0, 0.0]]]).log_softmax(2)
    torch.testing.assert_close(found, expected)


def test_the_label_bias_does_not_depend_on_how_many_samples_are_computed_at_once(monkeypatch):
    engine, method = biased(inputs=tuple(float(i) for i in range(7))), FedDS(num_clusters=1)
    models = RNG.at("models").normal(3, 4).float()
    whole = method.log_probabilities(models, engine)
    monkeypatch.setattr("coterie.methods.fedds._AT_ONCE", 6)
    monkeypatch.setattr(type(engine.forward), "is_light", False)
    torch.testing.assert_close(method.log_probabilities(models, engine), whole)


# ---- indicator samples ----


def every_row(federation):
    return torch.cat([federation.train.index, federation.valid.index, federation.test.index])


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [("rotated", {}), ("rotated", {"alpha": 1.0}), ("iid", {}), ("label_swapped", {}), ("by_user", None)],
)
def test_indicator_samples_are_in_no_shard(scenario, settings):
    if settings is None:
        federation = ragged_federation(reserve=3)
    else:
        values = {"reserve": 3, **settings}
        asked = {"run": {"dataset": "digits", "scenario": scenario, "clients": 12}, "scenario": values}
        federation = resolve(merge(asked)).federation()
    reserved = federation.reserved
    assert torch.bincount(federation.y[reserved]).tolist() == [3] * federation.num_classes
    assert not torch.isin(reserved, every_row(federation)).any()
    assert len(reserved.unique()) == len(reserved)


@pytest.mark.parametrize("method", [FedDS, FedDSMIC])
def test_a_run_holds_out_as_many_as_the_method_wants(method):
    result = coterie.run(method(indicators=4), "rotated-digits", rounds=1)
    federation = result._trainer.federation
    assert len(federation.reserved) == 40
    assert not torch.isin(federation.reserved, every_row(federation)).any()
    assert len(result._trainer.engine.reserved[0]) == 40


@pytest.mark.parametrize("method", [FedDS, FedDSMIC])
def test_without_indicator_samples_there_is_one_sentence(method):
    trainer = trainer_of(setup_of(method(num_clusters=2), ragged_federation()))
    with pytest.raises(ConfigError) as caught:
        trainer.run()
    message = str(caught.value)
    assert message == (
        f"{method.__name__} compares models on the server's own samples; hold some out with --set scenario.reserve=10."
    )
    assert not trainer.engine.ledger.entries  # before anybody is asked


def test_the_labels_of_indicator_samples_are_not_looked_at():
    federation = ragged_federation(reserve=2)
    y = federation.y.clone()
    y[federation.reserved] = (y[federation.reserved] + 1) % 3
    one, other = (finished(setup_of(FedDS(num_clusters=2), f)) for f in (federation, replace(federation, y=y)))
    assert torch.equal(one.state.centers, other.state.centers)


def test_traffic_is_that_of_fedavg_and_the_start():
    federation = ragged_federation(reserve=2)
    one = finished(setup_of(FedAvg(), federation)).engine.ledger.totals()
    for method in (FedDS(num_clusters=2), FedDSMIC(num_clusters=2)):
        many = finished(setup_of(method, federation)).engine.ledger.totals()
        assert (many["down"], many["up"]) == (one["down"], one["up"])


# ---- FedDSMIC: a center that is a good start ----


def gradient_at(trainer, vector, x, y):
    """Gradient of the mean loss of one model, by plain torch."""
    network, layout = trainer.engine.network, trainer.engine.task.layout
    leaf = vector.clone().requires_grad_()
    functional.cross_entropy(network(layout.unpack(leaf), x.double()), y).backward()
    return leaf.grad


@pytest.mark.parametrize("steps", [1, 3])
def test_the_personal_model_is_the_center_after_adapting_on_training_data(steps):
    method = FedDSMIC(num_clusters=2, inner_lr=0.3, adapt_steps=steps)
    work = SGD(lr=0.1, momentum=0.9, weight_decay=0.1, batch_size="full")
    trainer = finished(setup_of(method, work=work))
    layout = trainer.engine.task.layout
    scores = trainer.progress.scores[-1]
    for client in range(9):
        center = trainer.state.centers[int(trainer.state.labels[client])]
        personal = center.clone()
        x, y = trainer.federation.samples(client, "train")
        for _ in range(steps):  # plain steps: neither momentum nor weight decay
            personal = personal - 0.3 * gradient_at(trainer, personal, x, y)
        assert torch.allclose(personal_vector(trainer, client), personal, rtol=1e-9, atol=1e-12)
        x, y = trainer.federation.samples(client, "test")
        outputs, plain = (trainer.engine.network(layout.unpack(model), x.double()) for model in (personal, center))
        assert scores["loss"][client] == pytest.approx(functional.cross_entropy(outputs, y).item(), rel=1e-9)
        assert scores["loss"][client] != pytest.approx(functional.cross_entropy(plain, y).item(), rel=1e-6)
        assert scores["accuracy"][client] == pytest.approx((outputs.argmax(1) == y).double().mean().item())


def test_fedds_is_evaluated_with_the_center():
    trainer = finished(setup_of(FedDS(num_clusters=2)))
    assert torch.equal(personal_vector(trainer, 3), trainer.state.centers[int(trainer.state.labels[3])])
    assert not any("adapt" in name for name in trainer.engine.ledger.entries)


def test_nothing_is_adapted_on_test_or_validation_data():
    federation = ragged_federation(reserve=2)
    held = torch.cat([federation.test.index, federation.valid.index])
    x, y = federation.x.clone(), federation.y.clone()
    x[held], y[held] = 255 - x[held], (y[held] + 1) % 3
    made = []
    for data in (federation, replace(federation, x=x, y=y)):
        trainer = finished(setup_of(FedDSMIC(num_clusters=2, inner_lr=0.3), data))
        personal = trainer.algorithm.personal(trainer.state, trainer.engine.everyone())
        work = personal.adapt(trainer.engine.task.work)
        everyone = trainer.engine.everyone()
        call = trainer.engine.call(adapt, everyone, models=personal.models, refs=personal.refs, work=work, rng=RNG)
        made.append(
            (trainer, {int(c): p for chunk in call for c, p in zip(chunk.clients, chunk.answer.params, strict=True)})
        )
    (one, models), (other, again) = made
    assert torch.equal(one.state.centers, other.state.centers)
    assert all(torch.equal(models[i], again[i]) for i in range(9))
    assert one.progress.rows[-1]["loss"] != other.progress.rows[-1]["loss"]


def recorded_batches(method, work, client):
    """Inputs and labels of every gradient that one client computes in a round, in order."""
    trainer = trainer_of(setup_of(method, work=work, engine="loop"))
    trainer._start()
    kernel, seen = trainer.engine.plan.kernel, []
    plain = kernel.gradients

    def gradients(params, buffers, batch):
        seen.append(batch.x[0])
        return plain(params, buffers, batch)

    kernel.gradients = gradients
    trainer.engine.begin(1, "round")
    trainer.algorithm.round(trainer.state, trainer.engine, torch.tensor([client]), trainer._rng.at("x"))
    own = trainer.federation.samples(client, "train")[0].double()
    return [[int((own == row).flatten(1).all(1).nonzero()[0]) for row in batch] for batch in seen], len(own)


def test_the_two_batches_of_a_step_are_independent_streams():
    work = SGD(lr=0.01, epochs=4, batch_size=4)
    guard = {"num_clusters": 2, "guard": False}
    seen, size = recorded_batches(FedDSMIC(**guard), work, client=1)
    steps = math.ceil(size / 4)  # a pass
    assert len(seen) == 2 * 4 * steps
    inner, outer = seen[0::2], seen[1::2]
    passes = []
    for stream in (inner, outer):
        for start in range(0, len(stream), steps):
            rows = [row for batch in stream[start : start + steps] for row in batch]
            assert sorted(rows) == list(range(size))  # each sample once a pass, in each of the streams
            passes.append(tuple(rows))
    assert len(set(passes)) == 8  # an order of its own in each pass of each stream
    plain, _ = recorded_batches(FedDS(**guard), work, client=1)
    assert plain == inner  # the second stream comes on top of the one that plain training draws


def test_clients_of_feddsmic_work_by_maml_with_the_runs_own_outer_step():
    trainer = trainer_of(setup_of(FedDSMIC(inner_lr=0.02), work=SGD(lr=0.5, momentum=0.9, lr_decay=0.5)))
    trainer.engine.begin(2, "round")
    assert trainer.algorithm.work(trainer.engine) == FirstOrderMAML(lr=0.25, momentum=0.9, inner_lr=0.02)
    assert type(FedDS().work(trainer.engine)) is SGD


# ---- on data ----


@pytest.mark.parametrize("name", ["fedds", "feddsmic"])
def test_finds_the_groups_of_rotated_digits(name):
    """But for a client or two on the way: few samples, seen in four rotations, tell the centers apart."""
    summary = coterie.run(name, "rotated-digits", rounds=8).summary
    assert summary["ari"] >= 0.85
    assert summary["accuracy"]["macro"] >= 0.9


def test_newcomers_are_put_with_their_kind():
    whole = resolve(merge({"run": {"dataset": "rotated-digits"}, "scenario": {"reserve": 10}})).federation()
    old, new = [i for i in range(40) if i % 5], [i for i in range(40) if i % 5 == 0]
    result = coterie.run("fedds", whole.select(old), "mlp", rounds=5, work=SGD(lr=0.2, epochs=4))
    labels = result.assign(whole.select(new))
    of_kind = [result.labels[whole.groups[old] == kind].mode().values for kind in whole.groups[new]]
    assert (labels == torch.stack(of_kind)).sum() >= 6  # of 8


def test_a_run_of_one_round_with_a_part_of_the_clients():
    trainer = finished(setup_of(FedDSMIC(num_clusters=2), schedule=Schedule(rounds=1, participation=0.3)))
    assert bool(torch.isfinite(trainer.state.centers).all())
