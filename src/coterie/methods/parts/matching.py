"""Neuron alignment and matched averaging (Long et al. 2022, section 5.1; Wang et al. 2020, FedMA; Yurochkin et al.
2019, PFNM).

The units of a hidden layer have no order of their own: put in another order, with the rows of the layers that make
them and the columns of the layers that read them, they are the same function. Before models are averaged, the units
of each are therefore put into the order in which they are most like those of a reference.

In PFNM and FedMA a client's unit is matched to a global atom by the maximum a posteriori of a Beta-Bernoulli process:
a Gaussian term (how far the unit is from the atom), the atom's popularity log(c / (J - c)) over the J clients, and the
cost of a new atom. Here all clients have one architecture and the width is kept: every atom is held by every other
client, so its popularity is the same for all and there is no new atom to pay for. Both terms drop out, and the
Gaussian term, the L2 distance, decides. Growing the network by new atoms is not offered: the next round needs one
layout for all clients.

What is compared is the whole unit, its incoming and its outgoing weights, sweeping over the layers until none changes
(as Ainsworth et al. 2023, "Git Re-Basin", match weights); FedMA goes forward once, over incoming weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from coterie.errors import ConfigError, ModelError
from coterie.nets.flat import Layout, Slot

# ---- the plan: which numbers belong to which hidden unit ----


@dataclass(frozen=True)
class Place:
    """Where the units of a hidden layer lie in one tensor of the network."""

    slot: Slot
    axis: int  # 0 where the units are made, 1 where they are read
    columns: Tensor  # int64 [units, block]: the entries along the axis that belong to each unit
    is_compared: bool  # statistics of the data (running means) move with the units, but do not say which are alike

    def rows(self, tensors: Tensor) -> Tensor:
        """Tensors [n, *shape] -> what each unit has here [n, units, D]."""
        n, (units, block) = len(tensors), self.columns.shape
        moved = tensors.movedim(self.axis + 1, 1)
        entries = self.columns.flatten()
        if not torch.equal(entries, torch.arange(len(entries))):
            moved = moved.index_select(1, entries.to(moved.device))
        return moved.reshape(n, units, block, -1).flatten(2)

    def order(self, permutation: Tensor) -> Tensor:
        """A permutation of units [units] -> of the entries along the axis."""
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
        """The tensors its units are in."""
        return [place.slot.name for place in self.places]

    def parts(self, tensors: dict[str, Tensor], rows: list[int]) -> list[Tensor]:
        """What is compared of each unit of some models, tensor by tensor: [r, units, D]."""
        compared = [(place, tensors[place.slot.name]) for place in self.places if place.is_compared]
        return [place.rows(own if len(rows) == len(own) else own[rows]) for place, own in compared]


@dataclass(frozen=True)
class Plan:
    """How the hidden units of a network are connected, in the order in which the data meets them."""

    layout: Layout
    layers: tuple[Hidden, ...]

    @classmethod
    def of(cls, module: nn.Module, input_shape: Sequence[int]) -> Plan:
        """Follow one input of this shape (without the batch) through the network."""
        return _Walk(module, tuple(input_shape)).plan()

    def permute(self, flat: Tensor, permutations: Sequence[Tensor]) -> Tensor:
        """The same function with its hidden units in another order.

        flat: [P] or [n, P]; permutations: one [units] for each hidden layer; the new unit u is the old unit
        permutation[u].
        """
        if len(permutations) != len(self.layers):
            raise ConfigError(
                f"There are {len(self.layers)} hidden layers. Got {len(permutations)} permutations instead."
            )
        made = self._checked(flat.reshape(-1, flat.shape[-1])).clone(memory_format=torch.contiguous_format)
        tensors = self.layout.unpack(made)  # views into `made`
        for layer, permutation in zip(self.layers, permutations, strict=True):
            if permutation.sort().values.tolist() != list(range(layer.units)):
                raise ConfigError(
                    f"The order of layer '{layer.name}' must be a permutation of its {layer.units} units."
                )
            for row in range(len(made)):
                _reorder(layer, tensors, row, permutation.cpu())
        return made.reshape(flat.shape)

    def align(self, models: Tensor, reference: Tensor, sweeps: int = 20) -> Tensor:
        """Each of models [n, P] with its hidden units in the order that brings it nearest to reference [P].

        One layer's best order depends on its neighbours': a layer is looked at again where a neighbour changed, going
        forward and backward in turn. Every step brings the model nearer to the reference, so that this ends.
        """
        aligned = self._checked(models).clone(memory_format=torch.contiguous_format)
        tensors = self.layout.unpack(aligned)  # views into `aligned`
        wanted = self.layout.unpack(self._checked(reference.reshape(1, -1)))
        waiting = torch.ones(len(self.layers), len(aligned), dtype=torch.bool)
        with _threads(self.layers):
            for number in self._turns(sweeps, waiting):
                layer, rows = self.layers[number], waiting[number].nonzero().flatten().tolist()
                waiting[number] = False
                for row, order in zip(rows, _best_orders(layer, tensors, rows, wanted), strict=True):
                    if order is not None:
                        _reorder(layer, tensors, row, order)
                        waiting[self._neighbours(number), row] = True
        return aligned

    def settle(self, aligned: Tensor, shares: Tensor, ranking: list[int], sweeps: int) -> None:
        """Bring aligned models [n, P] nearer to each other, in place: each in turn to the mean of the others.

        Not to the mean of all: that has the model's own units in it, in the order they are in, and holds them there.
        Every step makes the weighted mean longer, which is to say the models' distances to it shorter.
        """
        tensors = self.layout.unpack(aligned)
        sums = self.layout.unpack(shares.unsqueeze(0) @ aligned)  # [1, *shape], kept up to date
        waiting = torch.ones(len(self.layers), dtype=torch.bool)
        with _threads(self.layers):
            for number in self._turns(sweeps, waiting):
                layer = self.layers[number]
                waiting[number] = False
                for row in ranking:
                    others = {name: sums[name] - shares[row] * tensors[name][row] for name in layer.names}
                    order = _best_orders(layer, tensors, [row], others)[0]
                    if order is not None:
                        _reorder(layer, tensors, row, order)
                        for name in layer.names:
                            sums[name].copy_(others[name] + shares[row] * tensors[name][row])
                        waiting[[number, *self._neighbours(number)]] = True

    def _turns(self, sweeps: int, waiting: Tensor) -> Iterator[int]:
        """The numbers of the layers that are waiting [layers, ...], forward and backward in turn, until none is."""
        for sweep in range(sweeps):
            if not bool(waiting.any()):
                return
            numbers = range(len(self.layers))
            for number in numbers if sweep % 2 == 0 else reversed(numbers):
                if bool(waiting[number].any()):
                    yield number

    def _neighbours(self, number: int) -> list[int]:
        """Layers that have a tensor in common with this one."""
        own = set(self.layers[number].names)
        return [i for i, layer in enumerate(self.layers) if i != number and own & set(layer.names)]

    def _checked(self, models: Tensor) -> Tensor:
        if models.dim() != 2 or models.shape[1] != self.layout.size:
            shape = tuple(models.shape)
            raise ModelError(
                f"Models to match must be rows of {self.layout.size} numbers. Got the shape {shape} instead."
            )
        return models


def _reorder(layer: Hidden, tensors: dict[str, Tensor], row: int, permutation: Tensor) -> None:
    """Put the units of one model into another order, in place."""
    for place in layer.places:
        own = tensors[place.slot.name][row]
        own.copy_(own.index_select(place.axis, place.order(permutation).to(own.device)))


def _best_orders(
    layer: Hidden, tensors: dict[str, Tensor], rows: list[int], wanted: dict[str, Tensor]
) -> list[Tensor | None]:
    """For each of these rows the order of units nearest to the wanted [1, ...]; None where they are in it already.

    Over all ways of pairing units, the sum of squared distances is least where the sum of products is largest: the
    squares of the units themselves are in every one of them. So the whole cost is one matrix product a tensor.
    """
    found: list[Tensor | None] = [None] * len(rows)
    unsure = list(range(len(rows)))
    if len(rows) > 1 and layer.units >= _LARGE:
        near = _are_near(layer, tensors, rows, wanted)
        unsure = [i for i in unsure if not near[i]]
    if not unsure:
        return found
    parts = zip(layer.parts(tensors, [rows[i] for i in unsure]), layer.parts(wanted, [0]), strict=True)
    products = _total(atoms @ own.transpose(1, 2) for own, atoms in parts)  # [r, units, units]
    rounding = 32 * torch.finfo(products.dtype).eps
    # A model that is not finite is nobody's to match, and must not stop the others.
    each = torch.nan_to_num(products.cpu().double(), nan=0.0, posinf=0.0, neginf=0.0).unbind()
    if len(each) == 1 or layer.units < _LARGE:
        orders = [_best_order(own, rounding) for own in each]
    else:
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:  # scipy lets other threads run
            orders = list(pool.map(lambda own: _best_order(own, rounding), each))
    for i, order in zip(unsure, orders, strict=True):
        found[i] = order
    return found


def _are_near(layer: Hidden, tensors: dict[str, Tensor], rows: list[int], wanted: dict[str, Tensor]) -> list[bool]:
    """Which rows are in the best order for certain: each unit less than half as far from its atom as other atoms are.

    So it is after training from a common start. It takes one matrix product instead of one for each model.
    """
    atoms = layer.parts(wanted, [0])
    squares = _total(part.square().sum(2) for part in atoms)[0]  # [units]
    apart = squares + squares.unsqueeze(1) - 2 * _total(part[0] @ part[0].T for part in atoms)  # [units, units]
    nearest = apart.fill_diagonal_(math.inf).amin(1) - 1e-4 * squares.max()  # less what rounding may have added
    own = zip(layer.parts(tensors, rows), atoms, strict=True)
    distance = _total((part - atom).square().sum(2) for part, atom in own)  # [r, units]
    near: list[bool] = (4 * distance < nearest).all(1).tolist()
    return near


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _best_order(products: Tensor, rounding: float) -> Tensor | None:
    """The order of columns with the largest sum on the diagonal; None where they are in it already."""
    found = products.argmax(1)
    if len(found.unique()) < len(found):  # else each atom has its best unit for itself: no assignment is better
        found = torch.from_numpy(linear_sum_assignment(products.numpy(), maximize=True)[1])
    moved = found != torch.arange(len(found))
    before, after = products.diagonal()[moved], products[moved, found[moved]]
    # Units that are alike but for rounding (dead ones) stay where they are, or the sweeps would not end.
    gain, scale = float((after - before).sum()), float((after.abs() + before.abs()).sum())
    return found if gain > rounding * scale else None


_LARGE = 256  # units of a layer, from which on its arithmetic is worth a second thread


@contextlib.contextmanager
def _threads(layers: Sequence[Hidden]) -> Iterator[None]:
    """One thread where all layers are small: on a busy machine, waiting for a second takes 100 times the product."""
    before = torch.get_num_threads()
    is_small = all(layer.units < _LARGE for layer in layers)
    try:
        if is_small:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


# ---- matched averaging ----

# What was tried: four clients trained on scikit-learn's digits from independent starts; accuracy of their mean on
# held-out samples in %, mean of six repetitions. "Mean of all" aligns all models to their mean and averages again,
# until nothing changes; "others" aligns each in turn to the mean of the others.
#                                    LeNet (16x16)   64-64-64-10   64-64-10 (lr 0.3)
#   the clients themselves               98.5           97.6           94.8
#   averaged by index                    10.4           20.7           61.6
#   mean of all   incoming               64.5           96.9           96.7
#                 outgoing               82.8           95.9           96.3
#                 both                   80.2           96.8           96.6
#   others        incoming               80.8           97.3           96.9
#                 outgoing               90.6           96.3           96.5
#                 both                   90.4           97.4           96.8
#   others, the closest of four starts
#                 incoming               85.0           97.1           97.0
#                 outgoing               90.5           96.7           96.7
#                 both  (kept)           93.5           97.1           96.9
# Only on LeNet do they differ by more than chance. Tensors scaled to equal weight did worse there (67 instead of 90),
# and 20 sweeps no better than 10.
_STARTS = 4
_TRIALS = 32  # models times starts at most, for the time it takes


def matched_mean(
    models: Tensor,
    plan: Plan,
    weights: Tensor | None = None,
    start: Tensor | None = None,
    sweeps: int = 10,
) -> tuple[Tensor, Tensor]:
    """The mean [P] of models [n, P] after alignment, weighted by weights [n], and the aligned models [n, P].

    All are aligned to `start` [P], and then each in turn to the mean of the others until nothing changes or `sweeps`
    are over. Models that are in the order of `start` already, as after training from it, are only averaged. Where no
    start is given, some of the models are it in turn, and the result whose models are closest together is kept.
    The order in which the models are given makes no difference (between models of equal length: to the units' order).
    """
    if not len(models):
        raise ConfigError("There must be a model to average. Got none instead.")
    shares = torch.ones(len(models), dtype=torch.float64) if weights is None else weights.double().cpu()
    if shares.shape != (len(models),) or not bool((shares >= 0).all()) or not 0 < float(shares.sum()) < math.inf:
        given = shares.tolist()
        raise ConfigError(f"The weights of {len(models)} models must be as many numbers >= 0, not all 0. Got {given}.")
    shares = (shares / shares.sum()).to(models.device, models.dtype)
    # By length, which is the same in every order of units.
    ranking = torch.linalg.vector_norm(models, dim=1, dtype=torch.float64).argsort(descending=True).tolist()
    starts = ranking[: max(1, min(_STARTS, _TRIALS // len(models)))] if start is None else [-1]
    best: tuple[Tensor, Tensor] | None = None
    length = 0.0
    for row in starts:
        aligned = plan.align(models, models[row] if start is None else start)
        if start is None or not torch.equal(aligned, models):
            plan.settle(aligned, shares, ranking, sweeps)
        mean = shares @ aligned
        # The mean of squared distances to the mean is that of the models' squares, which is fixed, less this square.
        found = float(torch.linalg.vector_norm(mean[: plan.layout.num_parameters], dtype=torch.float64))
        if best is None or found > length:
            best, length = (mean, aligned), found
    assert best is not None
    return best


# ---- following the data through the network ----

# Operations by their name in small letters without underscores, the same for a layer, a function and a method.
# What is done to each number alone. Softmax and its kin look at all units of a sample and are not among them.
_EACH = re.compile(
    "relu6?|leakyrelu|r?relu|[sc]?elu|gelu|silu|mish|sigmoid|logsigmoid|tanh|hard(tanh|swish|sigmoid|shrink)|softplus"
    "|softsign|softshrink|tanhshrink|threshold|(feature)?(alpha)?dropout[123]?d?|i?(add|sub|mul|truediv)|neg|pow|abs"
    "|square|sqrt|exp|clamp|identity|clone|detach|to|float|double"
)
_POOLS = re.compile("(adaptive)?(max|avg)pool[123]d|lppool[123]d|zeropad[123]d")  # done to each channel alone
_MEANS = re.compile("mean|amax|amin")
# What only moves numbers: done to a tensor that says where each unit is, it says where they are afterwards.
_MOVES = re.compile(
    "(un)?flatten|view|reshape|permute|transpose|swapaxes|move(dim|axis)|(un)?squeeze|contiguous|getitem"
)
_MERGES = {"add": "added to", "iadd": "added to", "mul": "multiplied with", "cat": "joined with"}


@dataclass
class _Units:
    """The units that one layer makes."""

    name: str
    count: int
    places: list[Place] = field(default_factory=list)
    is_read: bool = False  # by a later layer with weights


@dataclass(frozen=True)
class _Stream:
    """A tensor on its way through the network, and where in it the units of the last layer are."""

    units: _Units | None = None  # None: still the input, which has an order of its own
    where: Tensor | None = None  # int64 [2, ...], of the tensor's shape: unit * span + position
    span: int = 1
    lost_in: str = ""  # the operation after which `where` is not known any more

    @classmethod
    def fresh(cls, units: _Units, shape: torch.Size, axis: int) -> _Stream:
        """The units lie along one axis of a tensor of this shape [2, ...]."""
        others = [size for i, size in enumerate(shape) if i not in (0, axis)]
        span = math.prod(others)
        along = [units.count if i == axis else 1 for i in range(1, len(shape))]
        where = (torch.arange(units.count) * span).reshape(along) + torch.arange(span).reshape(others).unsqueeze(
            axis - 1
        )
        return cls(units, where.expand(shape).contiguous(), span)

    def columns(self, axis: int) -> Tensor | None:
        """Which entries along an axis belong to which unit: [units, block]; None where that cannot be said."""
        if self.units is None or self.where is None or len(self.where) != 2:
            return None
        entries = self.where.movedim(axis, -1).flatten(0, -2)  # [R, entries]
        if entries.shape[1] % self.units.count:
            return None
        columns = entries[0].argsort().reshape(self.units.count, -1)  # [units, block]
        owner, position = entries[:, columns] // self.span, entries[:, columns] % self.span  # [R, units, block]
        # An entry is of one unit for all R, and the j-th entry of one unit stands where that of any other does.
        is_own = bool((owner == torch.arange(self.units.count).unsqueeze(1)).all())
        return columns if is_own and bool((position == position[:, :1]).all()) else None


class _Walk:
    """One pass over the traced network, noting who makes and who reads which units."""

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...]) -> None:
        self._layout = Layout.of(module)
        self._slots = {slot.name: slot for slot in (*self._layout.parameters, *self._layout.buffers)}
        self._module = copy.deepcopy(module).cpu().eval()
        self._input_shape = input_shape
        self._units: list[_Units] = []
        self._streams: dict[fx.Node, _Stream] = {}
        self._used: set[str] = set()  # layers with parameters met so far

    def plan(self) -> Plan:
        """Follow a batch of two."""
        graph = self._trace()
        self._runner = fx.Interpreter(fx.GraphModule(self._module, graph))
        dtype = next(p.dtype for p in self._module.parameters() if p.is_floating_point())
        self._runner.args_iter = iter([torch.zeros(2, *self._input_shape, dtype=dtype)])
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for node in graph.nodes:
                self._visit(node)
        layers = [Hidden(u.name, u.count, tuple(u.places)) for u in self._units if u.is_read]
        return Plan(self._layout, tuple(layers))

    def _trace(self) -> fx.Graph:
        tracer = _Tracer()
        try:
            return tracer.trace(self._module)
        except Exception as error:  # a user's own forward may raise anything
            raise self._refusal(tracer.at, f"torch.fx cannot trace it ({error})") from error

    def _visit(self, node: fx.Node) -> None:
        try:
            value = self._runner.env[node] = self._runner.run_node(node)
        except Exception as error:
            path = str(node.target) if node.op == "call_module" else ""
            raise self._refusal(path, f"it cannot take inputs of shape {self._input_shape} ({error})") from error
        sources = [self._streams[n] for n in node.all_input_nodes if n in self._streams]
        if node.op == "placeholder":
            self._streams[node] = _Stream()
        elif node.op == "get_attr" and isinstance(value, nn.Parameter):
            path, _, name = str(node.target).rpartition(".")
            raise self._refusal(path, f"its parameter '{name}' is not used by a layer that is known")
        elif node.op == "output":
            for source in sources:
                if source.units is not None and source.units.is_read:
                    raise self._refusal(source.units.name, "its output is also an output of the network")
        elif sources and _has_tensor(value):
            self._streams[node] = self._after(node, self._only(sources, node), value)

    def _only(self, sources: list[_Stream], node: fx.Node) -> _Stream:
        """The one stream that goes into a node; several will do where all have the same units in the same places."""
        first = sources[0]
        if any(source.units is not first.units for source in sources):
            latest = max((s.units for s in sources if s.units is not None), key=self._units.index)
            how = _MERGES.get(self._name(node), f"combined ({self._name(node)}) with")
            raise self._refusal(latest.name, f"its output is {how} another layer's")
        for other in sources[1:]:
            if first.where is None or other.where is None or not torch.equal(first.where, other.where):
                return _Stream(first.units, lost_in=first.lost_in or other.lost_in or self._name(node))
        return first

    def _after(self, node: fx.Node, source: _Stream, value: Any) -> _Stream:
        """Where the units are after a layer or an operation."""
        if node.op == "call_module":
            path = str(node.target)
            layer = self._module.get_submodule(path)
            if next(layer.parameters(), None) is not None:
                return self._after_layer(path, layer, source, value)
        units, where, name = source.units, source.where, self._name(node)
        if units is None or where is None:
            return source
        lost = _Stream(units, lost_in=name)
        constants = [self._runner.env[n] for n in node.all_input_nodes if n not in self._streams]
        if not isinstance(value, Tensor) or any(isinstance(c, Tensor) and c.numel() > 1 for c in constants):
            return lost
        if _EACH.fullmatch(name):
            return source if value.shape == where.shape else lost
        if _MOVES.fullmatch(name):
            return _Stream(units, self._redo(node, where), source.span)
        owner = where // source.span
        if _MEANS.fullmatch(name):
            owner = self._redo(node, owner.double()).long()  # a mean over one unit's entries is that unit
        elif not _POOLS.fullmatch(name):
            return lost
        along = torch.arange(units.count).reshape(1, -1, *[1] * (owner.dim() - 2))
        by_channel = owner.dim() > 1 and owner.shape[:2] == (2, units.count) and bool((owner == along).all())
        return _Stream.fresh(units, value.shape, 1) if by_channel else lost

    def _after_layer(self, path: str, layer: nn.Module, source: _Stream, value: Any) -> _Stream:
        """A layer with parameters."""
        if path in self._used:
            raise self._refusal(path, "it is used more than once")
        self._used.add(path)
        if any(
            name not in ("weight", "bias") or f"{path}.{name}" not in self._slots
            for name, _ in layer.named_parameters()
        ):
            raise self._refusal(path, "its parameters are shared or made from others")
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return self._after_weights(path, layer, source, value)
        axis = -1 if isinstance(layer, nn.LayerNorm) else 1
        if not isinstance(layer, nn.LayerNorm | nn.GroupNorm | nn.PReLU | _BatchNorm | _InstanceNorm):
            raise self._refusal(path, "layers of this kind are not known")
        if source.units is None:
            return source
        if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1:
            raise self._refusal(path, "it normalises over more than one axis")
        if isinstance(layer, nn.GroupNorm) and layer.num_groups not in (1, layer.num_channels):
            raise self._refusal(path, f"it normalises its units in {layer.num_groups} groups, which fix their order")
        columns = self._columns(source, axis, path)
        for name in ("weight", "bias", "running_mean", "running_var"):
            slot = self._slots.get(f"{path}.{name}")
            if slot is not None and slot.size == columns.numel():  # a PReLU with one weight has it for all units
                source.units.places.append(Place(slot, 0, columns, is_compared=not name.startswith("running")))
        return source

    def _after_weights(self, path: str, layer: nn.Module, source: _Stream, value: Tensor) -> _Stream:
        """Linear or Conv: reads the units before it, makes new ones."""
        if getattr(layer, "groups", 1) != 1:
            raise self._refusal(path, f"it has groups={layer.groups}; 1 is what can be matched")
        axis = value.dim() - 1 if isinstance(layer, nn.Linear) else 1
        if source.units is not None:
            columns = self._columns(source, axis, path)
            source.units.places.append(Place(self._slots[f"{path}.weight"], 1, columns, is_compared=True))
            source.units.is_read = True
        made = _Units(path, value.shape[axis])
        own = torch.arange(made.count).unsqueeze(1)
        made.places += [
            Place(self._slots[f"{path}.{name}"], 0, own, is_compared=True) for name, _ in layer.named_parameters()
        ]
        self._units.append(made)
        return _Stream.fresh(made, value.shape, axis)

    def _columns(self, source: _Stream, axis: int, reader: str) -> Tensor:
        columns = source.columns(axis)
        if columns is None:
            assert source.units is not None
            how = f"goes through {source.lost_in}, which may mix its units" if source.lost_in else "mixes its units"
            raise self._refusal(source.units.name, f"on the way to layer '{reader}' its output {how}")
        return columns

    def _redo(self, node: fx.Node, stand_in: Tensor) -> Any:
        """The same operation on another tensor in the stream's place."""

        def arguments(what: Any) -> Any:
            return fx.node.map_arg(what, lambda n: stand_in if n in self._streams else self._runner.env[n])

        args, kwargs = arguments(node.args), arguments(node.kwargs)
        if node.op == "call_module":
            return self._module.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _name(self, node: fx.Node) -> str:
        if node.op == "call_module":
            name = type(self._module.get_submodule(str(node.target))).__name__
        else:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return name.lower().replace("_", "")

    def _refusal(self, path: str, reason: str) -> ModelError:
        what = f"layer '{path}'" if path else "network"
        kind = type(self._module.get_submodule(path)).__name__
        return ModelError(
            f"FeSEM-MA cannot match {what} ({kind}): {reason}. Take a plain stack of Linear and Conv2d, or fesem."
        )


class _Tracer(fx.Tracer):
    """Remembers which layer it is in, for the error."""

    at = ""

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Go into a layer and out again."""
        before, self.at = self.at, self.path_of_module(m)
        found = super().call_module(m, forward, args, kwargs)
        self.at = before
        return found


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value))
