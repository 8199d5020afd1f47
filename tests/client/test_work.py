"""Local work: step for step what torch.optim.SGD does, and the proximal term of the squared norm."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from coterie.client.work import SGD, WORK, FirstOrderMAML, Proximal, from_dict, to_dict, values_with_none
from coterie.errors import ConfigError, UnknownName
from coterie.settings import check

CLIENTS, STEPS = 3, 7


def problem():
    """A small problem of least squares for each client: start [c, 4, 2] and [c, 2], inputs, targets by step."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return torch.from_numpy(rng.normal(size=shape))

    return [draw(CLIENTS, 4, 2), draw(CLIENTS, 2)], draw(STEPS, CLIENTS, 5, 4), draw(STEPS, CLIENTS, 5, 2)


def loss(weight, bias, x, y):
    return (x @ weight + bias - y).square().mean()


def by_our_work(work, extras=None):
    """All clients as one stack; parameters after each step."""
    start, inputs, targets = problem()
    params, anchor = [p.clone() for p in start], [p.clone() for p in start]
    optimizer = work.make_optimizer()
    state = {name: [torch.zeros_like(p) for p in params] for name in optimizer.keeps}
    path = []
    for step in range(STEPS):

        def gradient(at, stream, step=step):
            assert stream == 0
            leaves = [p.detach().clone().requires_grad_() for p in at]
            total = sum(loss(leaves[0][c], leaves[1][c], inputs[step, c], targets[step, c]) for c in range(CLIENTS))
            return list(torch.autograd.grad(total, leaves))

        optimizer(params, work.direction(gradient, params, anchor, extras or {}), state, work.lr, step + 1)
        path.append([p.clone() for p in params])
    assert all(torch.equal(a, s) for a, s in zip(anchor, start, strict=True))
    return path


def by_torch(client, lr, prox=0.0, clip=None, kind=torch.optim.SGD, **options):
    """One client with torch.optim; the proximal term is part of the loss, left to autograd."""
    start, inputs, targets = problem()
    params = [p[client].clone().requires_grad_() for p in start]
    optimizer = kind(params, lr=lr, **options)
    path = []
    for step in range(STEPS):
        optimizer.zero_grad()
        away = sum((p - s[client]).square().sum() for p, s in zip(params, start, strict=True))
        (loss(*params, inputs[step, client], targets[step, client]) + prox / 2 * away).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        path.append([p.detach().clone() for p in params])
    return path


def assert_same_paths(ours, theirs_of):
    for client in range(CLIENTS):
        for mine, theirs in zip(ours, theirs_of(client), strict=True):
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one[client], other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lr", [0.05, 0.2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_is_torchs_step_for_step(lr, momentum, weight_decay):
    options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    assert_same_paths(by_our_work(SGD(**options)), lambda client: by_torch(client, **options))


