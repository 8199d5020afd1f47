"""Models in files for use elsewhere: safetensors (weights), torch.export and ONNX (programs).

A file has what it takes to use the model as texts beside it: how inputs are scaled, their shape, the classes, the
network and its settings, where the model comes from. Inputs of a program are those of the network: scaled.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from coterie.errors import ConfigError, MissingExtra, ModelError, StorageError, UnknownName
from coterie.nets.mixture import MixtureModel
from coterie.nets.stand_in import StandIn
from coterie.runs.files import reason
from coterie.runs.folder import storable
from coterie.trust import write_whole

FORMATS = {"safetensors": ".safetensors", "torch.export": ".pt2", "onnx": ".onnx"}  # and how their files end
_BATCH = 2  # samples of the example with which a program is made; the number is free
FACTS = "coterie.json"  # inside a file of torch.export


def needs_network(format: str) -> bool:
    """Whether a format holds a program, and not only weights."""
    if format not in FORMATS:
        raise UnknownName("format", format, FORMATS)
    if format == "onnx" and not all(find_spec(name) for name in ("onnx", "onnxscript")):
        raise MissingExtra("Export to ONNX", "onnx")
    return format != "safetensors"


def save_model(
    module: nn.Module,
    file: Path,
    format: str,
    facts: Mapping[str, str],
    input_shape: tuple[int, ...],
    integers: bool = False,
) -> Path:
    """Write a model completely, or leave the old file as it was; returns its path.

    `integers`: the samples are integers, and the network takes them as they are.
    """
    kind = "mixture" if isinstance(module, MixtureModel) else "network"
    facts = {**facts, "kind": kind, "format": format}
    if needs_network(format):
        if any(isinstance(part, StandIn) for part in module.modules()):
            raise ConfigError(f"A model as {format} needs the code of its network: --model {facts.get('network')}.")
        example = torch.zeros(_BATCH, *input_shape, dtype=torch.int64 if integers else _dtype(module))
        content = _programmed(module.eval(), example, format, facts)
    else:
        content = safetensors.torch.save(storable(module.state_dict()), dict(facts))
    try:
        write_whole(file, content)
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {reason(error)}.") from error
    return file


def _dtype(module: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in module.parameters())


def _programmed(module: nn.Module, example: Tensor, format: str, facts: Mapping[str, str]) -> bytes:
    """The bytes of a program for any number of samples."""
    shapes = ({0: torch.export.Dim("samples")},)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own tracing
            program = torch.export.export(module, (example,), dynamic_shapes=shapes)
            return _as_onnx(program, facts) if format == "onnx" else _as_pt2(program, facts)
    except ModelError:
        raise
    except Exception as error:  # tracing runs the user's code, and may raise anything
        name = type(module).__name__
        raise ModelError(f"{name} cannot be written as {format}: {reason(error)}. Use --format safetensors.") from error


def _as_pt2(program: torch.export.ExportedProgram, facts: Mapping[str, str]) -> bytes:
    torch.export.save(program, buffer := io.BytesIO(), extra_files={FACTS: json.dumps(dict(facts))})
    return buffer.getvalue()


def _as_onnx(program: torch.export.ExportedProgram, facts: Mapping[str, str]) -> bytes:
    log, level = logging.getLogger("torch.onnx"), logging.getLogger("torch.onnx").level
    log.setLevel(logging.ERROR)  # it warns of packages that are not needed
    try:
        found = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["x"], output_names=["y"])
    finally:
        log.setLevel(level)
    if found is None:
        raise ModelError("torch has made no ONNX program.")
    proto = found.model_proto
    for key, value in facts.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    content: bytes = proto.SerializeToString()
    return content
