"""Flower mods that a site can apply to its messages."""

from __future__ import annotations

from typing import Any

import torch

from coterie.engines.flower import wire
from coterie.errors import ConfigError


def clip_and_noise(norm: float, noise: float = 0.0) -> Any:
    """A mod that clips the update of a site to `norm` and adds Gaussian noise.

    `noise` is the standard deviation of the noise per weight, as a multiple of `norm`. The mod does not account for a
    privacy budget, which also depends on how often the site takes part.
    """
    if norm <= 0 or noise < 0:
        raise ConfigError(f"clip_and_noise needs norm > 0 and noise >= 0. Got {norm} and {noise} instead.")

    def mod(message: Any, context: Any, call_next: Any) -> Any:
        reply = call_next(message, context)
        if message.metadata.message_type != "train" or reply.has_error() or wire.ANSWER not in reply.content:
            return reply
        answer = wire.tensors_of(reply.content[wire.ANSWER])
        if "params" not in answer:
            return reply
        _, sent, _, _ = wire.read_request(message.content)
        if not sent:
            return reply
        moved = answer["params"] - torch.stack(sent)  # [m, P]: relative to each model that was sent
        nearest = int(moved.norm(dim=1).argmin())
        update = moved[nearest]
        update = update * (norm / update.norm().clamp_min(norm))
        if noise:
            update = update + torch.randn_like(update) * (noise * norm)
        answer["params"] = (sent[nearest] + update).unsqueeze(0)
        reply.content[wire.ANSWER] = wire.record_of(answer)
        return reply

    return mod
