"""What a client can do, written for c clients at once: every tensor has a leading axis c.

A client step is a small function `step(block, models, work, **payload) -> Answer`. On Flower and in the loop
engine c is 1; in the vectorized engine it is the chunk. The engines differ only in the way they train, whose kernel
computes gradients and outputs for a stack of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie.client.batches import Batches, DeviceData, StepCounts
from coterie.client.stack import Job, Plan
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import Split, SplitName
from coterie.errors import ConfigError
from coterie.nets.flat import Loss
from coterie.randomness import Rng, mix


@dataclass(frozen=True)
class Models:
    """The models that the clients of a block were sent: rows of a table."""

    table: Tensor  # [M, P]
    refs: Tensor  # [c] one each, or [c, m] several

    def rows(self) -> Tensor:
        """One model each, [c, P]."""
        if self.refs.dim() != 1:
            raise ConfigError("These clients were sent several models each; choose one with take(models, choice).")
        return self.table[self.refs]


def take(models: Models, choice: Tensor) -> Tensor:
    """The chosen one of several models of each client: choice [c] in range(m) -> [c, P]."""
    return models.table[models.refs.gather(1, choice.to(models.refs.device).unsqueeze(1)).squeeze(1)]


class Memory(Protocol):
    """Named tensors that stay with the clients of a block."""

    def get(self, name: str, default: Tensor) -> Tensor:
        """What the clients remember, [c, ...]; `default` (broadcast) for those that remember nothing."""
        ...

    def put(self, name: str, value: Tensor) -> None:
        """Let the clients remember [c, ...]."""
        ...


class Block:
    """c clients that do the same thing at once."""

    def __init__(
        self,
        clients: Tensor,
        data: DeviceData,
        task: Task,
        plan: Plan,
        memory: Memory,
        rng: Rng,
        samples_at_once: int,
    ) -> None:
        self.clients = clients  # int64 [c], on the CPU
        self.task = task
        self.memory = memory
        self._data = data
        self._plan = plan
        self._kernel = plan.kernel
        self._keys = rng.keys(data.federation.keys[clients].to(data.device))  # [c]
        self._at_once = samples_at_once
        self._view = data.federation.view_of(clients)  # [c]
        self.gradients = 0  # gradients of single samples that were computed, for the ledger

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def samples(self) -> Tensor:
        """Number of training samples of each client, int64 [c], on the device."""
        return self._sizes("train").to(self._data.device)

    @property
    def initial(self) -> Tensor:
        """The common start of the run, which every client can make by itself: [c, P]."""
        return self.task.initial.to(self._data.device, self._data.dtype).expand(len(self), -1)

    def rng(self, purpose: str) -> Tensor:
        """One random key for each client, for this purpose in this call: int64 [c]."""
        return mix(self._keys ^ Rng(0).at(purpose).key)

    # ---- training ----

    def train(self, start: Tensor | Models, work: SGD, **extras: Tensor) -> Tensor:
        """Train from `start` (models [c, P], or those that were sent) on the clients' own samples: models [c, P].

        `extras` are per-client tensors [c, ...] that the work knows (`prox`).
        """
        counts = StepCounts(self._sizes("train"), work)
        self.gradients += counts.num_samples * work.gradients
        sent = start if isinstance(start, Models) else Models(start, torch.arange(len(self), device=start.device))
        device = sent.table.device
        in_order = torch.empty(len(self), self.task.layout.size, dtype=sent.table.dtype, device=device)
        streams = [self.rng(f"batches {stream}") for stream in range(work.streams)]
        dropout = self.rng("dropout")
        self._data.rendered()  # now, and not by several threads at once

        def one(which: slice) -> None:
            part = counts.part(which)
            order = part.order.to(device)
            keys = [None if work.batch_size == "full" else stream[order] for stream in streams]
            batches = [Batches(self._data, self.clients[part.order], part, key) for key in keys]
            own = {name: value[order] for name, value in extras.items()}
            refs = sent.refs[order]
            same = len(refs) == 1 or len(sent.table) == 1  # then nothing is copied
            begun = sent.table[int(refs[0])].expand(len(refs), -1) if same else sent.table[refs]
            self._plan.train(Job(self.task.layout, begun, in_order[which], work, part, batches, dropout[order], own))

        self._plan.each(one, counts)
        back = torch.empty_like(counts.order)
        back[counts.order] = torch.arange(len(back))
        return in_order if torch.equal(back, counts.order) else in_order[back.to(device)]

    def gradient(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the mean loss over all training samples, and the float buffers after it.

        Both are [c, P]-shaped parts of the vector: gradient [c, num_parameters], buffers [c, rest].
        """
        one = SGD(lr=1.0, epochs=1, batch_size="full")
        moved = self.train(params, one)
        cut = self.task.layout.num_parameters
        return params[:, :cut] - moved[:, :cut], moved[:, cut:]

    # ---- looking ----

    def outputs(self, params: Tensor, x: Tensor) -> Tensor:
        """Outputs [c, n, ...] of models [c, P] for the same inputs [n, ...], in eval mode."""
        pieces = max(1, self._at_once // max(1, len(params)))
        found = [self._kernel.outputs(params, part.expand(len(params), *part.shape)) for part in x.split(pieces)]
        return torch.cat(found, dim=1)

    def label_counts(self) -> Tensor:
        """Number of training samples of each class: int64 [c, L]."""
        counts = []
        for position in range(len(self)):
            rows = self._data.index("train")[self._shard_range("train", position)]
            _, y = self._data.gather(rows.unsqueeze(0), self._view[position : position + 1])
            counts.append(torch.bincount(y.flatten(), minlength=self.task.num_classes))
        return torch.stack(counts)

    def losses(self, models: Models | Tensor, split: SplitName = "train") -> Tensor:
        """Mean loss of each client's samples under its model [c], or under each of several [c, m]."""
        return self._scores(models, split)["loss"]

    def evaluate(self, models: Models | Tensor, split: SplitName = "test") -> dict[str, Tensor]:
        """Scores of each client's model, [c] each: samples, loss, and for classes accuracy and F1.

        F1 is macro over the classes the client holds; with two classes, that of class 1.
        A client without samples in the split scores 0 with samples = 0.
        """
        return self._scores(models, split)

    def _scores(self, models: Models | Tensor, split: SplitName) -> dict[str, Tensor]:
        if isinstance(models, Tensor):
            models = Models(models, torch.arange(len(self), device=models.device))
        shape = models.refs.shape
        per_client = 1 if models.refs.dim() == 1 else shape[1]
        shard = self._split(split).shard[self.clients]
        pairs = torch.stack(
            [
                models.refs.cpu().reshape(-1),
                shard.repeat_interleave(per_client),
                self._view.repeat_interleave(per_client),
            ],
            dim=1,
        )  # [c * m, 3]: model, shard, view
        unique, inverse = torch.unique(pairs, dim=0, return_inverse=True)  # sorted by model
        scores = _Scores(self.task.num_classes, self.task.loss, self._data.device)
        for some, outputs, y, lengths in self._forward(models.table, unique, split):
            scores.add(outputs, y, lengths, len(some))
        back = inverse.to(self._data.device)
        return {name: values[back].reshape(shape) for name, values in scores.result().items()}

    def _forward(
        self, table: Tensor, pairs: Tensor, split: SplitName
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Run each (model, shard, view) once: yields pairs, outputs [n, ...], labels [n], lengths, in order."""
        offsets = self._split(split).offsets
        sizes = offsets.diff()[pairs[:, 1]]
        distinct = len(pairs[:, 0].unique())
        if distinct == len(pairs) and distinct > 1:
            yield from self._forward_own(table, pairs, split, sizes)
            return
        for model in pairs[:, 0].unique().tolist():
            mine = pairs[:, 0] == model
            some, lengths = pairs[mine], sizes[mine]
            where = _runs(offsets[some[:, 1]], lengths)  # places in the split, shard after shard
            view = some[:, 2].repeat_interleave(lengths)  # one for each sample
            found, labels = [], []
            for part in torch.arange(len(where)).split(self._at_once) if len(where) else [torch.arange(0)]:
                x, y = self._data.at(split, where[part].to(self._data.device), view[part])
                found.append(self._kernel.outputs(table[model : model + 1], x.unsqueeze(0))[0])
                labels.append(y)
            yield some, torch.cat(found), torch.cat(labels), lengths

    def _forward_own(
        self, table: Tensor, pairs: Tensor, split: SplitName, sizes: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """As `_forward`, where every pair has a model of its own: stacked, in padded pieces."""
        offsets = self._split(split).offsets
        longest = max(1, int(sizes.max()))
        for some in torch.arange(len(pairs)).split(max(1, self._at_once // longest)):
            lengths = sizes[some]
            width = max(1, int(lengths.max()))
            place = torch.arange(width)
            inside = place < lengths.unsqueeze(1)  # [u, width]
            where = (offsets[pairs[some, 1]].unsqueeze(1) + place).where(inside, torch.zeros(1, dtype=torch.int64))
            rows = self._data.index(split)[where.to(self._data.device)]
            x, y = self._data.gather(rows, pairs[some, 2])
            outputs = self._kernel.outputs(table[pairs[some, 0].to(table.device)], x)
            real = inside.to(self._data.device)
            yield pairs[some], outputs[real], y[real], lengths

    # ---- shards ----

    def _split(self, split: SplitName) -> Split:
        return self._data.federation.split(split)

    def _sizes(self, split: SplitName) -> Tensor:
        return self._split(split).sizes[self.clients]

    def _shard_range(self, split: SplitName, position: int) -> slice:
        which = self._split(split)
        shard = int(which.shard[self.clients[position]])
        return slice(int(which.offsets[shard]), int(which.offsets[shard + 1]))


class _Scores:
    """Sums up losses, hits and class counts over (model, shard) pairs, in order."""

    def __init__(self, num_classes: int, loss: Loss, device: torch.device) -> None:
        self._classes, self._loss, self._device = num_classes, loss, device
        self._parts: dict[str, list[Tensor]] = {"samples": [], "loss": [], "accuracy": [], "f1": []}

    def add(self, outputs: Tensor, y: Tensor, lengths: Tensor, count: int) -> None:
        """Add `count` pairs whose samples come one after the other, `lengths` of each."""
        lengths = lengths.to(self._device)
        divisor = lengths.clamp_min(1)
        losses = self._loss(outputs, y).double()
        self._parts["samples"].append(lengths)
        self._parts["loss"].append(_segment_sums(losses, lengths) / divisor)
        if not self._classes:
            return
        guess = outputs.flatten(1).argmax(1)
        hit = guess == y
        self._parts["accuracy"].append(_segment_sums(hit.double(), lengths) / divisor)
        segment = torch.repeat_interleave(torch.arange(count, device=self._device), lengths)
        wide = max(self._classes, outputs.shape[1])

        def count_by_class(which: Tensor) -> Tensor:
            return torch.bincount(which, minlength=count * wide).reshape(count, wide).double()

        actual = count_by_class(segment * wide + y)
        guessed = count_by_class(segment * wide + guess)
        right = count_by_class((segment * wide + y)[hit])
        f1 = 2 * right / (actual + guessed).clamp_min(1)  # [count, wide]
        if self._classes == 2:
            self._parts["f1"].append(f1[:, 1])
        else:
            held = actual > 0
            self._parts["f1"].append((f1 * held).sum(1) / held.sum(1).clamp_min(1))

    def result(self) -> dict[str, Tensor]:
        """One value for each pair."""
        return {name: torch.cat(parts) for name, parts in self._parts.items() if parts}


def _runs(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, ... of each run, one run after the other.

    >>> _runs(torch.tensor([10, 40]), torch.tensor([3, 2])).tolist()
    [10, 11, 12, 40, 41]
    """
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


def _segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0)
