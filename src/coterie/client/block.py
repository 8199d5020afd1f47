"""What a client can do, written for c clients at once: every tensor has a leading axis c.

In the loop engine and at a site c is 1; in the vectorized engine it is the chunk. Engines differ in their plan, whose
kernel computes gradients and outputs of a stack of models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coterie.client.batches import Batch, Batches, DeviceData, StepCounts, runs
from coterie.client.stack import Job, Plan
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import Split, SplitName
from coterie.errors import ConfigError
from coterie.nets.flat import Loss, cross_entropy
from coterie.randomness import Rng, mix

_GROUPED = 64  # times the samples of one forward pass: so many outputs are held at once


@dataclass(frozen=True)
class Models:
    """The models sent to the clients of a block: rows of a table."""

    table: Tensor  # [M, P]
    refs: Tensor  # [c] one each, or [c, m] several

    def rows(self) -> Tensor:
        """The model of each client, [c, P]; ConfigError if it was sent several."""
        if self.refs.dim() != 1:
            raise ConfigError("Clients were sent several models each; choose one with take(models, choice).")
        return self.table[self.refs]


def take(models: Models, choice: Tensor) -> Tensor:
    """The chosen model of each client: choice [c] in range(m) -> [c, P]."""
    return models.table[models.refs.gather(1, choice.to(models.refs.device).unsqueeze(1)).squeeze(1)]


@dataclass(frozen=True)
class Mixture:
    """What clients are served with: one model each, or a few whose predictions are mixed."""

    models: Models  # refs [c, m]; clients may share rows of the table
    weights: Tensor  # [c, m]; rows sum to 1
    bias: Tensor | None = None  # [c, m, L], added to the first outputs of each model before they are mixed

    @classmethod
    def of_one(cls, params: Tensor) -> Mixture:
        """One model per client, [c, P]."""
        rows = torch.arange(len(params), device=params.device).unsqueeze(1)
        return cls(Models(params, rows), params.new_ones(len(params), 1))

    @property
    def params(self) -> Tensor:
        """The models of each client, [c, m, P]."""
        return self.models.table[self.models.refs]

    def mixed(self, outputs: Tensor, clients: Tensor, num_classes: int) -> Tensor:
        """The served outputs [n, ...] from those of the models [m, n, ...]; `clients` [n] are positions."""
        if self.bias is not None:
            wide = outputs.shape[2] - self.bias.shape[2]
            bias = torch.nn.functional.pad(self.bias.to(outputs), (0, wide))
            outputs = outputs + bias[clients].transpose(0, 1)
        return mixed_outputs(outputs, self.weights.to(outputs)[clients].T, num_classes)


def mixed_outputs(outputs: Tensor, weights: Tensor, num_classes: int) -> Tensor:
    """Mix outputs [m, n, ...] with weights [m, n]: the logarithm of mixed probabilities, or the mean of numbers.

    One model keeps its outputs, so that it may have any loss. A model of weight 0 has no say, whatever its outputs.
    """
    if len(outputs) == 1:
        return outputs[0]
    weights = weights.reshape(*weights.shape, *[1] * (outputs.dim() - 2))
    if not num_classes:
        return (outputs * weights).where(weights > 0, 0.0).sum(0)
    return torch.logsumexp((outputs.log_softmax(2) + weights.log()).where(weights > 0, -torch.inf), dim=0)


class Memory(Protocol):
    """Named tensors that the clients of a block keep between calls."""

    def get(self, name: str, default: Tensor) -> Tensor:
        """The stored rows [c, ...]; `default` (broadcast) for clients that have none."""
        ...

    def put(self, name: str, value: Tensor) -> None:
        """Store one row [c, ...] per client."""
        ...


class Block:
    """c clients computed together."""

    def __init__(
        self,
        clients: Tensor,
        data: DeviceData,
        task: Task,
        plan: Plan,
        memory: Memory,
        rng: Rng,
        samples_at_once: int,
        gradients_at_once: int,
    ) -> None:
        self.clients, self.task, self.memory = clients, task, memory  # clients: int64 [c], on the CPU
        self._data, self._plan, self._kernel = data, plan, plan.kernel
        self._keys = rng.keys(data.federation.keys[clients].to(data.device))  # [c]
        self._at_once, self._gradients_at_once = samples_at_once, gradients_at_once
        self._view = data.federation.view_of(clients)  # [c]
        self.secret = False  # whether noise for privacy comes from the system, as at real sites, not from the seed
        self.gradients = 0  # per-sample gradients computed, for the ledger

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def samples(self) -> Tensor:
        """Number of training samples, int64 [c], on the device."""
        return self._sizes("train").to(self._data.device)

    @property
    def initial(self) -> Tensor:
        """The initial weights of the run, which every client derives from the seed: [c, P]."""
        return self.task.initial.to(self._data.device, self._data.dtype).expand(len(self), -1)

    def has(self, split: SplitName) -> bool:
        """Whether any of these clients has samples in a split."""
        return bool(self._sizes(split).any())

    def rng(self, purpose: str) -> Tensor:
        """One random key per client for this purpose in this call: int64 [c]."""
        return mix(self._keys ^ Rng(0).at(purpose).key)

    # ---- training ----

    def train(self, start: Tensor | Models, work: SGD, purpose: str = "", **extras: Tensor) -> Tensor:
        """Train from `start` (models [c, P], or those that were sent) on the clients' training samples: [c, P].

        `extras` are per-client tensors [c, ...] that the work uses, such as `prox`. A second training in the same call
        gets batches of its own with another `purpose`.
        """
        counts = StepCounts(self._sizes("train"), work)
        self.gradients += counts.num_samples * work.gradients
        sent = start if isinstance(start, Models) else self._one_each(start)
        device = sent.table.device
        layout = self.task.layout.beside(work.models)
        in_order = torch.empty(len(self), layout.size, dtype=sent.table.dtype, device=device)
        streams = [self.rng(f"{purpose}batches {stream}") for stream in range(work.streams)]
        dropout = self.rng(f"{purpose}dropout")
        self._data.rendered()  # before the threads start, so that only one renders

        def one(which: slice) -> None:
            part = counts.part(which)
            order = part.order.to(device)
            keys = [None if work.batch_size == "full" else stream[order] for stream in streams]
            batches = [Batches(self._data, self.clients[part.order], part, key) for key in keys]
            own = {name: value[order] for name, value in extras.items()}
            refs = sent.refs[order]
            begun = _rows_at(sent.table, refs)
            self._plan.train(Job(layout, begun, in_order[which], work, part, batches, dropout[order], own))

        self._plan.each(one, counts)
        if torch.equal(counts.order, torch.arange(len(self))):
            return in_order
        return in_order[torch.argsort(counts.order).to(device)]

    def num_steps(self, work: SGD) -> Tensor:
        """Number of steps of each client in this work, int64 [c], on the device."""
        counts = StepCounts(self._sizes("train"), work)
        return counts.steps[torch.argsort(counts.order)].to(self._data.device)

    def gradient(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of the mean loss over all training samples [c, num_parameters], and updated buffers [c, rest]."""
        moved = self.train(params, SGD(lr=1.0, epochs=1, batch_size="full"))
        cut = self.task.layout.num_parameters
        return params[:, :cut] - moved[:, :cut], moved[:, cut:]

    def class_gradients(
        self, models: Models | Tensor, parts: int = 1, by_class: bool = True
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """The mean gradient over each client's training samples of each class, one class after the other.

        Yields the class, which clients hold it (positions [h]), their gradients [h, parts, num_parameters] and sample
        counts [h, parts]. With several `parts`, the samples of a class are divided among them; a part may be empty.
        Without `by_class`, or in a task without classes, all samples are one class. Norms use the running statistics
        of the model: those of a batch of one class would hide what the class is like. The next class overwrites the
        gradients of the last: fresh memory for each would take longer than computing them.
        """
        sent = models if isinstance(models, Models) else self._one_each(models)
        split, device = self._split("train"), self._data.device
        sizes, first = self._sizes("train"), self._data.starts("train", split.shard[self.clients], self._view)
        place = torch.arange(int(sizes.max()))
        real = (place < sizes.unsqueeze(1)).to(device)  # [c, longest]
        where = (first.unsqueeze(1) + torch.minimum(place, sizes.unsqueeze(1) - 1)).to(device)
        x, y = self._data.at("train", where.flatten(), self._view.repeat_interleave(len(place)))
        x, y = x.reshape(*where.shape, *x.shape[1:]), y.reshape(*where.shape, *y.shape[1:])
        self.gradients += int(sizes.sum())
        data = Batch(x, y, None, self.rng("class gradients"))
        params = [tensor.contiguous() for tensor in self.task.layout.unpack(sent.table[sent.refs]).values()]
        memory = params[0].new_empty(len(self), parts, self.task.layout.num_parameters)
        for label in range(self.task.num_classes if by_class and self.task.num_classes else 1):
            mine = (y == label) & real if by_class and self.task.num_classes else real
            counts = mine.sum(1)  # [c]
            holders = counts.nonzero().flatten()
            if not len(holders):
                continue
            order = mine[holders].to(torch.int8).argsort(dim=1, descending=True, stable=True)
            samples = [(counts[holders] + parts - 1 - part) // parts for part in range(parts)]
            found = memory[: len(holders)]
            for part in range(parts):
                self._mean_gradient(params, data, holders, order[:, part::parts], samples[part], found[:, part])
            yield label, holders, found, torch.stack(samples, dim=1)

    def _mean_gradient(
        self, params: list[Tensor], data: Batch, holders: Tensor, order: Tensor, counts: Tensor, total: Tensor
    ) -> None:
        """Write gradients over the first `counts` [h] samples in `order` of clients `holders` [h] to `total` [h, P].

        `params` and `data` are those of all clients.
        """
        layout = self.task.layout
        cut = len(layout.parameters)
        width = max(1, self._gradients_at_once // len(holders))
        most = int(counts.max())
        is_whole = most <= width and int(counts.min()) > 0
        if not is_whole:
            total.zero_()
        for begin in range(0, most, width):
            rows = (counts > begin).nonzero().flatten()
            here = holders[rows]
            part = order[rows, begin : begin + min(width, most - begin)]
            inside = torch.arange(part.shape[1], device=part.device) < (counts[rows] - begin).unsqueeze(1)
            mask = None if bool(inside.all()) else inside.to(params[0].dtype)
            there = here.unsqueeze(1)
            batch = Batch(data.x[there, part], data.y[there, part], mask, data.keys[here])
            own = params if len(here) == len(self) else [tensor[here] for tensor in params]
            gradients = self._kernel.gradients(own[:cut], own[cut:], batch, train=False)
            if is_whole:
                for slot, gradient in zip(layout.parameters, gradients, strict=True):
                    total[:, slot.start : slot.stop] = gradient.reshape(len(rows), -1)
                return
            flat = torch.cat([gradient.reshape(len(rows), -1) for gradient in gradients], dim=1)
            total[rows] += flat * (inside.sum(1).to(flat.dtype) / counts[rows]).unsqueeze(1)

    # ---- evaluation ----

    def outputs(self, params: Tensor, x: Tensor) -> Tensor:
        """Outputs [c, n, ...] of models [c, P] for shared inputs [n, ...], in eval mode."""
        pieces = max(1, self._at_once // max(1, len(params)))
        found = [self._kernel.outputs(params, part.expand(len(params), *part.shape)) for part in x.split(pieces)]
        return torch.cat(found, dim=1)

    def label_counts(self) -> Tensor:
        """Number of training samples of each class: int64 [c, L]."""
        ready = self._data.rendered()
        if ready is None:
            return torch.stack([torch.bincount(y, minlength=self.task.num_classes) for _, y in self.shards()])
        split, sizes = self._split("train"), self._sizes("train")
        where = runs(split.offsets[split.shard[self.clients]], sizes).to(self._data.device)
        owner = torch.arange(len(self)).repeat_interleave(sizes).to(self._data.device)
        places = owner * self.task.num_classes + ready[1][where]
        return torch.bincount(places, minlength=len(self) * self.task.num_classes).reshape(len(self), -1)

    def shards(self, split: SplitName = "train") -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of one client after the other, as it sees them: inputs [n, ...] and labels [n]."""
        for client, view in zip(self.clients.tolist(), self._view.split(1), strict=True):
            rows = self._split(split).rows(client).to(self._data.device)
            x, y = self._data.gather(rows.unsqueeze(0), view)
            yield x[0], y[0]

    def losses(self, models: Models | Tensor, split: SplitName = "train") -> Tensor:
        """Mean loss of each client's model on its samples [c], or of each of several models [c, m]."""
        return self.evaluate(models, split)["loss"]

    def evaluate(self, models: Models | Tensor, split: SplitName = "test") -> dict[str, Tensor]:
        """Scores of each client's model, [c] or [c, m] each: samples, loss, for classes accuracy and F1, else R2.

        F1 is the macro mean over the client's classes; with two classes, F1 of class 1.
        A client without samples in the split scores 0 with samples = 0.
        """
        models = models if isinstance(models, Models) else self._one_each(models)
        shape = models.refs.shape
        shard = self._split(split).shard[self.clients]
        owner = torch.stack([shard, self._view], dim=1).repeat_interleave(shape[1:].numel(), dim=0)  # [c * m, 2]
        pairs = torch.cat([models.refs.cpu().reshape(-1, 1), owner], dim=1)  # [c * m, 3]: model, shard, view
        unique, inverse = torch.unique(pairs, dim=0, return_inverse=True)  # sorted by model
        scores = _Scores(self.task.num_classes, self.task.loss, self._data.device)
        for outputs, y, lengths in self._forward(models.table, unique, split):
            scores.add(outputs, y, lengths)
        back = inverse.to(self._data.device)
        return {name: values[back].reshape(shape) for name, values in scores.result().items()}

    def evaluate_mixture(self, mixture: Mixture, split: SplitName = "test") -> dict[str, Tensor]:
        """Scores [c] of what each client is served with, as `evaluate` has them."""
        scores = _Scores(self.task.num_classes, self.task.loss, self._data.device)
        for clients, outputs, y, lengths in self.outputs_on(mixture.models, split):
            scores.add(mixture.mixed(outputs, clients, self.task.num_classes), y, lengths)
        return scores.result()

    def outputs_on(self, models: Models, split: SplitName) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Outputs of m models per client (refs [c, m]) on its own samples, some clients at a time, in order.

        Yields the positions of the samples' clients [n], outputs [m, n, ...], labels [n], and how many samples each of
        these clients has [u]. A model that several clients share is computed once for samples that they share.
        """
        device, count = self._data.device, models.refs.shape[1]
        owner = torch.stack([self._split(split).shard[self.clients], self._view], dim=1)
        sizes = self._split(split).offsets.diff()[owner[:, 0]]
        groups = (sizes.cumsum(0) // max(1, self._at_once * _GROUPED)).unique_consecutive(return_counts=True)[1]
        for some in torch.arange(len(self)).split(groups.tolist()):
            lengths = sizes[some]
            if not bool(lengths.any()):
                nothing = models.table.new_zeros(count, 0, max(1, self.task.num_classes))
                yield some[:0].to(device), nothing, self._data.y[:0], lengths.to(device)
                continue
            found = []
            for j in range(count):
                pairs = torch.cat([models.refs[some.to(models.refs.device), j].cpu().unsqueeze(1), owner[some]], dim=1)
                unique, inverse = torch.unique(pairs, dim=0, return_inverse=True)
                parts = list(self._forward(models.table, unique, split))
                outputs, y, long = (torch.cat([part[k] for part in parts]) for k in range(3))
                where = runs((long.cumsum(0) - long)[inverse], lengths).to(device)
                found.append(outputs[where])
                labels = y[where]
            yield some.repeat_interleave(lengths).to(device), torch.stack(found), labels, lengths.to(device)

    def _forward(self, table: Tensor, pairs: Tensor, split: SplitName) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Evaluate each (model, shard, view) once, in order: yields outputs [n, ...], labels [n], lengths of pairs."""
        starts = self._data.starts(split, pairs[:, 1], pairs[:, 2])
        sizes = self._split(split).offsets.diff()[pairs[:, 1]]
        models = pairs[:, 0].unique()
        if 1 < len(models) == len(pairs) and bool(sizes.any()):
            yield from self._forward_own(table, pairs, split, starts, sizes)
            return
        for model in models.tolist():
            mine = pairs[:, 0] == model
            lengths = sizes[mine]
            where, view = runs(starts[mine], lengths), pairs[mine, 2].repeat_interleave(lengths)  # one per sample
            found, labels = [], []
            for part in torch.arange(len(where)).split(self._at_once):
                x, y = self._data.at(split, _as_slice(where[part], self._data.device), view[part])
                # Networks need not accept a batch of nothing: one row of zeros shows the shape of the outputs.
                x = x if len(x) else x.new_zeros(1, *x.shape[1:])
                with _untuned():
                    found.append(self._kernel.outputs(table[model : model + 1], x.unsqueeze(0))[0, : len(y)])
                labels.append(y)
            yield torch.cat(found), torch.cat(labels), lengths

    def _forward_own(
        self, table: Tensor, pairs: Tensor, split: SplitName, starts: Tensor, sizes: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As `_forward`, where every pair has its own model: stacked, in padded pieces."""
        longest = max(1, int(sizes.max()))
        for some in torch.arange(len(pairs)).split(max(1, self._at_once // longest)):
            lengths = sizes[some]
            place = torch.arange(max(1, int(lengths.max())))
            inside = place < lengths.unsqueeze(1)  # [u, width]
            where = (starts[some].unsqueeze(1) + place).where(inside, 0)
            view = pairs[some, 2].repeat_interleave(len(place))
            x, y = self._data.at(split, where.flatten().to(self._data.device), view)
            x, y = (tensor.reshape(*where.shape, *tensor.shape[1:]) for tensor in (x, y))
            with _untuned():
                outputs = self._kernel.outputs(table[pairs[some, 0].to(table.device)], x)
            real = inside.to(self._data.device)
            yield outputs[real], y[real], lengths

    # ---- shards ----

    def _one_each(self, params: Tensor) -> Models:
        return Models(params, torch.arange(len(self), device=params.device))

    def _split(self, split: SplitName) -> Split:
        return self._data.federation.split(split)

    def _sizes(self, split: SplitName) -> Tensor:
        return self._split(split).sizes[self.clients]


def _as_slice(where: Tensor, device: torch.device) -> Tensor | slice:
    """Indices [n] on the device, or a slice if they follow one another: it copies nothing."""
    if len(where) and bool((where.diff() == 1).all()):
        return slice(int(where[0]), int(where[-1]) + 1)
    return where.to(device)


@contextlib.contextmanager
def _untuned() -> Iterator[None]:
    """Without cuDNN's tuning, which would begin anew for every number of samples."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class _Scores:
    """Losses, and accuracies and F1 or R2, of (model, shard) pairs, in order."""

    def __init__(self, num_classes: int, loss: Loss, device: torch.device) -> None:
        self._classes, self._loss, self._device = num_classes, loss, device
        self._parts: dict[str, list[Tensor]] = {"samples": [], "loss": [], "accuracy": [], "f1": [], "r2": []}

    def add(self, outputs: Tensor, y: Tensor, lengths: Tensor) -> None:
        """Add some pairs; `lengths` [u] are their numbers of samples, which follow one another."""
        count, lengths = len(lengths), lengths.to(self._device)

        def means(values: Tensor) -> Tensor:
            sums = torch.segment_reduce(values.double(), "sum", lengths=lengths, initial=0.0)
            return sums / lengths.clamp_min(1)

        self._parts["samples"].append(lengths)
        self._parts["loss"].append(means(self._loss(outputs, y)))
        if not self._classes:
            if self._loss is not cross_entropy and outputs.numel() == y.numel():
                self._parts["r2"].append(_r2(outputs.reshape(y.shape), y, lengths))
            return
        guess = outputs.flatten(1).argmax(1)
        hit = guess == y
        self._parts["accuracy"].append(means(hit))
        segment = torch.repeat_interleave(torch.arange(count, device=self._device), lengths)
        wide = max(self._classes, outputs.shape[1])

        def count_by_class(which: Tensor) -> Tensor:
            return torch.bincount(which, minlength=count * wide).reshape(count, wide).double()

        actual = count_by_class(segment * wide + y)
        guessed = count_by_class(segment * wide + guess)
        right = count_by_class((segment * wide + y)[hit])
        f1 = 2 * right / (actual + guessed).clamp_min(1)  # [u, wide]
        if self._classes == 2:
            self._parts["f1"].append(f1[:, 1])
        else:
            held = actual > 0
            self._parts["f1"].append((f1 * held).sum(1) / held.sum(1).clamp_min(1))

    def result(self) -> dict[str, Tensor]:
        """One value per pair."""
        return {name: torch.cat(parts) for name, parts in self._parts.items() if parts}


def _r2(outputs: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    """The share of the variance that outputs [n, ...] explain, in runs of these lengths [u]; 0 if y does not vary.

    >>> y = torch.tensor([1.0, 3.0, 5.0, 5.0])
    >>> _r2(torch.tensor([1.0, 2.0, 9.0, 9.0]), y, torch.tensor([2, 2])).tolist()
    [0.5, 0.0]
    """
    count = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)  # [n]
    outputs, y = (
        outputs.double().flatten(1) if y.dim() > 1 else outputs.double()[:, None],
        y.double().reshape(len(y), -1),
    )
    sums = y.new_zeros(len(lengths), y.shape[1]).index_add_(0, count, y)
    middle = (sums / lengths.clamp_min(1).unsqueeze(1))[count]
    wrong, spread = (
        y.new_zeros(len(lengths)).index_add_(0, count, part.square().sum(1)) for part in (y - outputs, y - middle)
    )
    return torch.where(spread > 0, 1 - wrong / spread.clamp_min(1e-300), torch.zeros_like(spread))


def _rows_at(table: Tensor, refs: Tensor) -> Tensor:
    """Rows of a table, to be read only: copied only if they do not lie there as they are."""
    first = int(refs[0])
    if len(refs) == 1 or len(table) == 1:
        return table[first].expand(len(refs), -1)
    last = first + len(refs)
    if last <= len(table) and torch.equal(refs, torch.arange(first, last, device=refs.device)):
        return table[first:last]
    return table[refs]
