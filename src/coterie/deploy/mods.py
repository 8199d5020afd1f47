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
        reply = call_next(message, context)
        if message.metadata.message_type != "train" or reply.has_error() or wire.ANSWER not in reply.content:
            return reply
        answer = wire.tensors_of(reply.content[wire.ANSWER])
        call, sent, _, _ = wire.read_request(message.content)
        models = None
        if sent:
            refs = torch.arange(len(sent))
            models = Models(torch.stack(sent), refs.unsqueeze(0) if call.several else refs)
        reply.content[wire.ANSWER] = wire.record_of(protected(answer, models, norm, noise, fresh))
        return reply

    return mod
