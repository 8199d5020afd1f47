"""The batches of clients.

Clients with the same number of batches in an epoch keep in step: their samples are put in order once an epoch, and a
batch is a slice. Others draw each batch by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.client.work import SGD
from coterie.data.federation import Federation, SplitName
from coterie.data.transforms import apply_view
from coterie.randomness import mix, permutations

_EPOCH_BYTES = 256 << 20  # samples of an epoch that are put in order at once; beyond it, batch by batch


class DeviceData:
    """The packed samples of a federation on a device; batches are gathered by row and seen through views."""

    def __init__(self, federation: Federation, device: torch.device, dtype: torch.dtype, rendered: int = 0) -> None:
        self.federation = federation
        self.x = federation.x.to(device)
        self.y = federation.y.to(device)
        if self.y.is_floating_point():
            self.y = self.y.to(dtype)
        self.device, self.dtype = device, dtype
        names: tuple[SplitName, ...] = ("train", "valid", "test")
        self._index = {name: federation.split(name).index.to(device) for name in names}
        self._may_render = rendered  # bytes that training samples may take as the clients see them
        self._rendered: tuple[Federation, tuple[Tensor, Tensor] | None] | None = None

    def index(self, split: SplitName) -> Tensor:
        """Rows of all shards of a split, on the device."""
        return self._index[split]

    def gather(self, rows: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        """Samples of rows [c, n] as c clients of these views (a CPU tensor [c]) see them."""
        x = self.x[rows]
        x = x.to(self.dtype)
        if self.federation.mean != 0.0 or self.federation.std != 1.0:
            x = (x - self.federation.mean) / self.federation.std
        y = self.y[rows]
        present = view.unique().tolist()
        for number in present:
            transforms = self.federation.views[number]
            if not transforms:
                continue
            who = slice(None) if len(present) == 1 else (view == number).nonzero().flatten().to(self.device)
            seen_x, seen_y = apply_view(transforms, x[who].flatten(0, 1), y[who].flatten(0, 1), rows[who].flatten())
            x[who] = seen_x.reshape(-1, *x.shape[1:])
            y[who] = seen_y.reshape(-1, *y.shape[1:])
        return x, y

    def at(self, split: SplitName, where: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        """Samples at places [n] of a split, each seen through its view (a CPU tensor [n])."""
        ready = self.rendered() if split == "train" else None
        if ready is not None:
            return ready[0].index_select(0, where), ready[1].index_select(0, where)
        x, y = self.gather(self.index(split)[where].unsqueeze(1), view)
        return x[:, 0], y[:, 0]

    def rendered(self) -> tuple[Tensor, Tensor] | None:
        """The training samples in the order of the shards, as their owners see them; None if they do not fit.

        Made once, and again when clients have become of other kinds: then a batch is only picked, not scaled and
        turned each time.
        """
        if self._rendered is None or self._rendered[0] is not self.federation:
            self._rendered = (self.federation, self._render())
        return self._rendered[1]

    def _render(self) -> tuple[Tensor, Tensor] | None:
        federation, split = self.federation, self.federation.train
        size = len(split.index) * self.x[0].numel() * self.dtype.itemsize
        alone = len(split.shard.unique()) == len(split.shard)  # a shard of several clients may be seen in several ways
        if size > self._may_render or not alone:
            return None
        views = federation.view_of(torch.arange(len(federation)))
        owner = torch.empty(len(split.offsets) - 1, dtype=torch.int64).fill_(-1)
        owner[split.shard] = torch.arange(len(federation))
        seen = torch.where(owner < 0, 0, views[owner.clamp_min(0)])  # [shards]
        each = seen.repeat_interleave(split.offsets.diff())
        x = torch.empty(len(split.index), *self.x.shape[1:], dtype=self.dtype, device=self.device)
        y = torch.empty(len(split.index), *self.y.shape[1:], dtype=self.y.dtype, device=self.device)
        for number in each.unique().tolist():
            for where in (each == number).nonzero().flatten().split(8192):
                there = where.to(self.device)
                rows = self.index("train")[there].unsqueeze(1)
                found = self.gather(rows, torch.full((len(where),), number))
                x[there], y[there] = found[0][:, 0], found[1][:, 0]
        return x, y


class StepCounts:
    """How many steps each client makes, and how many samples each step takes; known without any data."""

    def __init__(self, sizes: Tensor, work: SGD) -> None:
        batch = sizes if work.batch_size == "full" else torch.full_like(sizes, int(work.batch_size))
        per_epoch = -(-sizes // batch)
        steps = per_epoch * work.epochs if work.steps is None else torch.full_like(sizes, work.steps)
        self.order = torch.argsort(steps * (1 << 32) + sizes, descending=True, stable=True)  # the busiest first
        self._fill(sizes[self.order], per_epoch[self.order], steps[self.order], batch[self.order])

    def _fill(self, sizes: Tensor, per_epoch: Tensor, steps: Tensor, batch: Tensor) -> None:
        self.sizes, self.per_epoch, self.steps, self.batch = sizes, per_epoch, steps, batch
        self.num_steps = int(steps.max())
        last = torch.minimum(steps % per_epoch * batch, sizes)
        self.num_samples = int((steps // per_epoch * sizes + last).sum())  # of all clients and steps
        self.in_step = bool((per_epoch == per_epoch[0]).all()) and bool((steps == steps[0]).all())

    def part(self, which: slice) -> StepCounts:
        """The plan of some of the clients, in the same order."""
        made = StepCounts.__new__(StepCounts)
        made.order = self.order[which]
        made._fill(self.sizes[which], self.per_epoch[which], self.steps[which], self.batch[which])
        return made

    def pieces(self, size: int) -> list[slice]:
        """Runs of at most `size` clients that keep in step, or nearly: little is padded."""
        if self.in_step and bool((self.sizes == self.sizes[0]).all()):
            return [slice(i, min(i + size, len(self.sizes))) for i in range(0, len(self.sizes), size)]
        found, start = [], 0
        sizes, batch, steps = self.sizes.tolist(), self.batch.tolist(), self.steps.tolist()
        clock = list(zip(self.per_epoch.tolist(), steps, strict=True))
        for place in range(1, len(sizes) + 1):
            ends = place == len(sizes) or place - start >= size
            if not ends and clock[place] != clock[start]:
                # Small stacks keep in step. Large ones pay more for another start than for some who stand still.
                ends = size <= 64 or steps[place] < 0.85 * steps[start]
            if not ends and batch[start] == sizes[start]:
                ends = sizes[place] < 0.85 * sizes[start]
            if ends:
                found.append(slice(start, place))
                start = place
        return found

    def active(self, step: int) -> int:
        """Number of clients that still work at this step; they come first in the order."""
        return len(self.steps) if self.in_step else int((self.steps > step).sum())

    def batch_sizes(self, step: int) -> Tensor:
        """Samples of each active client's batch."""
        active = self.active(step)
        done = (step % self.per_epoch[:active]) * self.batch[:active]
        return torch.minimum(self.batch[:active], self.sizes[:active] - done)


