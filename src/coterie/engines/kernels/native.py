"""Plain networks trained by a small C++ program, compiled for the processor of this machine (`native.cpp`).

For the networks of `layers.py` (Linear, ReLU, Conv2d, MaxPool2d, AvgPool2d, Flatten under cross-entropy), on a CPU.
One thread trains a client from its first step to its last, so that its model and batch stay in the cache of one core;
several threads train several clients. Results do not depend on the number of threads.

The program is compiled once per machine and user (some seconds, then kept in the cache folder) by the C++ compiler in
`CXX`, or else c++, g++ or clang++. Without a compiler, or a folder that only this user can write to, the engine uses
its other plans.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.client.batches import Batch, StepCounts
from coterie.client.stack import Job, Plan, train_job
from coterie.client.work import SGD, Corrected, FirstOrderMAML, Proximal, Stack
from coterie.engines.cache import alone, private_folder, read_own
from coterie.engines.kernels.layers import plain_network
from coterie.nets.flat import Loss, Network
from coterie.trust import write_whole

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")
_KINDS: dict[type[nn.Module], int] = {
    nn.Linear: 0,
    nn.Conv2d: 1,
    nn.ReLU: 2,
    nn.MaxPool2d: 3,
    nn.Flatten: 4,
    nn.AvgPool2d: 5,
}
_WORKS = (SGD, Proximal, Corrected, FirstOrderMAML)  # other work makes its steps in Python, with gradients from here

_SAMPLE_BYTES = 32 << 20  # of samples gathered at a time
_MOST_PROGRAM = 64 << 20  # bytes of the compiled program

_lock = threading.Lock()
_loaded: dict[torch.dtype, Any] = {}


class NotNative(Exception):
    """The compiled program cannot be used; the message gives the reason."""


def library(dtype: torch.dtype) -> Any:
    """The program for this float type, compiled if necessary; raises NotNative."""
    with _lock:
        if dtype not in _loaded:
            try:
                _loaded[dtype] = _load(dtype)
            except (NotNative, OSError) as error:
                _loaded[dtype] = NotNative(str(error))
        found = _loaded[dtype]
    if isinstance(found, NotNative):
        raise found
    return found


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise NotNative("there is no C++ compiler; install one or set CXX")


def _load(dtype: torch.dtype) -> Any:
    """The program of this user that was built here; a file that is cut, changed or somebody else's is built anew."""
    source, command, key = _recipe(dtype)
    path = private_folder() / f"{key}.so"
    found = _intact(path)
    if found is None:
        with alone(path):
            found = _intact(path)
            if found is None:
                _build(path, source, command)
                found = _intact(path)
    if found is None:
        raise NotNative(f"{path} could not be read back")
    # What was checked is loaded, even if the name leads to another file by now. The descriptor stays open: the loader
    # knows programs by their names, and another one must not get this number.
    opened = Path(f"/proc/self/fd/{found}")
    return ctypes.CDLL(str(opened if opened.exists() else path))


def _intact(path: Path) -> int | None:
    """A descriptor of a program if it has the digest that was recorded when it was built."""
    recorded = read_own(path.with_suffix(".sha256"), 1024)
    if recorded is None:
        return None
    os.close(recorded[0])
    program = read_own(path, _MOST_PROGRAM)
    if program is None:
        return None
    if hashlib.sha256(program[1]).hexdigest().encode() == recorded[1]:
        return program[0]
    os.close(program[0])
    return None


def _recipe(dtype: torch.dtype) -> tuple[str, list[str], str]:
    """The source, the command that compiles it, and a digest of everything that the program depends on."""
    if dtype not in (torch.float32, torch.float64):
        raise NotNative(f"it does not support {dtype}")
    source = files("coterie.engines.kernels").joinpath("native.cpp").read_text(encoding="utf-8")
    command = [*_compiler(), *_FLAGS, *(["-DDOUBLE"] if dtype == torch.float64 else [])]
    version = _run([command[0], "--version"], 30).stdout
    key = hashlib.sha256("\0".join([source, *command, version, *_processor()]).encode()).hexdigest()[:24]
    return source, command, key


