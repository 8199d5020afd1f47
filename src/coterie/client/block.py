"""What a client can do, written for c clients at once: every tensor has a leading axis c.

A client step is a small function `step(block, models, work, **payload) -> Answer`. On Flower and in the loop
engine c is 1; in the vectorized engine it is the chunk. The engines differ only in the way they train, whose kernel
computes gradients and outputs for a stack of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor, nn

from coterie.client.optimizers import optimizers
from coterie.client.stack import Batches, BatchPlan, DeviceData, Job, Way
from coterie.client.work import SGD
from coterie.data.federation import Federation, Split, SplitName
from coterie.errors import ConfigError, ModelError
from coterie.nets.flat import Layout, Loss, Network, flatten
from coterie.randomness import Rng, mix


@dataclass(frozen=True)
class Task:
    """What is learned: a network, a loss, and how a client works on it."""

    module: nn.Module
    layout: Layout
    initial: Tensor  # [P], the common start of the run, on the CPU
    loss: Loss
    num_classes: int  # 0 for regression
    input_shape: tuple[int, ...]  # of one sample
    work: SGD
    draw: Callable[[Rng], Tensor]  # other first weights of the same network, [P]
    make: Callable[[Rng], nn.Module] | None = None  # the network anew; where clients are other processes
    seed: int = 0  # that `initial` was made from

    @classmethod
    def made(
        cls,
        make: Callable[[Rng], nn.Module],
        seed: int,
        loss: Loss,
        num_classes: int,
        input_shape: tuple[int, ...],
        work: SGD,
    ) -> Task:
        """The task of a run with this seed: every side of it makes the same first weights by itself."""
        module = make(Rng.seed(seed).at("model"))
        return cls(
            module=module,
            layout=Layout.of(module),
            initial=flatten(module),
            loss=loss,
            num_classes=num_classes,
            input_shape=input_shape,
            work=work,
            draw=lambda point: flatten(make(point)),
            make=make,
            seed=seed,
        )


class Answer(Mapping[str, Tensor]):
    """Named tensors [c, ...], one row for each client; `answer.params` is `answer["params"]`."""

    def __init__(self, **tensors: Tensor) -> None:
        taken = [name for name in tensors if hasattr(Mapping, name)]
        if taken:
            raise ConfigError(f"An answer cannot have a tensor named '{taken[0]}'; choose another name.")
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("_tensors", {})
        if name not in tensors:
            raise AttributeError(f"the answer has no '{name}'; it has {', '.join(tensors) or 'nothing'}")
        found: Tensor = tensors[name]
        return found


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
        way: Way,
        memory: Memory,
        rng: Rng,
        samples_at_once: int,
    ) -> None:
        self.clients = clients  # int64 [c], on the CPU
        self.task = task
        self.memory = memory
        self._data = data
        self._way = way
        self._kernel = way.kernel
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
        plan = BatchPlan(self._sizes("train"), work)
        self.gradients += plan.num_samples * work.gradients
        sent = start if isinstance(start, Models) else Models(start, torch.arange(len(self), device=start.device))
        device = sent.table.device
        in_order = torch.empty(len(self), self.task.layout.size, dtype=sent.table.dtype, device=device)
        streams = [self.rng(f"batches {stream}") for stream in range(work.streams)]
        dropout = self.rng("dropout")
        self._data.rendered()  # now, and not by several threads at once

        def one(which: slice) -> None:
            part = plan.part(which)
            order = part.order.to(device)
            keys = [None if work.batch_size == "full" else stream[order] for stream in streams]
            batches = [Batches(self._data, self.clients[part.order], part, key) for key in keys]
            own = {name: value[order] for name, value in extras.items()}
            refs = sent.refs[order]
            same = len(refs) == 1 or len(sent.table) == 1  # then nothing is copied
            begun = sent.table[int(refs[0])].expand(len(refs), -1) if same else sent.table[refs]
            self._way.train(Job(self.task.layout, begun, in_order[which], work, part, batches, dropout[order], own))

        self._way.each(one, plan)
        back = torch.empty_like(plan.order)
        back[plan.order] = torch.arange(len(back))
        return in_order if torch.equal(back, plan.order) else in_order[back.to(device)]

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


ClientStep = Callable[..., Answer]

_STEPS: dict[str, ClientStep] = {}


@overload
def client_step(name: ClientStep) -> ClientStep: ...
@overload
def client_step(name: str) -> Callable[[ClientStep], ClientStep]: ...
def client_step(name: str | ClientStep) -> ClientStep | Callable[[ClientStep], ClientStep]:
    """Decorator: register a client step under the name it has on the wire; code never travels.

    `@client_step("package:step")` sets the name. Plain `@client_step` uses `module:function`. Dropout draws and Flower
    messages depend on the name, so a step that moves to another file keeps the name it was given.
    """
    if not isinstance(name, str):
        return client_step(f"{name.__module__}:{name.__qualname__}")(name)

    def register(function: ClientStep) -> ClientStep:
        _STEPS[name] = function
        function.wire_name = name  # type: ignore[attr-defined]
        return function

    return register


def step_name(function: ClientStep) -> str:
    """The name of a step on the wire."""
    return getattr(function, "wire_name", None) or f"{function.__module__}:{function.__qualname__}"


def find_step(name: str) -> ClientStep:
    """The registered step of that name. Nothing is imported: a message must not choose what a site runs."""
    if name not in _STEPS:
        raise ConfigError(f"There is no client step '{name}' here. Import the module that defines it first.")
    return _STEPS[name]


def step_modules() -> list[str]:
    """The modules that define the registered steps and optimizers, for other processes of the same user."""
    return sorted({thing.__module__ for thing in (*_STEPS.values(), *optimizers().values())})


# ---- ready-made steps ----

OWN_MODEL = "model"
"""The name under which a client remembers a model of its own."""


@client_step("coterie.block:train")
def train(block: Block, models: Models, work: SGD) -> Answer:
    """Train the model that was sent."""
    return Answer(params=block.train(models, work), samples=block.samples)


@client_step("coterie.block:evaluate")
def evaluate(block: Block, models: Models | None, work: SGD) -> Answer:
    """Scores on the client's test samples: of the model that was sent, or of its own if none was."""
    return Answer(**block.evaluate(_sent_or_own(block, models)))


