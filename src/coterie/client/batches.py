"""The batches of a stack of clients: a new permutation of each client's samples in every epoch.

Clients with equal numbers of batches per epoch run in step: their samples are permuted once per epoch, and a batch is
a slice. Other clients gather every batch separately.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.client.work import SGD
from coterie.data.federation import Federation, SplitName
from coterie.data.transforms import apply_view
from coterie.randomness import mix, permutations

_EPOCH_BYTES = 256 << 20  # larger epochs are gathered batch by batch


class Batch(NamedTuple):
    """One batch of each client of a stack."""

    x: Tensor  # [c, B, ...]
    y: Tensor  # [c, B, ...]
    mask: Tensor | None  # [c, B], 1 for a real row; None: all rows are real
    keys: Tensor  # int64 [c], for dropout
    weights: Tensor | None = None  # [c, B], factors of the samples' losses in the mean


def rows_of(samples: Tensor, where: Tensor) -> Tensor:
    """Samples [n, ...] at indices of any shape."""
    return samples.index_select(0, where.flatten()).reshape(*where.shape, *samples.shape[1:])


class DeviceData:
    """The samples of a federation on a device; batches are gathered by row and seen through views."""

    def __init__(
        self,
        federation: Federation,
        device: torch.device,
        dtype: torch.dtype,
        rendered: int = 0,
        integers: bool = False,  # whether the network takes integers, such as token ids
    ) -> None:
        self.federation = federation
        self.x = federation.x.to(device)
        self.y = federation.y.to(device, dtype if federation.y.is_floating_point() else None)
        self._ids = None if federation.sample_ids is None else federation.sample_ids.to(device)
        self.device, self.dtype = device, dtype
        self.inputs = torch.int64 if federation.has_integers and integers else dtype  # of the samples
        names: tuple[SplitName, ...] = ("train", "valid", "test")
        self._index = {name: federation.split(name).index.to(device) for name in names}
        self._may_render = rendered  # bytes available for rendered samples
        self._rendered: dict[SplitName, _Seen | None] = {}
        self._rendered_for = federation

    def index(self, split: SplitName) -> Tensor:
        """Rows of all shards of a split, on the device."""
        return self._index[split]

    def gather(self, rows: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        """Samples of rows [c, n] as c clients of these views (a CPU tensor [c]) see them."""
        x, y = self.federation.scaled(self.x[rows], self.dtype).to(self.inputs), self.y[rows]
        present = view.unique().tolist()
        for number in present:
            transforms = self.federation.views[number]
            if not transforms:
                continue
            who = slice(None) if len(present) == 1 else (view == number).nonzero().flatten().to(self.device)
            known = rows[who].flatten() if self._ids is None else self._ids[rows[who].flatten()]
            seen_x, seen_y = apply_view(transforms, x[who].flatten(0, 1), y[who].flatten(0, 1), known)
            x[who] = seen_x.reshape(-1, *x.shape[1:])
            y[who] = seen_y.reshape(-1, *y.shape[1:])
        return x, y

    def starts(self, split: SplitName, shards: Tensor, views: Tensor) -> Tensor:
        """Where the samples of these shards [u], seen through these views [u], begin for `at`, int64 [u]."""
        ready = self._seen(split)
        if ready is None:
            return self.federation.split(split).offsets[shards]
        return ready.starts[torch.searchsorted(ready.keys, self._key(shards, views))]

    def at(self, split: SplitName, where: Tensor | slice, view: Tensor) -> tuple[Tensor, Tensor]:
        """Samples at places [n], counted from `starts`, each seen through its view (a CPU tensor [n]).

        They may be shared: do not write to them.
        """
        ready = self._seen(split)
        if ready is None:
            x, y = self.gather(self.index(split)[where].unsqueeze(1), view)
            return x[:, 0], y[:, 0]
        if isinstance(where, slice):
            return ready.x[where], ready.y[where]
        return ready.x.index_select(0, where), ready.y.index_select(0, where)

    def rendered(self) -> tuple[Tensor, Tensor] | None:
        """All training samples, shard by shard, as their owners see them.

        None if they do not fit into memory, or if clients with different views share a shard.
        """
        ready, shards = self._seen("train"), len(self.federation.train.offsets) - 1
        return None if ready is None or len(ready.keys) != shards else (ready.x, ready.y)

    def _seen(self, split: SplitName) -> _Seen | None:
        """The samples of a split as their owners see them; None if they do not fit into memory.

        Rendered once, and again when clients change their kind. A batch is then a lookup, without scaling or rotating.
        """
        if self._rendered_for is not self.federation:
            self._rendered, self._rendered_for = {}, self.federation
        if split not in self._rendered:
            self._rendered[split] = self._render(split)
        return self._rendered[split]

    def _key(self, shards: Tensor, views: Tensor) -> Tensor:
        return shards * len(self.federation.views) + views

    def _render(self, name: SplitName) -> _Seen | None:
        split, sizes = self.federation.split(name), self.federation.split(name).offsets.diff()
        owned = self._key(split.shard, self.federation.view_of(torch.arange(len(split.shard))))
        nobodys = torch.ones(len(sizes), dtype=torch.bool).index_fill(0, split.shard, False).nonzero().flatten()
        keys = torch.cat([owned, self._key(nobodys, torch.zeros_like(nobodys))]).unique()
        shards, views = keys // len(self.federation.views), keys % len(self.federation.views)
        lengths = sizes[shards]
        total, taken = int(lengths.sum()), sum(seen.x.nbytes for seen in self._rendered.values() if seen is not None)
        if total * self.x[0].numel() * self.inputs.itemsize + taken > self._may_render:
            return None
        rows, each = runs(split.offsets[shards], lengths), views.repeat_interleave(lengths)  # [samples]
        x = torch.empty(total, *self.x.shape[1:], dtype=self.inputs, device=self.device)
        y = torch.empty(total, *self.y.shape[1:], dtype=self.y.dtype, device=self.device)
        for number in each.unique().tolist():
            for where in (each == number).nonzero().flatten().split(8192):
                there = where.to(self.device)
                those = self.index(name)[rows[where].to(self.device)].unsqueeze(1)
                found = self.gather(those, torch.full((len(where),), number))
                x[there], y[there] = found[0][:, 0], found[1][:, 0]
        return _Seen(x, y, keys, lengths.cumsum(0) - lengths)


class _Seen(NamedTuple):
    """Samples of a split as clients see them, those of one shard and view after those of the last."""

    x: Tensor
    y: Tensor
    keys: Tensor  # int64 [u] of shard and view, rising
    starts: Tensor  # int64 [u]


def runs(starts: Tensor, lengths: Tensor) -> Tensor:
    """start, start + 1, ... of each run, one run after the other.

    >>> runs(torch.tensor([10, 40]), torch.tensor([3, 2])).tolist()
    [10, 11, 12, 40, 41]
    """
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


class StepCounts:
    """How many steps each client makes, and how many samples each step takes; clients with most steps first."""

    def __init__(self, sizes: Tensor, work: SGD) -> None:
        batch = sizes if work.batch_size == "full" else torch.full_like(sizes, int(work.batch_size))
        per_epoch = -(-sizes // batch)
        steps = per_epoch * work.epochs if work.steps is None else torch.full_like(sizes, work.steps)
        self.order = torch.argsort(steps * (1 << 32) + sizes, descending=True, stable=True)
        self._fill(sizes[self.order], per_epoch[self.order], steps[self.order], batch[self.order])

    def _fill(self, sizes: Tensor, per_epoch: Tensor, steps: Tensor, batch: Tensor) -> None:
        self.sizes, self.per_epoch, self.steps, self.batch = sizes, per_epoch, steps, batch
        self.num_steps = int(steps.max())
        last = torch.minimum(steps % per_epoch * batch, sizes)
        self.num_samples = int((steps // per_epoch * sizes + last).sum())  # over all clients and steps
        self.in_step = bool((per_epoch == per_epoch[0]).all()) and bool((steps == steps[0]).all())

    def part(self, which: slice) -> StepCounts:
        """The counts of some of the clients, in the same order."""
        made = StepCounts.__new__(StepCounts)
        made.order = self.order[which]
        made._fill(self.sizes[which], self.per_epoch[which], self.steps[which], self.batch[which])
        return made

    def pieces(self, size: int) -> list[slice]:
        """Runs of at most `size` clients with equal or similar counts, so that little is padded."""
        if self.in_step and bool((self.sizes == self.sizes[0]).all()):
            return [slice(i, min(i + size, len(self.sizes))) for i in range(0, len(self.sizes), size)]
        found, start = [], 0
        sizes, batch, steps = self.sizes.tolist(), self.batch.tolist(), self.steps.tolist()
        clock = list(zip(self.per_epoch.tolist(), steps, strict=True))
        for place in range(1, len(sizes) + 1):
            ends = place == len(sizes) or place - start >= size
            if not ends and clock[place] != clock[start]:
                # Small stacks run in step. For large ones another stack costs more than some idle clients.
                ends = size <= 64 or steps[place] < 0.85 * steps[start]
            if not ends and batch[start] == sizes[start]:
                ends = sizes[place] < 0.85 * sizes[start]
            if ends:
                found.append(slice(start, place))
                start = place
        return found

    def active(self, step: int) -> int:
        """Number of clients that make this step: a prefix, since those with most steps come first."""
        return len(self.steps) if self.in_step else int((self.steps > step).sum())

    def batch_sizes(self, step: int) -> Tensor:
        """Samples in the batch of each active client."""
        active = self.active(step)
        done = (step % self.per_epoch[:active]) * self.batch[:active]
        return torch.minimum(self.batch[:active], self.sizes[:active] - done)


class Batches:
    """One stream of batches. `keys` [c] seed the permutations; None: samples in their stored order."""

    def __init__(self, data: DeviceData, clients: Tensor, counts: StepCounts, keys: Tensor | None) -> None:
        self._data, self._counts, self.keys = data, counts, keys
        device, split = data.device, data.federation.train
        self._view = data.federation.view_of(clients)
        self.start = split.offsets[split.shard[clients]].to(device)  # [c], first row of each client's shard
        self._per_epoch, self._batch, self._sizes = (
            tensor.to(device) for tensor in (counts.per_epoch, counts.batch, counts.sizes)
        )
        self._width = int(counts.sizes.max())
        self._orders: dict[int, Tensor] = {}  # permutations by epoch
        self._last: tuple[int, tuple[Tensor, Tensor, Tensor | None]] | None = None
        self._permuted: tuple[int, Tensor, Tensor] | None = None  # epoch, and its samples
        self._slices: dict[int, tuple[int, int, Tensor | None]] = {}  # by batch of an epoch: start, width, mask
        bytes_of_epoch = len(clients) * self._width * data.x[0].numel() * data.dtype.itemsize
        self._in_step = counts.in_step and bytes_of_epoch <= _EPOCH_BYTES

    def at(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs [a, B, ...], labels [a, B] and mask [a, B] (None if all rows are real) of the active clients."""
        if self._last is None or self._last[0] != step:
            self._last = (step, self._slice(step) if self._in_step else self._draw(step))
        return self._last[1]

    def _slice(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """A slice of the epoch's samples."""
        epoch, within = divmod(step, int(self._counts.per_epoch[0]))
        if self._permuted is None or self._permuted[0] != epoch:
            position = self._positions()
            if self.keys is not None:
                position = self._order(epoch).gather(1, position)
            self._permuted = (epoch, *self._samples(position))
        _, x, y = self._permuted
        if within not in self._slices:
            sizes = self._counts.batch_sizes(step)
            width = int(sizes.max())
            self._slices[within] = (within * int(self._counts.batch.max()), width, self._mask(sizes, width))
        begin, width, mask = self._slices[within]
        return x.narrow(1, begin, width), y.narrow(1, begin, width), mask

    def _draw(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """One batch, where clients are at different batches of their epochs."""
        position = self.positions_at(step)
        return *self._samples(position), self._mask(self._counts.batch_sizes(step), position.shape[1])

    def positions_at(self, step: int) -> Tensor:
        """Where the samples of a batch lie in the clients' shards, [a, B]."""
        sizes = self._counts.batch_sizes(step)
        active, place = len(sizes), torch.arange(int(sizes.max()), device=self.start.device)
        position = (step % self._per_epoch[:active] * self._batch[:active]).unsqueeze(1) + place
        position = torch.minimum(position, self._sizes[:active].unsqueeze(1) - 1)
        return position if self.keys is None else self._shuffled(step, position)

    def rendered(self) -> tuple[Tensor, Tensor] | None:
        """The samples that `table` refers to."""
        return self._data.rendered()

    def own_samples(self, *, all_of_them: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """The samples of these clients only, as they see them: inputs, labels, first row of each client.

        Without `all_of_them`, rows that no batch of this stream needs may be left empty.
        """
        first = torch.arange(len(self.start)) * self._width
        if all_of_them or int((self._counts.steps.to(self._batch) * self._batch).max()) >= self._width:
            x, y = self._samples(self._positions())
            return x.flatten(0, 1), y.flatten(0, 1), first
        for step in range(self._counts.num_steps):
            position = self.positions_at(step)  # [a, B]
            found = [part.flatten(0, 1) for part in self._samples(position)]
            if step == 0:
                kept = [part.new_empty(len(first) * self._width, *part.shape[1:]) for part in found]
            rows = (first[: len(position)].unsqueeze(1) + position).flatten()
            for whole, part in zip(kept, found, strict=True):
                whole[rows] = part
        return kept[0], kept[1], first

    def table(self, first: int, count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Steps `first` ... at once: rows [S, c, width] of the rendered samples, mask [S, c, width], live [S, c]."""
        device = self.start.device
        step = torch.arange(first, first + count, device=device).unsqueeze(1)  # [S, 1]
        within, epoch = step % self._per_epoch, step // self._per_epoch  # [S, c]
        place = torch.arange(width, device=device)
        done = within * self._batch
        live = step < self._counts.steps.to(device)
        mask = place < torch.minimum(self._batch, self._sizes - done).unsqueeze(2)  # [S, c, width]
        position = torch.minimum(done.unsqueeze(2) + place, (self._sizes - 1).unsqueeze(1))
        if self.keys is not None:
            shuffled = torch.empty_like(position)
            for number in range(int(epoch.min()), int(epoch.max()) + 1):
                order = permutations(mix(self.keys + number), self._counts.sizes)  # [c, longest]
                picked = order.expand(count, -1, -1).gather(2, position)
                shuffled = torch.where((epoch == number).unsqueeze(2), picked, shuffled)
            position = shuffled
        return self.start.unsqueeze(1) + position, mask, live

    def _positions(self) -> Tensor:
        """0, 1, ... in each client's shard, [c, longest]; shorter shards repeat their last sample."""
        place = torch.arange(self._width, device=self.start.device).expand(len(self.start), -1)
        return torch.minimum(place, self._sizes.unsqueeze(1) - 1)

    def _samples(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Samples at positions [a, B] of the clients' shards."""
        where = self.start[: len(position)].unsqueeze(1) + position
        rendered = self._data.rendered()
        if rendered is None:
            return self._data.gather(self._data.index("train")[where], self._view[: len(position)])
        return rows_of(rendered[0], where), rows_of(rendered[1], where)

    def _mask(self, sizes: Tensor, width: int) -> Tensor | None:
        if bool((sizes == width).all()):
            return None
        place = torch.arange(width, device=self.start.device)
        return (place < sizes.to(place.device).unsqueeze(1)).to(self._data.dtype)

    def _order(self, epoch: int) -> Tensor:
        """Each client's permutation in an epoch, [c, longest]."""
        if epoch not in self._orders:
            assert self.keys is not None
            self._orders[epoch] = permutations(mix(self.keys + epoch), self._counts.sizes)
        if self._in_step:
            self._forget(epoch - 1)
        return self._orders[epoch]

    def _shuffled(self, step: int, position: Tensor) -> Tensor:
        """Positions within an epoch -> positions within the shard, by each client's own epoch."""
        epochs = step // self._counts.per_epoch[: len(position)]
        shuffled = torch.empty_like(position)
        for epoch in epochs.unique().tolist():  # clients may be in different epochs at the same step
            who = (epochs == epoch).nonzero().flatten().to(position.device)
            shuffled[who] = self._order(epoch)[who].gather(1, position[who])
        self._forget(int(epochs.min()))
        return shuffled

    def _forget(self, before: int) -> None:
        for old in [epoch for epoch in self._orders if epoch < before]:
            del self._orders[old]
