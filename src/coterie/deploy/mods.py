"""Flower mods that a site can apply to its messages."""

from __future__ import annotations

from typing import Any

import torch

from coterie.client.block import Models
from coterie.client.privacy import fresh, protected
from coterie.engines.flower import wire
from coterie.errors import ConfigError


def clip_and_noise(norm: float, noise: float = 0.0) -> Any:
    """A mod that clips what a site sends of its training to `norm` and adds noise, whatever the server asks for.

    `noise` is the standard deviation of the noise per number, as a multiple of `norm`. It is what `work.update_clip`
    and `work.update_noise` do, on the site's own word. Nobody accounts for the budget, which also depends on how often
    the site takes part: see `coterie.runs.accounting.epsilon`.
    """
    if norm <= 0 or noise < 0:
        raise ConfigError(f"clip_and_noise needs norm > 0 and noise >= 0. Got {norm} and {noise} instead.")

    def mod(message: Any, context: Any, call_next: Any) -> Any:
        asked = wire.parted(message.content)  # before the call, which may change the message
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        main, first = (_covered(*both, norm, noise) for both in zip(asked, wire.parted(reply.content), strict=True))
        for name, record in wire.joined(main, first).items():
            reply.content[name] = record
        return reply

    return mod


def _covered(asked: Any, answered: Any, norm: float, noise: float) -> Any:
    """One of the answers in a message, with what it was asked; whatever the phase, which the server names."""
    if answered is None or asked is None or wire.ANSWER not in answered:
        return answered
    call, sent, _, _ = wire.read_request(asked)
    models = None
    if sent:
        refs = torch.arange(len(sent))
        models = Models(torch.stack(sent), refs.unsqueeze(0) if call.several else refs)
    answered[wire.ANSWER] = wire.record_of(
        protected(wire.tensors_of(answered[wire.ANSWER]), models, norm, noise, fresh)
    )
    return answered
