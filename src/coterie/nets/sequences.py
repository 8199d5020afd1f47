"""Recurrent layers and attention that can be stacked.

torch computes them by fused kernels that `torch.func.vmap` cannot batch, and draws their dropout from its own
generator. Prepared for an engine, they keep the fused kernels for one model alone. A stack of models is computed in
plain tensor operations, which give the same up to rounding: a recurrent layer step by step, with the products of all
inputs made before. Dropout is keyed in both, see `coterie.nets.flat`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence

State = tuple[Tensor, ...]  # h, and c of an LSTM

KEPT_BY_STEP = 10  # numbers that the backward pass of a step needs, per number of the output; to estimate memory


@dataclass(frozen=True)
class Surroundings:
    """What a layer must know about the current call."""

    is_alone: Callable[[], bool]  # one model outside vmap
    drop: Callable[[Tensor, float], Tensor]  # keyed dropout of a tensor [B, ...]


@contextmanager
def unfused() -> Iterator[None]:
    """Attention by plain operations within a `with` block: vmap would compute fused kernels one model at a time."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def prepare(module: nn.Module, around: Surroundings) -> None:
    """Make a recurrent or attention layer stackable, in place; other modules stay as they are.

    The layer remains what it is, with its names and attributes; only its `forward` is another.
    """
    if type(module) in (nn.LSTM, nn.GRU, nn.RNN):
        assert isinstance(module, nn.RNNBase)
        module.forward = _Recurrent(module, around)
    elif type(module) is nn.MultiheadAttention and module.bias_k is None and not module.add_zero_attn:
        module.forward = _Attention(module, around)  # type: ignore[method-assign]


# ---- recurrent layers ----


def _lstm(inputs: Tensor, state: State, weights: dict[str, Tensor]) -> State:
    h, c = state
    gates = inputs + h @ weights["weight_hh"].T  # the bias is in the inputs
    enter, keep, new, show = gates.chunk(4, -1)
    c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
    h = show.sigmoid() * c.tanh()
    return (h @ weights["weight_hr"].T if "weight_hr" in weights else h), c


def _gru(inputs: Tensor, state: State, weights: dict[str, Tensor]) -> State:
    (h,) = state
    recurrent = nn.functional.linear(h, weights["weight_hh"], weights.get("bias_hh"))
    size = h.shape[-1]
    reset, keep = (inputs[..., : 2 * size] + recurrent[..., : 2 * size]).sigmoid().chunk(2, -1)
    new = (inputs[..., 2 * size :] + reset * recurrent[..., 2 * size :]).tanh()
    return (new + keep * (h - new),)


def _tanh(inputs: Tensor, state: State, weights: dict[str, Tensor]) -> State:
    return ((inputs + state[0] @ weights["weight_hh"].T).tanh(),)


def _relu(inputs: Tensor, state: State, weights: dict[str, Tensor]) -> State:
    return ((inputs + state[0] @ weights["weight_hh"].T).relu(),)


_Step = Callable[[Tensor, State, dict[str, Tensor]], State]
_STEPS: dict[str, tuple[_Step, Any]] = {  # by the mode of a layer: one step, and torch's kernel of all steps
    "LSTM": (_lstm, torch.lstm),
    "GRU": (_gru, torch.gru),
    "RNN_TANH": (_tanh, torch.rnn_tanh),
    "RNN_RELU": (_relu, torch.rnn_relu),
}


