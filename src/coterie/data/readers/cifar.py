"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) as published: the "python" pickles or the "binary" files.

A path is the unpacked folder, its parent or the .tar.gz. No pickle code is run (see `_pickles`).
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers._files import DAMAGED, check_classes, damaged, invalid, must_exist
from coterie.data.readers._pickles import RefusedPickle, load_plain
from coterie.errors import DataError

_PIXELS = 3 * 32 * 32
_MOST_BYTES = 256 << 20  # the largest file, of CIFAR-100, has 155 MB


class Cifar(NamedTuple):
    """Images with their classes and the official split."""

    x: NDArray[np.uint8]  # [S, 3, 32, 32]
    y: NDArray[np.int64]  # [S]
    is_train: NDArray[np.bool_]  # [S]
    coarse: NDArray[np.int64] | None = None  # [S] the 20 superclasses of CIFAR-100


class _Batch(NamedTuple):
    x: NDArray[np.uint8]
    y: NDArray[np.int64]
    coarse: NDArray[np.int64] | None


_TRAIN10 = tuple(f"data_batch_{number}" for number in range(1, 6))


def read_cifar10(path: Path) -> Cifar:
    """CIFAR-10 from its folder (cifar-10-batches-py or -bin) or its .tar.gz; training samples first."""
    return _read(path, 10, (*_TRAIN10, "test_batch"), "data_batch_1 ... data_batch_5 and test_batch")


def read_cifar100(path: Path) -> Cifar:
    """CIFAR-100 from its folder (cifar-100-python or -binary) or its .tar.gz; training samples first."""
    return _read(path, 100, ("train", "test"), "train and test")


def read_pickled_batch(data: bytes, num_classes: int, path: Path | str) -> _Batch:
    """One batch of the python version; `path` is used in errors."""
    try:
        content = load_plain(data)
    except RefusedPickle as error:
        raise invalid(path, f"is not a readable CIFAR pickle: {error}") from error
    if not isinstance(content, dict):
        raise invalid(path, f"contains a {type(content).__name__} instead of a dict with data and labels")
    found = {k.decode("latin-1") if isinstance(k, bytes) else str(k): value for k, value in content.items()}
    x = _column(found, "data", path)
    if x.ndim != 2 or x.shape[1] != _PIXELS or x.dtype != np.uint8:
        raise invalid(path, f"has data of shape {list(x.shape)} and type {x.dtype}, not rows of {_PIXELS} bytes")
    y = _column(found, "labels" if num_classes == 10 else "fine_labels", path).astype(np.int64)
    coarse = None if num_classes == 10 else _column(found, "coarse_labels", path).astype(np.int64)
    return _checked(_Batch(x.reshape(-1, 3, 32, 32), y, coarse), num_classes, path)


def read_binary_batch(data: bytes, num_classes: int, path: Path | str) -> _Batch:
    """One batch of the binary version: rows of one label byte (CIFAR-100: coarse and fine) and 3,072 pixels."""
    labels = 1 if num_classes == 10 else 2
    width = labels + _PIXELS
    if not data or len(data) % width:
        raise damaged(path, f"{len(data):,} bytes are not rows of {width:,}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, width)
    coarse = None if labels == 1 else rows[:, 0].astype(np.int64)
    batch = _Batch(rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1].astype(np.int64), coarse)
    return _checked(batch, num_classes, path)


def _read(path: Path, num_classes: int, names: tuple[str, ...], listing: str) -> Cifar:
    wanted = {name: name for name in names} | {f"{name}.bin": name for name in names}
    batches: dict[str, _Batch] = {}
    for file_name, data in _files(path, wanted):
        reader = read_binary_batch if file_name.endswith(".bin") else read_pickled_batch
        batches[wanted[file_name]] = reader(data, num_classes, path / file_name)
    missing = [name for name in names if name not in batches]
    if missing:
        raise DataError(
            f"{path} has no file {missing[0]} (or {missing[0]}.bin); CIFAR-{num_classes} needs {listing}, "
            "so give the unpacked folder or the whole .tar.gz."
        )
    ordered = [batches[name] for name in names]
    is_train = np.concatenate([np.full(len(b.y), "test" not in n) for n, b in zip(names, ordered, strict=True)])
    coarse = [batch.coarse for batch in ordered if batch.coarse is not None]
    return Cifar(
        np.concatenate([batch.x for batch in ordered]),
        np.concatenate([batch.y for batch in ordered]),
        is_train,
        np.concatenate(coarse) if coarse else None,
    )


def _files(path: Path, wanted: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """The wanted files that exist, one at a time."""
    if path.is_dir():
        folder = _folder_with(path, wanted)
        for file in (folder / name for name in wanted if (folder / name).is_file()):
            if file.stat().st_size > _MOST_BYTES:
                raise invalid(file, f"has {file.stat().st_size:,} bytes, which is too large for CIFAR")
            yield file.name, file.read_bytes()
    else:
        must_exist(path, "CIFAR folder or .tar.gz")
        yield from _files_of_archive(path, wanted)


def _folder_with(path: Path, wanted: Mapping[str, str]) -> Path:
    """The folder, or the unpacked folder in it, that has any of the wanted files."""
    inside = sorted(child for child in path.glob("cifar-10*") if child.is_dir())
    for folder in (path, *inside):
        if any((folder / name).is_file() for name in wanted):
            return folder
    return path


def _files_of_archive(path: Path, wanted: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = Path(member.name).name
                if name not in wanted or not member.isfile():
                    continue
                if member.size > _MOST_BYTES:
                    raise invalid(path, f"has a file {name} of {member.size:,} bytes, which is too large for CIFAR")
                stream = archive.extractfile(member)
                assert stream is not None  # regular files always have one
                yield name, stream.read()
    except (tarfile.TarError, *DAMAGED) as error:
        raise damaged(path, error) from error


def _column(found: Mapping[str, Any], name: str, path: Path | str) -> NDArray[Any]:
    if name not in found:
        has = ", ".join(sorted(found)) or "nothing"
        raise invalid(path, f"has no '{name}' (found: {has})", "give CIFAR's own file for this dataset")
    value = found[name]
    if isinstance(value, list) and all(type(item) is int for item in value):
        return np.array([min(max(item, -1), 1 << 31) for item in value], dtype=np.int64)  # wrong ones are named later
    if not isinstance(value, np.ndarray):
        raise invalid(path, f"has '{name}' as {type(value).__name__}, not numbers")
    return value


def _checked(batch: _Batch, num_classes: int, path: Path | str) -> _Batch:
    for labels, classes in ((batch.y, num_classes), (batch.coarse, 20)):
        if labels is None:
            continue
        if labels.shape != (len(batch.x),):
            raise invalid(path, f"has {len(batch.x)} images but labels of shape {list(labels.shape)}")
        check_classes(labels, classes, path)
    return batch
