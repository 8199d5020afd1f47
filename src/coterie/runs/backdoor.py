"""How often the backdoor of a simulated attack works on honest clients."""

from __future__ import annotations

import torch

from coterie.data.transforms import apply_view
from coterie.engines.attacks import TARGET, triggered
from coterie.runs.loop import Trainer
from coterie.runs.result import personal_served


def backdoor_success(trainer: Trainer) -> float | None:
    """The share of honest clients' test samples with the trigger that their own models take for the target class.

    Samples of the target class do not count. None if the attack is another one or there are no such samples.
    """
    if trainer.attack.kind != "backdoor":
        return None
    federation, task = trainer.federation.at(trainer.served_round), trainer.engine.task
    largest, views = federation.x.amax(), federation.view_of(torch.arange(len(federation))).tolist()
    fooled = total = 0
    for client in (~trainer.attack.attackers).nonzero().flatten().tolist():
        rows = federation.test.rows(client)
        known = rows if federation.sample_ids is None else federation.sample_ids[rows]
        shown = federation.scaled(triggered(federation.x[rows], largest))
        x, y = apply_view(federation.views[views[client]], shown, federation.y[rows], known)
        x = x[y != TARGET]
        if len(x):
            module = personal_served(trainer, client).module(task.module, task.num_classes, task.input_shape)
            with torch.no_grad():
                fooled += int((module.eval()(x).argmax(1) == TARGET).sum())
            total += len(x)
    return fooled / total if total else None
