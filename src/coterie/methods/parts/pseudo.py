"""Pseudo data: inputs that K models classify as class k, generated on the server from the models alone.

Two samplers, and the class-wise distance of models on their samples: sections 3.2, 3.3 and 4 of MD-ICFL (Zhang, Zhang,
Cheng, Bao, Cao, Jiang, Xu 2024, "Communication-efficient clustered federated learning via model distance"). All K
centers are computed together. Each starts from the same noise, so its samples depend only on itself and the rng: not on
K, its label or the other centers.

    x = search(forward, centers, num_classes, input_shape, rng)          # [K, L, M, ...], or generate(...)
    predictions = probabilities(forward, centers, x)                     # [K, L, M, L]
    distances = class_distances(forward, models, predictions, x)         # [c, K, L]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from coterie.engines.forward import Forward, Outputs
from coterie.engines.kernels.recording import Recording
from coterie.errors import ConfigError, ModelError
from coterie.nets.flat import cross_entropy
from coterie.randomness import Rng, normal, uniform

# ---- the two samplers ----


def search(
    forward: Forward,
    centers: Tensor,
    num_classes: int,
    input_shape: Sequence[int],
    rng: Rng,
    *,
    samples: int = 30,
    iterations: int = 100,
    lr: float = 0.1,
    prior_weight: float = 0.1,
    prior_mean: float | Tensor = 0.0,
    start: Tensor | None = None,
    at_once: int | None = None,
) -> Tensor:
    """Back-searching (MD-ICFL-1): Adam moves Gaussian noise until center j classifies it as class k.

    Every sample minimises its own loss, Eq. 6 with lambda = `prior_weight` and mu = `prior_mean`. So the samples can
    be computed in pieces of `at_once` (over all centers) with the same result. `start` [K, L, M, ...] replaces the
    noise, such as the samples of centers that have moved a little since.
    Returns M = `samples` inputs per center and class: [K, L, M, *input_shape].
    """
    _check(forward, num_classes)
    shape, num_centers = tuple(input_shape), len(centers)
    pairs = num_classes * samples
    y = torch.arange(num_classes, device=centers.device).repeat_interleave(samples)  # [L * M]
    if start is None:
        noise = normal(_key(rng.at("search"), centers), pairs * math.prod(shape)).reshape(pairs, *shape)
        start = noise.to(centers.dtype).expand(num_centers, *noise.shape)
    begin = start.reshape(num_centers, pairs, *shape).to(centers)  # [K, L * M, ...]
    if forward.compiled is not None:
        x = begin.clone(memory_format=torch.contiguous_format)
        mean = torch.as_tensor(prior_mean, dtype=x.dtype).expand(shape)
        forward.compiled.search(centers, x, y, mean, 0.5 * prior_weight, _rates(lr, iterations, like=x))
        return x.reshape(num_centers, num_classes, samples, *shape)
    at_once = forward.samples_at_once(centers, shape) if at_once is None else at_once
    size = max(1, at_once // num_centers)
    found = []
    for some, targets in zip(begin.split(size, dim=1), y.split(size), strict=True):
        x = some.clone(memory_format=torch.contiguous_format).requires_grad_()  # [K, n, ...]
        adam = _Adam(x, lr, iterations)

        def step(x: Tensor = x, targets: Tensor = targets, adam: _Adam = adam) -> None:
            losses = _losses(forward, centers, x, targets, prior_weight, prior_mean)
            adam.update(*torch.autograd.grad(losses.sum(), [x]))

        _repeat(step, iterations, recorded=centers.is_cuda and forward.stacked)
        found.append(x.detach())
    return torch.cat(found, dim=1).reshape(num_centers, num_classes, samples, *shape)


def generate(
    forward: Forward,
    centers: Tensor,
    num_classes: int,
    input_shape: Sequence[int],
    rng: Rng,
    *,
    samples: int = 30,
    iterations: int = 1000,
    lr: float = 0.01,
    batch: int = 100,
    noise: int = 16,
    hidden: int = 256,
    prior_weight: float = 0.1,
    prior_mean: float | Tensor = 0.0,
) -> Tensor:
    """Generator-based sampling (MD-ICFL-2): one conditional generator per center, trained by Eq. 7.

    In every iteration each generator produces `batch` >= 2 inputs of random classes; in the end M = `samples` of each
    class. The paper does not give the width of the hidden layer. Returns [K, L, M, *input_shape].
    """
    _check(forward, num_classes)
    shape, device = tuple(input_shape), centers.device
    generators = _Generators(len(centers), noise + num_classes, hidden, math.prod(shape), rng.at("weights"), centers)
    adam = _Adam(generators.flat, lr, iterations)

    def conditioned(keys: Tensor, y: Tensor) -> Tensor:
        """Noise and one-hot labels: keys [...], y [..., n] -> [..., n, noise + L]."""
        random = normal(keys, y.shape[-1] * noise).reshape(*y.shape, noise)
        return torch.cat([random, nn.functional.one_hot(y, num_classes)], dim=-1).to(centers.dtype)

    turns = torch.arange(iterations, device=device)
    classes = (uniform(rng.at("classes").keys(turns), batch) * num_classes).long()  # [T, batch]
    inputs = conditioned(rng.at("noise").keys(turns), classes)  # [T, batch, noise + L]

    mean = torch.as_tensor(prior_mean, dtype=centers.dtype).expand(shape)

    def step() -> None:
        now = adam.done  # a tensor, so that a recorded step reads the next batch when it is replayed
        y = classes.index_select(0, now)[0]  # [batch]
        x = generators(inputs.index_select(0, now)[0], train=True).unflatten(-1, shape)  # [K, batch, ...]
        if forward.compiled is not None:
            above = forward.compiled.input_gradients(centers, x.detach(), y, mean, 0.5 * prior_weight) / batch
            adam.update(*torch.autograd.grad(x, generators.weights, above))
            return
        losses = _losses(forward, centers, x, y, prior_weight, prior_mean)
        adam.update(*torch.autograd.grad(losses.mean(1).sum(), generators.weights))

    _repeat(step, iterations, recorded=centers.is_cuda and forward.stacked)
    y = torch.arange(num_classes, device=device).repeat_interleave(samples)
    with torch.no_grad():
        x = generators(conditioned(_key(rng.at("samples"), centers), y.unsqueeze(0))[0], train=False)
    return x.reshape(len(centers), num_classes, samples, *shape)


# ---- distances on the samples ----


@torch.no_grad()
def probabilities(forward: Forward, centers: Tensor, x: Tensor, *, at_once: int = 2048) -> Tensor:
    """The predictions of each center on its own samples: x [K, L, M, ...] -> softmax [K, L, M, L]."""
    pieces = x.flatten(1, 2).split(max(1, at_once // len(centers)), dim=1)
    predictions = torch.cat([forward.each(centers, piece).softmax(-1) for piece in pieces], dim=1)
    return predictions.reshape(*x.shape[:3], -1)


@torch.no_grad()
def class_distances(
    outputs: Outputs,
    models: Tensor,
    predictions: Tensor,
    x: Tensor,
    *,
    counts: Tensor | None = None,
    likely: Tensor | None = None,
    at_once: int | None = None,
) -> Tensor:
    """The distance of models [c, P] to center j on its samples of class k: [c, K, L], each in [0, 2].

    The mean over the M samples of the L1 distance of the two softmax outputs, Eq. 5. All models are evaluated on all
    samples, at most `at_once` (model, sample) pairs together; by default as many as a CPU's caches or a GPU like.

    With label counts [c, L] the compiled program may skip what cannot change the nearest center, that with the least
    count-weighted sum: classes that a client does not have, and further samples of a center that is already farther
    than another. Its distances are then lower bounds, except for the nearest center. `likely` [c] are the centers to
    begin with (any label; negative: not known).
    """
    num_centers, num_classes, samples = x.shape[:3]
    if not len(models):
        return x.new_zeros(0, num_centers, num_classes)
    if isinstance(outputs, Forward) and outputs.compiled is not None:
        first = None if likely is None else likely.clamp(0, num_centers - 1)
        return outputs.compiled.distances(models, x, predictions, counts, first)
    at_once = (8192 if x.is_cuda else 2048) if at_once is None else at_once
    inputs = x.flatten(0, 2)  # [K * L * M, ...]
    expected = predictions.flatten(0, 2)  # [K * L * M, L]
    # Few models on all samples rather than all models on few: weights are then read once.
    group = max(1, at_once // len(inputs))
    distances = []
    for some in models.split(group):
        pieces = _pieces(max(1, at_once // group), inputs, expected)
        parts = [(outputs(some, piece).softmax(-1) - other).abs().sum(-1) for piece, other in pieces]
        distances.append(torch.cat(parts, dim=1))
    return torch.cat(distances).reshape(len(models), num_centers, num_classes, samples).mean(-1)


# ---- parts ----


def _losses(
    forward: Forward, centers: Tensor, x: Tensor, y: Tensor, prior_weight: float, prior_mean: float | Tensor
) -> Tensor:
    """Loss of each sample: x [K, n, ...], y [n] -> [K, n]."""
    outputs = forward.each(centers, x)
    losses: Tensor = cross_entropy(outputs.flatten(0, 1), y.repeat(len(x))).reshape(x.shape[:2])
    # The norm, not its square, as in the paper; its gradient in torch is 0 where it is 0.
    distance: Tensor = torch.linalg.vector_norm((x - prior_mean).flatten(2), dim=-1)
    return losses + 0.5 * prior_weight * distance


class _Generators:
    """K conditional generators: dense, BatchNorm, ReLU, dense. All have the same inputs and initial weights."""

    def __init__(self, count: int, inputs: int, hidden: int, outputs: int, rng: Rng, like: Tensor) -> None:
        self._count, self._hidden = count, hidden

        def start(name: str, fan_in: int, *shape: int) -> Tensor:
            """As torch initializes a dense layer: uniform within 1 / sqrt(fan in)."""
            return ((2 * rng.at(name).uniform(*shape) - 1) / math.sqrt(fan_in)).to(like)

        # No bias before the BatchNorm, which would cancel it.
        values = [
            start("first", inputs, inputs, hidden).repeat(1, count),  # [in, K * H]
            like.new_ones(count * hidden),  # scale and shift of the BatchNorm
            like.new_zeros(count * hidden),
            start("second", hidden, hidden, outputs).repeat(count, 1, 1),  # [K, H, out]
            start("bias", hidden, 1, outputs).repeat(count, 1, 1),  # [K, 1, out]
        ]
        self.flat = torch.cat([value.flatten() for value in values])
        parts = self.flat.split([value.numel() for value in values])
        # Views of the flat vector, so that Adam updates them with it.
        self.weights = [p.view(v.shape).detach().requires_grad_() for p, v in zip(parts, values, strict=True)]
        self._mean, self._var = like.new_zeros(count * hidden), like.new_ones(count * hidden)

    def __call__(self, inputs: Tensor, *, train: bool) -> Tensor:
        """[n, in] -> [K, n, out], normalized by batch statistics in train mode, otherwise by running ones."""
        first, scale, shift, second, bias = self.weights
        found = nn.functional.batch_norm(inputs @ first, self._mean, self._var, scale, shift, training=train)
        found = found.relu().reshape(-1, self._count, self._hidden).transpose(0, 1)  # [K, n, H]
        return torch.baddbmm(bias, found, second)


_BETAS = (0.9, 0.999)  # of Adam; the compiled program has them too


def _rates(lr: float, steps: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and floor of each Adam step [T]: the step is m / (sqrt(v) * slope + floor).

    This is lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).
    """
    count = torch.arange(1, steps + 1, dtype=torch.float64)
    rate = lr / (1 - _BETAS[0] ** count)
    return (1 / rate / (1 - _BETAS[1] ** count).sqrt()).to(like), (1e-8 / rate).to(like)