@client_step("coterie.block:evaluate_privately")
def evaluate_privately(block: Block, models: Models | None, work: SGD) -> Answer:
    """As `evaluate`, but only accuracy and F1 leave the client: no loss, no number of samples."""
    scores = block.evaluate(_sent_or_own(block, models))
    return Answer(**{name: values for name, values in scores.items() if name in ("accuracy", "f1")})


@client_step("coterie.block:adapt_and_evaluate")
def adapt_and_evaluate(block: Block, models: Models | None, work: SGD) -> Answer:
    """As `evaluate`, after adapting the model on the client's training samples."""
    return Answer(**block.evaluate(adapt(block, models, work).params))


@client_step("coterie.block:adapt")
def adapt(block: Block, models: Models | None, work: SGD) -> Answer:
    """The client's personal model: the one that was sent, or its own, after some work on its training samples."""
    return Answer(params=block.train(own_model(block, models, work).params, work))


@client_step("coterie.block:own_model")
def own_model(block: Block, models: Models | None, work: SGD) -> Answer:
    """The client's personal model as it is."""
    found = _sent_or_own(block, models)
    return Answer(params=found.rows() if isinstance(found, Models) else found)


@client_step("coterie.block:label_counts")
def label_counts(block: Block, models: Models | None, work: SGD) -> Answer:
    """How many training samples of each class the client has."""
    return Answer(counts=block.label_counts())


def _sent_or_own(block: Block, models: Models | None) -> Models | Tensor:
    return block.memory.get(OWN_MODEL, block.initial) if models is None else models


def check_network(network: Network, task: Task, federation: Federation) -> None:
    """Refuse early, in one sentence, a network that cannot take the data or name all classes."""
    name = type(task.module).__name__
    x, y = federation.samples(0)
    x = x[:2].to(network.device, network.dtype)
    try:
        with torch.no_grad():
            outputs = network(task.layout.unpack(task.initial.to(network.device, network.dtype)), x)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{name} cannot take samples of shape {federation.input_shape}: {reason}") from error
    if outputs.shape[0] != len(x):
        raise ModelError(f"{name} gives {tuple(outputs.shape)} for {len(x)} samples; the first axis must stay.")
    if task.num_classes and (outputs.dim() < 2 or outputs.shape[1] < task.num_classes):
        raise ModelError(
            f"{name} has {outputs.shape[1] if outputs.dim() > 1 else 1} outputs, but {federation.name} has labels "
            f"up to {task.num_classes - 1}: it needs {task.num_classes} outputs."
        )
    try:
        losses = task.loss(outputs, y[:2].to(network.device))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"The loss cannot take outputs of shape {tuple(outputs.shape)}: {reason}") from error
    if losses.shape != (len(x),):
        raise ModelError(f"The loss must give one number for each sample. Got shape {tuple(losses.shape)} instead.")