OPTIMIZERS = {
    "nesterov": ({"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": ({"beta1": 0.8, "beta2": 0.95, "eps": 1e-6}, torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-6}),
    "adamw": ({}, torch.optim.AdamW, {}),
}


@pytest.mark.parametrize("clip", [None, 0.5, 1e3])
@pytest.mark.parametrize("prox", [0.0, 0.7])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_torchs_step_for_step(name, weight_decay, prox, clip):
    fields, kind, options = OPTIMIZERS[name]
    work = Proximal(lr=0.05, optimizer=name, weight_decay=weight_decay, prox=prox, clip_norm=clip, **fields)
    options = {"kind": kind, "weight_decay": weight_decay, "prox": prox, "clip": clip, **options}
    assert_same_paths(by_our_work(work), lambda client: by_torch(client, 0.05, **options))


def test_clipping_of_plain_sgd_is_torchs():
    ours = by_our_work(SGD(lr=0.1, momentum=0.5, clip_norm=0.8))
    assert_same_paths(ours, lambda client: by_torch(client, 0.1, momentum=0.5, clip=0.8))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_proximal_is_sgd_on_the_loss_with_half_the_squared_norm(momentum, weight_decay):
    options = {"lr": 0.1, "momentum": momentum, "weight_decay": weight_decay, "prox": 0.7}
    assert_same_paths(by_our_work(Proximal(**options)), lambda client: by_torch(client, **options))


def test_each_client_may_have_its_own_proximal_strength():
    strengths = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    ours = by_our_work(Proximal(lr=0.1, prox=9.0), {"prox": strengths})  # the client's own comes first
    assert_same_paths(ours, lambda client: by_torch(client, 0.1, prox=float(strengths[client])))


def test_a_proximal_strength_of_zero_is_plain_sgd():
    for one, other in zip(by_our_work(Proximal(lr=0.1)), by_our_work(SGD(lr=0.1)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_proximal_gradient_by_hand():
    direction = Proximal(prox=0.5).direction(
        lambda params, stream: [torch.tensor([[1.0, 1.0]])],
        [torch.tensor([[3.0, 0.0]])],
        [torch.tensor([[1.0, 4.0]])],
        {},
    )
    assert direction[0].tolist() == [[2.0, -1.0]]  # 1 + 0.5 * (3 - 1), 1 + 0.5 * (0 - 4)


def test_the_step_size_decays_from_the_second_round_on():
    work = SGD(lr=0.8, lr_decay=0.5, momentum=0.3)
    assert [work.at(r).lr for r in (0, 1, 2, 4)] == [0.8, 0.8, 0.4, 0.1]
    assert work.at(3) == SGD(lr=0.2, lr_decay=1.0, momentum=0.3)
    assert work.at(3).at(3) == work.at(3)  # decayed once, not twice
    assert isinstance(Proximal(prox=1.0).at(2), Proximal)


def test_proximal_of_keeps_the_rest():
    work = SGD(lr=0.3, momentum=0.5, weight_decay=0.1, epochs=3, steps=9, batch_size="full", lr_decay=0.9)
    made = Proximal.of(work, 0.25)
    assert {**values_with_none(work), "prox": 0.25} == values_with_none(made)


def test_proximal_of_proximal_work_takes_the_new_strength():
    assert Proximal.of(Proximal(lr=0.3, prox=0.1), 0.25) == Proximal(lr=0.3, prox=0.25)


@pytest.mark.parametrize(
    "work",
    [
        SGD(),
        SGD(lr=1.0, steps=3, batch_size="full"),
        SGD(optimizer="adamw", beta1=0.8, clip_norm=1.0, schedule="cosine", warmup_rounds=2),
        Proximal(lr=0.5, prox=0.1, momentum=0.9),
    ],
)
def test_work_survives_a_file(work):
    written = json.loads(json.dumps(to_dict(work)))
    again = from_dict(written)
    assert again == work
    assert type(again) is type(work)


def test_work_without_a_name_is_sgd():
    assert from_dict({"lr": 0.5}) == SGD(lr=0.5)


def test_unknown_work():
    with pytest.raises(UnknownName, match=r"There is no local work 'sgdd'\. Did you mean 'sgd'\?"):
        from_dict({"work": "sgdd"})
    with pytest.raises(UnknownName, match=r"There is no field of work \(SGD\) named 'prox'"):
        from_dict({"prox": 0.1})


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (SGD(lr=0.0), "lr of SGD must be a number > 0. Got 0.0 instead."),
        (SGD(momentum=1.0), "momentum of SGD must be a number >= 0 and < 1. Got 1.0 instead."),
        (SGD(weight_decay=-1.0), "weight_decay of SGD must be a number >= 0. Got -1.0 instead."),
        (SGD(epochs=0), "epochs of SGD must be an int >= 1. Got 0 instead."),
        (SGD(steps=0), "steps of SGD must be an int >= 1 or None. Got 0 instead."),
        (SGD(batch_size="all"), "batch_size of SGD must be an int >= 1 or 'full'. Got 'all' instead."),
        (SGD(lr_decay=1.1), "lr_decay of SGD must be a number > 0 and <= 1. Got 1.1 instead."),
        (SGD(optimizer=3), "optimizer of SGD must be a string. Got 3 instead."),
        (SGD(beta1=1.0), "beta1 of SGD must be a number >= 0 and < 1. Got 1.0 instead."),
        (SGD(eps=0.0), "eps of SGD must be a number > 0. Got 0.0 instead."),
        (SGD(clip_norm=0.0), "clip_norm of SGD must be a number > 0 or None. Got 0.0 instead."),
        (SGD(decay_every=0), "decay_every of SGD must be an int >= 1. Got 0 instead."),
        (SGD(lr_floor=0.0), "lr_floor of SGD must be a number > 0 and <= 1. Got 0.0 instead."),
        (SGD(warmup_rounds=-1), "warmup_rounds of SGD must be an int >= 0. Got -1 instead."),
        (Proximal(prox=-0.1), "prox of Proximal must be a number >= 0. Got -0.1 instead."),
    ],
)
def test_bad_values(work, sentence):
    with pytest.raises(ConfigError) as caught:
        check(work)
    assert str(caught.value) == sentence


def test_all_work_is_known_by_its_key():
    assert {key: cls.key for key, cls in WORK.items()} == {key: key for key in WORK}
    assert {"sgd", "proximal"} <= set(WORK)
    assert Proximal.anchored
    assert not SGD.anchored


# ---- first-order MAML ----

CURVES = {0: 2.0, 1: 0.5}  # the loss of stream s is curve / 2 * (w - bottom)^2
BOTTOMS = {0: 1.0, 1: -3.0}


def on_a_quadratic(asked=None):
    """Gradients of a quadratic that is another one for each of the two batches."""

    def gradient(at, stream):
        if asked is not None:
            asked.append((stream, [p.tolist() for p in at]))
        return [CURVES[stream] * (p - BOTTOMS[stream]) for p in at]

    return gradient


def test_maml_descends_along_the_gradient_after_adapting():
    asked, w = [], torch.tensor([[4.0], [0.0]])
    [direction] = FirstOrderMAML(inner_lr=0.1).direction(on_a_quadratic(asked), [w], [], {})
    # w' = 4 - 0.1 * 2 * (4 - 1) = 3.4 and 0 - 0.1 * 2 * (0 - 1) = 0.2; then 0.5 * (w' + 3).
    assert direction.flatten().tolist() == pytest.approx([3.2, 1.6])
    assert [stream for stream, _ in asked] == [0, 1]
    assert asked[1][1][0] == [pytest.approx([3.4]), pytest.approx([0.2])]
    assert w.tolist() == [[4.0], [0.0]]  # where the outer step starts from is not moved


def test_momentum_and_weight_decay_are_on_the_outer_step_only():
    work = FirstOrderMAML(lr=0.1, inner_lr=0.2, momentum=0.9, weight_decay=0.01)
    asked, w, optimizer = [], [torch.tensor([[4.0]], dtype=torch.float64)], work.make_optimizer()
    state = {"velocity": [torch.zeros(1, 1, dtype=torch.float64)]}
    at, speed = 4.0, 0.0
    for step in range(4):
        optimizer(w, work.direction(on_a_quadratic(asked), w, [], {}), state, work.lr, step + 1)
        adapted = at - 0.2 * 2.0 * (at - 1.0)  # a plain step, whatever the velocity
        assert asked[2 * step + 1] == (1, [[[pytest.approx(adapted)]]])
        speed = 0.9 * speed + 0.5 * (adapted + 3.0) + 0.01 * at
        at -= 0.1 * speed
        assert w[0].item() == pytest.approx(at, rel=1e-12)


def test_maml_of_keeps_the_rest_and_survives_a_file():
    work = SGD(lr=0.3, momentum=0.5, weight_decay=0.1, epochs=3, steps=9, batch_size="full", lr_decay=0.9)
    made = FirstOrderMAML.of(work, 0.25)
    assert {**values_with_none(work), "inner_lr": 0.25} == values_with_none(made)
    assert from_dict(json.loads(json.dumps(to_dict(made)))) == made
    assert isinstance(made.at(2), FirstOrderMAML)
    with pytest.raises(ConfigError, match=r"^inner_lr of FirstOrderMAML must be a number > 0\. Got 0\.0 instead\.$"):
        check(FirstOrderMAML(inner_lr=0.0))


def test_maml_draws_from_two_streams():
    assert (SGD.streams, Proximal.streams, FirstOrderMAML.streams) == (1, 1, 2)
