"""Neuron alignment and matched averaging (Long et al. 2022, section 5.1; Wang et al. 2020, FedMA; Yurochkin et al.
2019, PFNM).

The units of a hidden layer have no fixed order. Permuting them, together with the rows of the layers that produce them
and the columns of the layers that read them, gives the same function. So before models are averaged, the units of each
model are permuted to match those of a reference as closely as possible.

In PFNM and FedMA a client's unit is matched to a global atom by the maximum a posteriori of a Beta-Bernoulli process:
a Gaussian term (the distance of the unit to the atom), the atom's popularity log(c / (J - c)) over the J clients, and
the cost of a new atom. Here all clients share one architecture and the width is kept: every other client holds every
atom, so popularity is the same for all, and there are no new atoms. Both terms drop out, and the Gaussian term, the L2
distance, decides. Growing the network by new atoms is not supported: the next round needs one layout for all clients.

Units are compared by their incoming and outgoing weights, in sweeps over the layers until nothing changes (as in Git
Re-Basin, Ainsworth et al. 2023); FedMA makes one forward pass over incoming weights. Four LeNets trained on digits from
independent starts, accuracy of their mean in %: plain mean 10; each aligned to the mean of all models, 65 by incoming
weights, 83 by outgoing ones, 80 by both; each in turn to the mean of the others (kept), 81, 91 and 90. For MLPs the
variants are within one point of each other. Scaling tensors to equal weight is worse (67), and 20 sweeps are no better
than 10.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from coterie.errors import ModelError
from coterie.nets.flat import Layout, Slot

_LARGE = 256  # units from which on a layer is worth a second thread

# ---- the plan: which numbers belong to which hidden unit ----


@dataclass(frozen=True)
class Place:
    """Where the units of a hidden layer are in one tensor of the network."""

    slot: Slot
    axis: int  # 0 where the units are produced, 1 where they are read
    columns: Tensor  # int64 [units, block]: the entries along the axis that belong to each unit

    @property
    def is_compared(self) -> bool:
        """Running statistics move with their units, but do not decide which units are alike."""
        return not self.slot.name.rpartition(".")[2].startswith("running")

    def rows(self, tensors: Tensor) -> Tensor:
        """The entries of each unit: tensors [n, *shape] -> [n, units, D]."""
        n, (units, block) = len(tensors), self.columns.shape
        moved = tensors.movedim(self.axis + 1, 1)
        entries = self.columns.flatten()
        if not torch.equal(entries, torch.arange(len(entries))):
            moved = moved.index_select(1, entries.to(moved.device))
        return moved.reshape(n, units, block, -1).flatten(2)

    def order(self, permutation: Tensor) -> Tensor:
        """The permutation of the entries along the axis that permutes the units [units]."""
        order = torch.empty(self.columns.numel(), dtype=torch.int64)
        order[self.columns.flatten()] = self.columns[permutation].flatten()
        return order


@dataclass(frozen=True)
class Hidden:
    """A hidden layer: its units and all places where they are."""

    name: str
    units: int
    places: tuple[Place, ...]

    @property
    def names(self) -> list[str]:
        """The names of the tensors that hold its units."""
        return [place.slot.name for place in self.places]

    def parts(self, tensors: dict[str, Tensor], rows: list[int]) -> list[Tensor]:
        """The compared entries of each unit of some models, one [r, units, D] per tensor."""
        compared = [(place, tensors[place.slot.name]) for place in self.places if place.is_compared]
        return [place.rows(own if len(rows) == len(own) else own[rows]) for place, own in compared]


@dataclass(frozen=True)
class Plan:
    """The hidden layers of a network, in the order in which the data passes them."""

    layout: Layout
    layers: tuple[Hidden, ...]

    @classmethod
    def of(cls, module: nn.Module, input_shape: Sequence[int]) -> Plan:
        """Follow one input of this shape (without the batch axis) through the network."""
        probe = _Probe(module, tuple(input_shape))
        return cls(probe.layout, tuple(probe.hidden_layers()))

    def permute(self, flat: Tensor, permutations: Sequence[Tensor]) -> Tensor:
        """The same function with its hidden units in another order.

        flat [P]; permutations: one [units] for each hidden layer; the new unit u is the old unit permutation[u].
        """
        made = flat.clone().unsqueeze(0)
        tensors = self.layout.unpack(made)  # views into `made`
        for layer, permutation in zip(self.layers, permutations, strict=True):
            _reorder(layer, tensors, 0, permutation)
        return made[0]

    def align(self, models: Tensor, reference: Tensor, sweeps: int = 20) -> Tensor:
        """Permute the hidden units of each of models [n, P] so that it is as near as possible to reference [P].

        The best order of one layer depends on its neighbours, so a layer is matched again after a neighbour changed, in
        forward and backward sweeps. Every change brings the model nearer to the reference, so this ends.
        """
        aligned = models.clone(memory_format=torch.contiguous_format)
        tensors = self.layout.unpack(aligned)  # views into `aligned`
        target = self.layout.unpack(reference.unsqueeze(0))
        pending = torch.ones(len(self.layers), len(aligned), dtype=torch.bool)
        with _threads(self.layers):
            for number in self._sweep(sweeps, pending):
                layer, rows = self.layers[number], pending[number].nonzero().flatten().tolist()
                pending[number] = False
                for row, order in zip(rows, _best_orders(layer, tensors, rows, target), strict=True):
                    if order is not None:
                        _reorder(layer, tensors, row, order)
                        pending[self._neighbours(number), row] = True
        return aligned

    def settle(self, aligned: Tensor, shares: Tensor, ranking: list[int], sweeps: int) -> None:
        """Align models [n, P] to each other, in place: each in turn to the mean of the others.

        Not to the mean of all models: it contains the model's own units in their present order, and keeps them there.
        Every change makes the weighted mean longer, and so the models' distances to it shorter.
        """
        tensors = self.layout.unpack(aligned)
        sums = self.layout.unpack(shares.unsqueeze(0) @ aligned)  # [1, *shape], kept up to date
        pending = torch.ones(len(self.layers), dtype=torch.bool)
        with _threads(self.layers):
            for number in self._sweep(sweeps, pending):
                layer = self.layers[number]
                pending[number] = False
                for row in ranking:
                    others = {name: sums[name] - shares[row] * tensors[name][row] for name in layer.names}
                    order = _best_orders(layer, tensors, [row], others)[0]
                    if order is not None:
                        _reorder(layer, tensors, row, order)
                        for name in layer.names:
                            sums[name].copy_(others[name] + shares[row] * tensors[name][row])
                        pending[[number, *self._neighbours(number)]] = True

    def _sweep(self, sweeps: int, pending: Tensor) -> Iterator[int]:
        """The numbers of the pending layers [layers, ...], in forward and backward sweeps, until none is pending."""
        for sweep in range(sweeps):
            if not bool(pending.any()):
                return
            numbers = range(len(self.layers))
            for number in numbers if sweep % 2 == 0 else reversed(numbers):
                if bool(pending[number].any()):
                    yield number

    def _neighbours(self, number: int) -> list[int]:
        """Layers that share a tensor with this one."""
        own = set(self.layers[number].names)
        return [i for i, layer in enumerate(self.layers) if i != number and own & set(layer.names)]


def _reorder(layer: Hidden, tensors: dict[str, Tensor], row: int, permutation: Tensor) -> None:
    """Permute the units of one model in place."""
    for place in layer.places:
        own = tensors[place.slot.name][row]
        own.copy_(own.index_select(place.axis, place.order(permutation).to(own.device)))


def _best_orders(
    layer: Hidden, tensors: dict[str, Tensor], rows: list[int], target: dict[str, Tensor]
) -> list[Tensor | None]:
    """For each of these rows the order of units nearest to the target [1, ...]; None where they are in it already.

    Over all pairings of units, the sum of squared distances is least where the sum of products is largest, because
    the squares are the same for all pairings. So the cost matrix is one matrix product per tensor.
    """
    found: list[Tensor | None] = [None] * len(rows)
    unsure = list(range(len(rows)))
    if len(rows) > 1 and layer.units >= _LARGE:
        near = _are_near(layer, tensors, rows, target)
        unsure = [i for i in unsure if not near[i]]
    if not unsure:
        return found
    parts = zip(layer.parts(tensors, [rows[i] for i in unsure]), layer.parts(target, [0]), strict=True)
    products = _total(atoms @ own.transpose(1, 2) for own, atoms in parts)  # [r, units, units]
    rounding = 32 * torch.finfo(products.dtype).eps
    # A model that is not finite cannot be matched, and must not stop the others.
    each = torch.nan_to_num(products.cpu().double(), nan=0.0, posinf=0.0, neginf=0.0).unbind()
    if len(each) == 1 or layer.units < _LARGE:
        orders = [_best_order(own, rounding) for own in each]
    else:
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:  # scipy lets other threads run
            orders = list(pool.map(lambda own: _best_order(own, rounding), each))
    for i, order in zip(unsure, orders, strict=True):
        found[i] = order
    return found


def _are_near(layer: Hidden, tensors: dict[str, Tensor], rows: list[int], target: dict[str, Tensor]) -> list[bool]:
    """Which rows are certainly in the best order: each unit less than half as far from its atom as other atoms are.

    This holds after training from a common start, and takes one matrix product instead of one per model.
    """
    atoms = layer.parts(target, [0])
    squares = _total(part.square().sum(2) for part in atoms)[0]  # [units]
    apart = squares + squares.unsqueeze(1) - 2 * _total(part[0] @ part[0].T for part in atoms)  # [units, units]
    nearest = apart.fill_diagonal_(math.inf).amin(1) - 1e-4 * squares.max()  # minus what rounding may have added
    own = zip(layer.parts(tensors, rows), atoms, strict=True)
    distance = _total((part - atom).square().sum(2) for part, atom in own)  # [r, units]
    near: list[bool] = (4 * distance < nearest).all(1).tolist()
    return near


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _best_order(products: Tensor, rounding: float) -> Tensor | None:
    """The order of columns with the largest sum on the diagonal; None where they are in it already."""
    found = products.argmax(1)
    if len(found.unique()) < len(found):  # otherwise every atom has its best unit to itself
        found = torch.from_numpy(linear_sum_assignment(products.numpy(), maximize=True)[1])
    moved = found != torch.arange(len(found))
    before, after = products.diagonal()[moved], products[moved, found[moved]]
    # Units that differ by rounding only (dead ones) stay where they are, or the sweeps would not end.
    gain, scale = float((after - before).sum()), float((after.abs() + before.abs()).sum())
    return found if gain > rounding * scale else None


@contextlib.contextmanager
def _threads(layers: Sequence[Hidden]) -> Iterator[None]:
    """Use one thread if all layers are small: on a busy machine, waiting for a second one takes 100 times longer."""
    before = torch.get_num_threads()
    is_small = all(layer.units < _LARGE for layer in layers)
    try:
        if is_small:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


# ---- matched averaging ----


def matched_mean(
    models: Tensor, plan: Plan, start: Tensor, weights: Tensor | None = None, sweeps: int = 10
) -> tuple[Tensor, Tensor]:
    """The mean [P] of models [n, P] after alignment, weighted by weights [n], and the aligned models [n, P].

    All models are aligned to `start` [P], and then each in turn to the mean of the others, until nothing changes or
    after `sweeps`. Models that are already in the order of `start`, as after training from it, are only averaged.
    The order of the models makes no difference (between models of equal norm: to the order of units only).
    """
    shares = torch.ones(len(models), dtype=torch.float64) if weights is None else weights.double().cpu()
    shares = (shares / shares.sum()).to(models.device, models.dtype)
    aligned = plan.align(models, start)
    if not torch.equal(aligned, models):
        # By norm, which does not depend on the order of units.
        ranking = torch.linalg.vector_norm(models, dim=1, dtype=torch.float64).argsort(descending=True).tolist()
        plan.settle(aligned, shares, ranking, sweeps)
    return shares @ aligned, aligned


# ---- finding the hidden layers of a network ----

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.PReLU, _BatchNorm, _InstanceNorm)
_TENSORS = ("weight", "bias", "running_mean", "running_var")


class _Probe:
    """A copy of the network with random values, which finds the hidden layers and tests each of them.

    A layer is expected to read the units of the layer before it. Whether it does is tested: the outputs must stay the
    same when the units are permuted. So any operation is allowed between two layers that keeps units apart. The test
    sees one path: a forward that branches on its data is followed for the probe's input only.
    """

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...]) -> None:
        self.layout = Layout.of(module)
        self._slots = {slot.name: slot for slot in (*self.layout.parameters, *self.layout.buffers)}
        self._module = copy.deepcopy(module).cpu().eval()
        dtype = next(p.dtype for p in self._module.parameters() if p.is_floating_point())
        generator = torch.Generator().manual_seed(0)
        self._x = torch.randn(2, *input_shape, generator=generator).to(dtype)
        flat = 0.5 + torch.rand(self.layout.size, generator=generator)  # variances must be positive
        for slot in self.layout.parameters:
            if len(slot.shape) > 1:
                scale = math.sqrt(math.prod(slot.shape[1:]))
                flat[slot.start : slot.stop] = torch.randn(slot.size, generator=generator) / scale
        self._flat = flat.to(dtype)

    def hidden_layers(self) -> Iterator[Hidden]:
        """The hidden layers, in the order in which the data passes them."""
        found: list[tuple[str, int, list[tuple[Slot, int]]]] = []  # path, units, and where they are: tensor and axis
        for path in self._checked_layers():
            layer = self._module.get_submodule(path)
            own = [(self._slots[name], 0) for name in (_name(path, t) for t in _TENSORS) if name in self._slots]
            if isinstance(layer, _WEIGHTED):
                if found:
                    found[-1][2].append((own[0][0], 1))
                found.append((path, len(layer.weight), own))
            elif found:
                found[-1][2].extend((slot, axis) for slot, axis in own if slot.size > 1)  # a PReLU may have one weight
        for (path, units, places), (reader, *_) in itertools.pairwise(found):
            layouts = (_hidden(path, units, places, channels_last) for channels_last in (False, True))
            fitting = [hidden for hidden in layouts if hidden is not None and self._keeps_outputs(hidden)]
            if not fitting:
                reason = "its units are mixed, grouped or combined with those of another layer"
                raise self._refusal(path, f"on the way to layer '{reader}' {reason}")
            yield fitting[0]

    def _checked_layers(self) -> list[str]:
        """The paths of all layers with parameters, in the order in which the data passes them; all are supported."""
        entered = self._entered()
        layers = [path for path in entered if list(self._module.get_submodule(path).parameters(recurse=False))]
        for path in layers:
            layer = self._module.get_submodule(path)
            names = [name for name, _ in layer.named_parameters(recurse=False)]
            if not isinstance(layer, (*_WEIGHTED, *_NORMS)):
                raise self._refusal(path, f"its parameter '{names[0]}' is not part of a supported layer")
            if layers.count(path) > 1:
                raise self._refusal(path, "it is used more than once")
            if any(_name(path, name) not in self._slots for name in names):
                raise self._refusal(path, "its parameters are shared or frozen")
            if getattr(layer, "groups", 1) != 1:
                raise self._refusal(path, f"it has groups={layer.groups}; only groups=1 can be matched")
        for slot in self.layout.parameters:
            if slot.name.rpartition(".")[0] not in layers:
                raise self._refusal(slot.name.rpartition(".")[0], "it is not used")
        if not isinstance(self._expected, Tensor):
            raise self._refusal("", "it must return one tensor")
        return layers

    def _entered(self) -> list[str]:
        """The paths of all modules that one input passes, in order."""
        entered: list[str] = []
        handles = [
            module.register_forward_pre_hook(lambda _module, _inputs, path=path: entered.append(path))
            for path, module in self._module.named_modules()
        ]
        try:
            self._expected = self._outputs(self._flat)
        except Exception as error:  # a user's own forward may raise anything
            reason = f"it cannot take inputs of shape {tuple(self._x.shape[1:])} ({error})"
            raise self._refusal(entered[-1] if entered else "", reason) from error
        finally:
            for handle in handles:
                handle.remove()
        return entered

    def _keeps_outputs(self, hidden: Hidden) -> bool:
        """Whether the outputs stay the same when the units of a layer are reversed, and when they are rotated."""
        plan, order = Plan(self.layout, (hidden,)), torch.arange(hidden.units)
        found = [self._outputs(plan.permute(self._flat, [moved])) for moved in (order.flip(0), order.roll(1))]
        limit = 1e-4 * float(self._expected.abs().max())
        return all(float((outputs - self._expected).abs().max()) <= limit for outputs in found)

    def _outputs(self, flat: Tensor) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs: Tensor = functional_call(self._module, self.layout.unpack(flat), (self._x,))
        return outputs

    def _refusal(self, path: str, reason: str) -> ModelError:
        what = f"layer '{path}'" if path else "network"
        kind = type(self._module.get_submodule(path)).__name__
        return ModelError(
            f"FeSEM-MA cannot match {what} ({kind}): {reason}. Use a plain stack of Linear and Conv2d layers, or fesem."
        )


def _name(path: str, tensor: str) -> str:
    return f"{path}.{tensor}" if path else tensor


def _hidden(path: str, units: int, places: list[tuple[Slot, int]], channels_last: bool) -> Hidden | None:
    """A hidden layer whose units each have one block of entries in every place; None if that is not possible."""
    if any(slot.shape[axis] % units for slot, axis in places):
        return None

    def columns(size: int) -> Tensor:
        entries = torch.arange(size)
        return entries.reshape(-1, units).T if channels_last else entries.reshape(units, -1)

    return Hidden(path, units, tuple(Place(slot, axis, columns(slot.shape[axis])) for slot, axis in places))