class Batches:
    """The batches of one stream: for every epoch a new permutation of each client's samples."""

    def __init__(self, data: DeviceData, clients: Tensor, counts: StepCounts, keys: Tensor | None) -> None:
        self._data, self._counts = data, counts
        device = data.device
        split = data.federation.train
        self._view = data.federation.view_of(clients)
        self._start = split.offsets[split.shard[clients]].to(device)  # [c]
        self._per_epoch = counts.per_epoch.to(device)
        self._batch = counts.batch.to(device)
        self._sizes = counts.sizes.to(device)
        self._keys = keys  # [c]; None: batches of all samples, in their order
        self._epoch: dict[int, Tensor] = {}
        self._made: tuple[int, tuple[Tensor, Tensor, Tensor | None]] | None = None
        self._laid: tuple[int, Tensor, Tensor] | None = None
        self._cuts: dict[int, tuple[int, int, Tensor | None]] = {}  # where a batch begins in an epoch, how wide, mask
        width = int(counts.sizes.max())
        bytes_of_epoch = len(clients) * width * data.x[0].numel() * data.dtype.itemsize
        self._in_order = counts.in_step and bytes_of_epoch <= _EPOCH_BYTES

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs [a, B, ...], labels [a, B] and mask [a, B] (None if all rows are real) of the active clients."""
        if self._made is None or self._made[0] != step:
            self._made = (step, self._slice(step) if self._in_order else self._draw(step))
        return self._made[1]

    def _slice(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """A slice of the samples of an epoch, which were put in order together."""
        epoch, within = divmod(step, int(self._counts.per_epoch[0]))
        if self._laid is None or self._laid[0] != epoch:
            width = int(self._counts.sizes.max())
            position = torch.arange(width, device=self._start.device).expand(len(self._start), -1)
            position = torch.minimum(position, self._sizes.unsqueeze(1) - 1)
            if self._keys is not None:
                position = self._permutation(epoch).gather(1, position)
            self._laid = (epoch, *self._samples(position))
        _, x, y = self._laid
        if within not in self._cuts:
            sizes = self._counts.batch_sizes(step)
            width = int(sizes.max())
            self._cuts[within] = (within * int(self._counts.batch.max()), width, self._mask(sizes, width))
        begin, width, mask = self._cuts[within]
        return x.narrow(1, begin, width), y.narrow(1, begin, width), mask

    def _draw(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """One batch, where clients are at different places of their epochs."""
        sizes = self._counts.batch_sizes(step)
        active, width = len(sizes), int(sizes.max())
        place = torch.arange(width, device=self._start.device)
        position = (step % self._per_epoch[:active] * self._batch[:active]).unsqueeze(1) + place  # [a, B]
        position = torch.minimum(position, self._sizes[:active].unsqueeze(1) - 1)
        if self._keys is not None:
            position = self._shuffled(step, position)
        return *self._samples(position), self._mask(sizes, width)

    def rendered(self) -> tuple[Tensor, Tensor] | None:
        """The samples that `table` points into."""
        return self._data.rendered()

    @property
    def start(self) -> Tensor:
        """Where each client's samples begin among the rendered ones, [c]."""
        return self._start

    def laid_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """The clients' own samples, as they see them, one client after the other: inputs, labels, where each begins."""
        width = int(self._counts.sizes.max())
        place = torch.arange(width, device=self._start.device)
        position = torch.minimum(place.expand(len(self._start), -1), self._sizes.unsqueeze(1) - 1)
        x, y = self._samples(position)
        return x.flatten(0, 1), y.flatten(0, 1), torch.arange(len(self._start)) * width

    @property
    def keys(self) -> Tensor | None:
        """The keys of the clients' permutations, [c]; None: samples as they lie."""
        return self._keys

    def table(self, first: int, count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Steps `first` ... at once: rows [S, c, width] of the rendered samples, mask [S, c, width], live [S, c]."""
        device = self._start.device
        step = torch.arange(first, first + count, device=device).unsqueeze(1)  # [S, 1]
        within, epoch = step % self._per_epoch, step // self._per_epoch  # [S, c]
        place = torch.arange(width, device=device)
        done = within * self._batch
        live = step < self._counts.steps.to(device)
        mask = place < torch.minimum(self._batch, self._sizes - done).unsqueeze(2)  # [S, c, width]
        position = torch.minimum(done.unsqueeze(2) + place, (self._sizes - 1).unsqueeze(1))
        if self._keys is not None:
            shuffled = torch.empty_like(position)
            for number in range(int(epoch.min()), int(epoch.max()) + 1):
                order = permutations(mix(self._keys + number), self._counts.sizes)  # [c, longest]
                picked = order.expand(count, -1, -1).gather(2, position)
                shuffled = torch.where((epoch == number).unsqueeze(2), picked, shuffled)
            position = shuffled
        return self._start.unsqueeze(1) + position, mask, live

    def _samples(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Samples at positions [a, B] of the clients' shards."""
        where = self._start[: len(position)].unsqueeze(1) + position
        rendered = self._data.rendered()
        if rendered is None:
            return self._data.gather(self._data.index("train")[where], self._view[: len(position)])
        x, y = rendered
        flat = where.flatten()
        return x.index_select(0, flat).reshape(*where.shape, *x.shape[1:]), y.index_select(0, flat).reshape(
            *where.shape, *y.shape[1:]
        )

    def _mask(self, counts: Tensor, width: int) -> Tensor | None:
        if bool((counts == width).all()):
            return None
        place = torch.arange(width, device=self._start.device)
        return (place < counts.to(place.device).unsqueeze(1)).to(self._data.dtype)

    def _permutation(self, epoch: int) -> Tensor:
        """Everyone's order of samples in an epoch, [c, longest]."""
        if epoch not in self._epoch:
            assert self._keys is not None
            self._epoch[epoch] = permutations(mix(self._keys + epoch), self._counts.sizes)
        for old in [e for e in self._epoch if e < epoch - 1] if self._in_order else []:
            del self._epoch[old]
        return self._epoch[epoch]

    def _shuffled(self, step: int, position: Tensor) -> Tensor:
        """Positions within an epoch -> positions within the shard, by each client's own epoch."""
        active = len(position)
        epochs = step // self._counts.per_epoch[:active]
        shuffled = torch.empty_like(position)
        for epoch in epochs.unique().tolist():
            # Clients are at different epochs at the same step; each epoch is drawn once for all.
            who = (epochs == epoch).nonzero().flatten().to(position.device)
            shuffled[who] = self._permutation(epoch)[who].gather(1, position[who])
        for old in [e for e in self._epoch if e < int(epochs.min())]:
            del self._epoch[old]
        return shuffled