class _Adam:
    """Adam (Kingma and Ba 2015) on one tensor, in place; its count is a tensor, so that a step can be recorded."""

    def __init__(self, values: Tensor, lr: float, steps: int) -> None:
        self._values = values.detach()
        self._mean, self._square = torch.zeros_like(self._values), torch.zeros_like(self._values)
        self.done = torch.zeros(1, dtype=torch.int64, device=values.device)
        self._slope, self._floor = _rates(lr, steps, like=values)

    def update(self, *gradients: Tensor) -> None:
        """One step along the gradients, which together have as many entries as the values."""
        gradient = gradients[0] if len(gradients) == 1 else torch.cat([g.flatten() for g in gradients])
        self._mean.lerp_(gradient, 1 - _BETAS[0])
        self._square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        slope, floor = self._slope.index_select(0, self.done), self._floor.index_select(0, self.done)
        self._values.addcdiv_(self._mean, self._square.sqrt().mul_(slope).add_(floor), value=-1)
        self.done.add_(1)


def _repeat(step: Callable[[], None], times: int, *, recorded: bool) -> None:
    """Repeat a step; with `recorded`, record it once as a CUDA graph and replay it, if possible."""
    with torch.enable_grad():
        first = min(times, 3)  # a graph needs a few steps before it, on a side stream
        if not recorded or times <= 2 * first:
            for _ in range(times):
                step()
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(first):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        try:
            found = Recording.of(step, aside.device)
        except RuntimeError:  # the network synchronizes with the GPU
            found = None
        for _ in range(times - first):
            step() if found is None else found.replay()


def _pieces(size: int, one: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(one.split(size), other.split(size), strict=True))


def _key(rng: Rng, like: Tensor) -> Tensor:
    return torch.tensor([rng.key], device=like.device)


def _check(forward: Forward, num_classes: int) -> None:
    if num_classes < 1:
        raise ConfigError("Pseudo data are generated for classes, and this task has none; use another method.")
    if not forward.differentiable:
        raise ModelError(
            "The network has no gradient with respect to its inputs (are they integers, such as characters?), and "
            "pseudo data are generated by following it; use another method."
        )