def _build(path: Path, source: str, command: list[str]) -> None:
    """Compile the program, and record its digest."""
    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        text, made = Path(folder, "native.cpp"), Path(folder, "native.so")
        text.write_text(source, encoding="utf-8")
        done = _run([*command, "-o", str(made), str(text)], 120)
        if done.returncode or not made.exists():
            raise NotNative(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[0][:160]}")
        content = made.read_bytes()
        write_whole(path, content)
        write_whole(path.with_suffix(".sha256"), hashlib.sha256(content).hexdigest().encode())


def _run(command: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotNative(f"{command[0]} cannot be run ({error})") from error


def _processor() -> list[str]:
    """What `-march=native` depends on: several machines may share the cache folder."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            found = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    except OSError:
        found = []
    return [platform.machine(), platform.processor(), *dict.fromkeys(found)]


class NativeKernel:
    """Gradients, outputs and whole trainings by the compiled program."""

    def __init__(self, network: Network, table: Tensor, places: list[int], threads: int) -> None:
        self._layout, self._dtype, self._threads = network.layout, network.dtype, threads
        self._library = library(self._dtype)
        self._table = table  # int64 [layers, fields], see Layer in native.cpp
        self._places = places  # of the parameters in the layout, in the order of the table
        self._offsets = torch.tensor([self._layout.parameters[place].start for place in places])
        self._outputs = int(table[-1, 4])
        self._sample = int(table[0, 1] * table[0, 2] * table[0, 3])  # numbers per sample
        self.sample_bytes = self._sample * self._dtype.itemsize

    @classmethod
    def of(cls, network: Network, loss: Loss, input_shape: Sequence[int], threads: int) -> NativeKernel | None:
        """The kernel of a network; None if a layer, the loss or a shape is not supported. Raises NotNative."""
        found = plain_network(network, loss)
        table = None if found is None else _table(found[0], tuple(input_shape))
        if found is None or table is None:
            return None
        return cls(network, table, [place for own in found[1] for place in own], threads)

    def gradients(self, params: Stack, buffers: Stack, batch: Batch, train: bool = True) -> Stack:
        """See `Kernel.gradients`; these layers are the same in both modes."""
        own = [params[place].contiguous() for place in self._places]
        found = [torch.empty_like(p) for p in own]
        x, y = batch.x.to(self._dtype).contiguous(), batch.y.contiguous()
        mask = None if batch.mask is None else batch.mask.to(self._dtype).contiguous()
        scale = None
        if batch.weights is not None:  # the program divides by the sum of the mask, or by 1 if that is less
            count = x.shape[1] if mask is None else mask.sum(1)
            mask = (batch.weights if mask is None else batch.weights * mask).to(self._dtype).contiguous()
            scale = mask.sum(1).clamp_min(1) / count
        clients, size = x.shape[:2]
        numel = torch.tensor([p[0].numel() for p in own])
        models = (own, numel, found)
        self._call("gradients", clients, self._threads, size, *models, x, size * self._sample, y, mask)
        if scale is not None:
            found = [tensor * scale.reshape(-1, *[1] * (tensor.dim() - 1)) for tensor in found]
        return [tensor for _, tensor in sorted(zip(self._places, found, strict=True), key=lambda pair: pair[0])]

    def outputs(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Kernel.outputs`."""
        flat, x = flat.contiguous(), x.to(self._dtype)
        models, samples = x.shape[:2]
        shared = models > 1 and x.stride(0) == 0
        x = x[:1].contiguous() if shared else x.contiguous()
        result = torch.empty(models, samples, self._outputs, dtype=self._dtype)
        stride = 0 if shared else samples * self._sample
        weights = (self._offsets, flat, flat.shape[1])
        self._call("outputs", models, self._threads, *weights, x, stride, samples, result)
        return result

    def search(
        self, flat: Tensor, x: Tensor, y: Tensor, mean: Tensor, pull: float, rates: tuple[Tensor, Tensor]
    ) -> None:
        """Move samples x [c, n, ...] in place by Adam until model i classifies sample j as y [n].

        The loss of a sample is its cross-entropy + `pull` * ||x - mean||. With `rates`, slope and floor [T] of each of
        T steps, a step is m / (sqrt(v) * slope[t] + floor[t]).
        """
        assert x.is_contiguous()
        assert x.dtype == self._dtype
        flat, y, mean = flat.contiguous(), y.contiguous(), mean.to(self._dtype).contiguous()
        slope, floor = (rate.to(self._dtype).contiguous() for rate in rates)
        weights, samples = (self._offsets, flat, flat.shape[1]), (x.shape[1], x, y, mean)
        self._call("search", len(x), self._threads, *weights, *samples, float(pull), slope, floor, len(slope))

    def input_gradients(self, flat: Tensor, x: Tensor, y: Tensor, mean: Tensor, pull: float) -> Tensor:
        """Gradients [c, n, ...] of the losses of `search` with respect to the samples, each of its own loss."""
        flat, x, mean = (tensor.to(self._dtype).contiguous() for tensor in (flat, x, mean))
        result = torch.empty_like(x)
        weights, samples = (self._offsets, flat, flat.shape[1]), (x.shape[1], x, y.contiguous(), mean)
        self._call("input_gradients", len(x), self._threads, *weights, *samples, float(pull), result)
        return result

    def distances(
        self, flat: Tensor, x: Tensor, expected: Tensor, shares: Tensor | None = None, first: Tensor | None = None
    ) -> Tensor:
        """Mean L1 distance of the softmax outputs of models [c, P] on x [K, L, M, ...] to `expected`: [c, K, L].

        With `shares` [c, L] only the nearest center is found, `first` [c] being tried first: see `class_distances`.
        """
        flat, x, expected = (tensor.to(self._dtype).contiguous() for tensor in (flat, x, expected))
        shares = None if shares is None else shares.to(self._dtype).contiguous()
        first = None if first is None else first.to(torch.int64).contiguous()
        result = torch.empty(len(flat), *x.shape[:2], dtype=self._dtype)
        weights = (self._offsets, flat, flat.shape[1])
        self._call("distances", len(flat), self._threads, *weights, x, expected, *x.shape[:3], shares, first, result)
        return result

    def train(self, job: Job) -> bool:
        """Train a stack from start to end; False if the program does not support this work."""
        work, batches = job.work, job.batches[0]
        if type(work) not in _WORKS or not work.is_plain:
            return False
        rendered = batches.rendered()
        needed = (*rendered, batches.start) if rendered else batches.own_samples(all_of_them=len(job.batches) > 1)
        x, y, begins = needed
        counts, streams = job.counts, (job.batches[0].keys, job.batches[-1].keys)
        keys = [None if key is None else key.contiguous() for key in streams]
        start = job.start if job.start.stride(1) == 1 else job.start.contiguous()
        result = job.result if job.result.is_contiguous() else torch.empty_like(job.result)
        result[:, self._layout.num_parameters :] = start[:, self._layout.num_parameters :]
        correction = job.extras.get("correction") if isinstance(work, Corrected) else None
        correction = None if correction is None else correction.to(self._dtype).contiguous()
        width = 0 if correction is None else correction.shape[1]
        inner = work.inner_lr if isinstance(work, FirstOrderMAML) else 0
        numbers = [begins, counts.sizes, counts.per_epoch, counts.batch, counts.steps]
        numbers = [number.to(torch.int64).contiguous() for number in numbers]
        models = (self._offsets, start, start.stride(0), result)
        rates = (float(work.lr), float(work.momentum), float(work.weight_decay))  # an int would be passed as int64
        extras = (self._prox(work, job), correction, width, float(inner))
        sizes = (result.shape[1], len(start), self._threads)
        self._call("train", *sizes, *models, x, y, *numbers, *keys, *rates, *extras)
        if result is not job.result:
            job.result.copy_(result)
        return True

    def _prox(self, work: SGD, job: Job) -> Tensor | None:
        if not isinstance(work, Proximal):
            return None
        each = job.extras.get("prox")
        if each is not None:
            return each.to(self._dtype).contiguous()
        return torch.full((len(job.start),), work.prox, dtype=self._dtype) if work.prox else None

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the program, whose first arguments are the layers and their number."""
        if getattr(self._library, name)(*map(_as_c, (self._table, len(self._table), *arguments))):
            raise MemoryError("the compiled program ran out of memory")


class NativePlan(Plan):
    """All clients of a chunk in one call, with `workers` threads inside it.

    If samples are not rendered (`scattered`), as many clients per call as fit their samples into `_SAMPLE_BYTES`.
    """

    def __init__(self, kernel: NativeKernel, piece: int, workers: int, scattered: bool = False) -> None:
        super().__init__("native", kernel, piece, workers)
        self._native, self._scattered = kernel, scattered

    def train(self, job: Job) -> None:
        """Train one stack."""
        if not self._native.train(job):
            train_job(job, self._native)

    def each(self, function: Callable[[slice], None], counts: StepCounts) -> None:
        """All clients at once: the program trains each on its own."""
        count, at_once = len(counts.sizes), len(counts.sizes)
        if self._scattered:
            at_once = max(self.workers, _SAMPLE_BYTES // max(1, int(counts.sizes.max()) * self._native.sample_bytes))
        for start in range(0, count, at_once):
            function(slice(start, min(start + at_once, count)))


def _table(layers: Sequence[nn.Module], shape: tuple[int, ...]) -> Tensor | None:
    """The table of layers with all shapes; None if the program does not support one."""
    size = (*shape, 1, 1) if len(shape) == 1 else shape
    images = any(isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.AvgPool2d) for layer in layers)
    if len(size) != 3 or not isinstance(layers[-1], nn.Linear):
        return None
    if not images:
        size = (math.prod(size), 1, 1)
        if len(shape) > 1 and not isinstance(layers[0], nn.Flatten):
            return None
        layers = [layer for layer in layers if not isinstance(layer, nn.Flatten)]
    elif len(shape) != 3:
        return None
    rows, place, flat = [], 0, not images
    for layer in layers:
        before, kernel, own = size, (0, 0, 0, 0, 0, 0), [-1, -1]
        if isinstance(layer, nn.Linear | nn.Conv2d):
            own = [place, place + 1 if layer.bias is not None else -1]
            place += 1 + (layer.bias is not None)
        if isinstance(layer, nn.Linear):
            if not flat or layer.in_features != size[0]:
                return None
            size = (layer.out_features, 1, 1)
        elif isinstance(layer, nn.Conv2d):
            (high, wide), (down, right) = layer.kernel_size, layer.stride
            assert not isinstance(layer.padding, str)
            pad_y, pad_x = layer.padding
            kernel = (high, wide, down, right, pad_y, pad_x)
            rows_out, columns_out = (size[1] + 2 * pad_y - high) // down + 1, (size[2] + 2 * pad_x - wide) // right + 1
            size = (layer.out_channels, rows_out, columns_out)
        elif isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            pool = layer.kernel_size
            assert isinstance(pool, int)
            kernel = (pool, pool, pool, pool, 0, 0)
            size = (size[0], size[1] // pool, size[2] // pool)
        elif isinstance(layer, nn.Flatten):
            if flat:
                return None
            size, flat = (math.prod(size), 1, 1), True
        rows.append([_KINDS[type(layer)], *before, *size, *kernel, *own])
    return torch.tensor(rows, dtype=torch.int64)


def _as_c(value: Any) -> Any:
    """An argument of a C function: an int64, a double, a pointer, or an array of pointers."""
    if value is None or isinstance(value, Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    if isinstance(value, list):
        return (ctypes.c_void_p * len(value))(*(tensor.data_ptr() for tensor in value))
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)
