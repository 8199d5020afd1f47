"""A site that gets two calls in one message: what it answers, in which order, and what it remembers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

from flwr.app import ConfigRecord

from coterie.client.steps import Answer, client_step, train
from coterie.client.work import to_dict
from coterie.deploy.mods import clip_and_noise
from coterie.engines.flower import wire
from coterie.engines.flower.site import Site
from coterie.methods.fedavg import FedAvg
from coterie.randomness import Rng
from tests.helpers import setup_of


@client_step("tests.flower:count")
def count(block, models, work):
    """Count how often the client was asked, and answer with the number."""
    now = block.memory.get("asked", torch.zeros(1, 1)) + 1
    block.memory.put("asked", now)
    return Answer(asked=now[:, 0])


@client_step("tests.flower:fail")
def fail(block, models, work):
    raise ValueError("out of order")


@pytest.fixture
def setup():
    return setup_of(FedAvg())


@pytest.fixture
def site(setup, tmp_path):
    return Site(setup.federation(), setup.task().make, setup.task().loss, tmp_path)


def request(setup, step, round, models=None, life="a", **past):
    sent = dict(wire.model_record(model) for model in models or ())
    names = None if models is None else list(sent)
    head = {"step": step, "client": setup.federation().names[0], "round": round, "phase": "round", "key": 1, "seed": 0}
    more = {"run": "r", "life": life, "past": past, "precision": "float64"}
    return wire.request(wire.Call(**head, work=to_dict(setup.work), models=names, **more), sent, None, {})


def arrays(content):
    return wire.tensors_of(content["answer"])


def asked(content):
    return int(arrays(content)["asked"])


def test_the_first_call_is_done_first(site, setup):
    both = site.answer(wire.joined(request(setup, "tests.flower:count", 2), request(setup, "tests.flower:count", 1)))
    main, first = wire.parted(both)
    assert (asked(first), asked(main)) == (1, 2)
    assert (first["told"]["round"], main["told"]["round"]) == (1, 2)
    assert wire.parted(site.answer(request(setup, "tests.flower:count", 3)))[1] is None


def test_a_repeated_round_repeats_both_calls_of_its_message(site, setup):
    """The first call belongs to round 1, but a server that resumes after round 1 has not had its answer yet."""
    step = "tests.flower:count"
    site.answer(request(setup, step, 1))
    for life, past in (("a", {}), ("b", {"a": 1}), ("c", {"a": 1, "b": 1})):
        message = wire.joined(request(setup, step, 2, life=life, **past), request(setup, step, 1, life=life, **past))
        main, first = wire.parted(site.answer(message))
        assert (asked(first), asked(main)) == (2, 3)


@pytest.mark.parametrize(("name", "value"), [("life", "x/../../../elsewhere"), ("life", 3), ("round", "1/../2")])
def test_what_names_files_must_be_a_number(site, setup, name, value):
    content = request(setup, "tests.flower:count", 1)
    call = json.loads(content["call"]["json"]) | {name: value}
    content["call"] = ConfigRecord({"json": json.dumps(call)})
    with pytest.raises(wire.Refused, match="an invalid request"):
        site.answer(content)


@pytest.mark.parametrize("failing", ["first", "main"])
def test_a_call_that_fails_does_not_cost_the_other(site, setup, failing):
    steps = {"first": "tests.flower:count", "main": "tests.flower:count", failing: "tests.flower:fail"}
    message = wire.joined(request(setup, steps["main"], 2), request(setup, steps["first"], 1))
    main, first = wire.parted(site.answer(message))
    bad, good = (first, main) if failing == "first" else (main, first)
    assert asked(good) == 1
    assert bad["told"]["error"] == "ValueError: out of order"
    assert "answer" not in bad


def test_two_calls_share_the_models_that_are_equal(setup):
    models = [Rng.seed(number).normal(setup.task().layout.size) for number in range(3)]
    main, first = request(setup, "a:b", 2, models[:2]), request(setup, "a:b", 1, [models[1].clone(), models[2]])
    both = wire.joined(main, first)
    assert sum(name.startswith("model.") for name in both) == 3
    for content, sent in zip(wire.parted(both), (models[:2], models[1:]), strict=True):
        assert torch.equal(torch.stack(wire.read_request(content)[1]), torch.stack(sent))


def test_a_mod_clips_the_update_and_leaves_the_scores(site, setup):
    model = setup.task().initial.double()
    evaluation = request(setup, "coterie.block:evaluate", 1, [model])
    metadata = SimpleNamespace(message_type="train")
    message = SimpleNamespace(
        content=wire.joined(request(setup, train.wire_name, 2, [model]), evaluation), metadata=metadata
    )
    answered = site.answer(message.content)
    plain, scores = wire.parted(answered)
    moved = arrays(plain)["params"] - model
    reply = SimpleNamespace(content=answered, has_error=lambda: False)
    clip_and_noise(0.5 * float(moved.norm()))(message, None, lambda message, context: reply)
    clipped, kept = wire.parted(reply.content)
    update = arrays(clipped)["params"] - model
    assert torch.allclose(update, 0.5 * moved)
    for name, values in arrays(scores).items():
        assert torch.equal(values, arrays(kept)[name])


def test_a_mod_clips_whatever_the_server_calls_the_message(site, setup):
    model = setup.task().initial.double()
    evaluation = request(setup, "coterie.block:evaluate", 2, [model])
    asked = wire.joined(evaluation, request(setup, train.wire_name, 1, [model]))
    message = SimpleNamespace(content=asked, metadata=SimpleNamespace(message_type="evaluate"))
    reply = SimpleNamespace(content=site.answer(asked), has_error=lambda: False)
    clip_and_noise(1e-3)(message, None, lambda message, context: reply)
    first = wire.parted(reply.content)[1]
    assert (arrays(first)["params"] - model).norm().item() == pytest.approx(1e-3)


@pytest.mark.parametrize("secret", [True, False])
def test_noise_is_fresh_at_sites_and_repeats_in_simulations(setup, tmp_path, secret):
    noisy = replace(setup, work=replace(setup.work, update_clip=0.5, update_noise=0.1))
    site = Site(setup.federation(), setup.task().make, setup.task().loss, tmp_path, secret=secret)
    message = request(noisy, train.wire_name, 1, [setup.task().initial.double()])
    one, other = (arrays(site.answer(message))["params"] for _ in range(2))
    assert torch.equal(one, other) is not secret