class _Recurrent:
    """The forward of nn.LSTM, nn.GRU and nn.RNN."""

    def __init__(self, layer: nn.RNNBase, around: Surroundings) -> None:
        self._layer, self._around = layer, around
        self._step, self._fused = _STEPS[layer.mode]

    def __call__(self, x: Any, hx: Any = None) -> Any:
        """As the layer's own forward. Packed sequences have a shape that depends on values: only the fused way."""
        layer, alone = self._layer, self._around.is_alone()
        drops = layer.training and layer.dropout > 0 and layer.num_layers > 1
        if isinstance(x, PackedSequence) or (alone and not drops):
            return type(layer).forward(layer, x, hx)
        batch_axis = None if x.dim() == 2 else 0 if layer.batch_first else 1
        x = x.unsqueeze(1) if batch_axis is None else x.transpose(0, 1) if batch_axis == 0 else x  # [T, B, F]
        state = self._first_state(x) if hx is None else (hx if isinstance(hx, tuple) else (hx,))
        if hx is not None and batch_axis is None:
            state = tuple(part.unsqueeze(1) for part in state)
        directions, ends = 1 + layer.bidirectional, []
        for number in range(layer.num_layers):
            if number and drops:  # by sample first: a mask must not depend on the size of the batch
                x = self._around.drop(x.transpose(0, 1), layer.dropout).transpose(0, 1)
            mine = tuple(part[number * directions : (number + 1) * directions] for part in state)
            x, end = (self._by_kernel if alone else self._by_steps)(x, mine, number)
            ends.append(end)
        found = tuple(torch.cat(parts) for parts in zip(*ends, strict=True))  # [layers * directions, B, H] each
        if batch_axis is None:
            x, found = x.squeeze(1), tuple(part.squeeze(1) for part in found)
        elif batch_axis == 0:
            x = x.transpose(0, 1)
        return x, found if layer.mode == "LSTM" else found[0]

    def _first_state(self, x: Tensor) -> State:
        layer = self._layer
        rows = layer.num_layers * (1 + layer.bidirectional)
        sizes = [layer.proj_size or layer.hidden_size] + [layer.hidden_size] * (layer.mode == "LSTM")
        return tuple(x.new_zeros(rows, x.shape[1], size) for size in sizes)

    def _weights(self, number: int, reverse: bool) -> dict[str, Tensor]:
        layer = self._layer
        kinds = ["weight_ih", "weight_hh"] + ["bias_ih", "bias_hh"] * layer.bias + ["weight_hr"] * bool(layer.proj_size)
        return {kind: getattr(layer, f"{kind}_l{number}{'_reverse' * reverse}") for kind in kinds}

    def _by_kernel(self, x: Tensor, state: State, number: int) -> tuple[Tensor, State]:
        """One layer of one model."""
        layer = self._layer
        weights = [
            w for reverse in range(1 + layer.bidirectional) for w in self._weights(number, bool(reverse)).values()
        ]
        settings = (layer.bias, 1, 0.0, layer.training, layer.bidirectional, False)
        out, *end = self._fused(x, state if layer.mode == "LSTM" else state[0], weights, *settings)
        return out, tuple(end)

    def _by_steps(self, x: Tensor, state: State, number: int) -> tuple[Tensor, State]:
        """One layer of a stack of models: x [T, B, F], state [directions, B, H] each."""
        outputs, ends = [], []
        for reverse in range(1 + self._layer.bidirectional):
            weights = self._weights(number, bool(reverse))
            shift = weights.get("bias_ih")
            if shift is not None and self._layer.mode != "GRU":  # a GRU adds its second bias inside a gate
                shift = shift + weights["bias_hh"]
            inputs = nn.functional.linear(x, weights["weight_ih"], shift).unbind(0)
            now, found = tuple(part[reverse] for part in state), []
            for given in reversed(inputs) if reverse else inputs:
                now = self._step(given, now, weights)
                found.append(now[0])
            outputs.append(torch.stack(found[::-1] if reverse else found))
            ends.append(now)
        joined = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return joined, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


# ---- attention ----


class _Attention:
    """The forward of nn.MultiheadAttention."""

    def __init__(self, layer: nn.MultiheadAttention, around: Surroundings) -> None:
        self._layer, self._around = layer, around

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As the layer's own forward."""
        layer = self._layer
        drops = layer.training and layer.dropout > 0
        if self._around.is_alone() and not drops:
            masks = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            own: tuple[Tensor, Tensor | None] = nn.MultiheadAttention.forward(layer, query, key, value, *masks)
            return own
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        given = [query, key, value]
        if not batched or not layer.batch_first:
            given = [x.transpose(0, 1) if batched else x.unsqueeze(0) for x in given]
        q, k, v = (self._heads(x, *weights) for x, weights in zip(given, self._projections(), strict=True))
        scores = q @ k.transpose(-2, -1) / math.sqrt(layer.head_dim)  # [B, heads, L, S]
        if attn_mask is not None:
            scores = _masked(scores, attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(scores.shape))
        if key_padding_mask is not None:
            scores = _masked(scores, key_padding_mask.reshape(len(scores), 1, 1, -1))
        weights = scores.softmax(-1)
        if drops:
            weights = self._around.drop(weights, layer.dropout)
        found = layer.out_proj((weights @ v).transpose(1, 2).flatten(2))  # [B, L, E]
        found = found.squeeze(0) if not batched else found if layer.batch_first else found.transpose(0, 1)
        if not need_weights:
            return found, None
        weights = weights.mean(1) if average_attn_weights else weights
        return found, weights if batched else weights.squeeze(0)

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:
        layer = self._layer
        if layer._qkv_same_embed_dim:
            matrices = layer.in_proj_weight.chunk(3)
        else:
            matrices = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        shifts = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
        return list(zip(matrices, shifts, strict=True))

    def _heads(self, x: Tensor, matrix: Tensor, shift: Tensor | None) -> Tensor:
        """[B, L, E] -> [B, heads, L, E / heads]."""
        projected = nn.functional.linear(x, matrix, shift)
        return projected.reshape(*x.shape[:2], self._layer.num_heads, -1).transpose(1, 2)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """True in a mask forbids a place; a mask of numbers is added."""
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask
