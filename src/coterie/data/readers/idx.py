"""The idx format of MNIST, Fashion-MNIST, EMNIST and QMNIST, plain or gzipped.

Two zero bytes, the data type, the number of axes, the axes as big-endian int32, then the data
(http://yann.lecun.com/exdb/mnist). QMNIST's label files have eight columns (Yadav and Bottou, 2019).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers._files import DAMAGED, damaged, invalid, must_exist, open_compressed, read_up_to

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

_MOST_BYTES = 1 << 30  # EMNIST, the largest, has 547 MB

# series: the NIST series, hsf_0 ... hsf_8
QMNIST_COLUMNS = ("class", "series", "writer", "index", "nist_class", "nist_index", "duplicate", "unused")


def read_idx(path: Path) -> NDArray[Any]:
    """The array of an idx file, in native byte order."""
    must_exist(path, "idx file")
    try:
        with open_compressed(path) as stream:
            dtype, shape = _header(stream.read(4), stream, path)
            size = math.prod(shape) * dtype.itemsize
            if size > _MOST_BYTES:
                raise invalid(path, f"announces {size:,} bytes, more than the {_MOST_BYTES:,} of any published file")
            data = read_up_to(stream, size + 1)
    except DAMAGED as error:
        raise damaged(path, error) from error
    if len(data) < size:
        raise damaged(path, f"{len(data):,} of {size:,} bytes")
    if len(data) > size:
        raise invalid(path, f"has more than the {size:,} bytes that its header announces")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_images(path: Path, *, transposed: bool = False) -> NDArray[np.uint8]:
    """Grey images, uint8 [S, H, W]; in EMNIST's files they are `transposed`."""
    images = read_idx(path)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise invalid(path, _content(images), "give the file of images (idx3-ubyte)")
    return np.ascontiguousarray(images.transpose(0, 2, 1)) if transposed else images


def read_labels(path: Path) -> NDArray[np.int64]:
    """Classes, int64 [S]; the first column of a QMNIST label file."""
    labels = read_idx(path)
    if labels.ndim == 2 and labels.shape[1] == len(QMNIST_COLUMNS):
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise invalid(path, _content(labels), "give the file of labels (idx1-ubyte)")
    return labels.astype(np.int64)


def read_qmnist_labels(path: Path) -> NDArray[np.int64]:
    """All columns of a QMNIST label file, int64 [S, 8]: see `QMNIST_COLUMNS`."""
    labels = read_idx(path)
    if labels.ndim != 2 or labels.shape[1] != len(QMNIST_COLUMNS) or labels.dtype.kind not in "iu":
        raise invalid(path, _content(labels), "give QMNIST's file of labels (idx2-int, eight columns)")
    return labels.astype(np.int64)


def read_pair(images: Path, labels: Path, *, transposed: bool = False) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and their classes: uint8 [S, H, W] and int64 [S]."""
    x, y = read_images(images, transposed=transposed), read_labels(labels)
    if len(x) != len(y):
        raise invalid(
            images, f"has {len(x)} images but {labels} has {len(y)} labels", "give two files that belong together"
        )
    return x, y


def _header(magic: bytes, stream: Any, path: Path) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if len(magic) == 4 and (magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] == 0):
        raise invalid(path, "is not an idx file", "give an idx file such as train-images-idx3-ubyte.gz")
    axes = stream.read(4 * magic[3]) if len(magic) == 4 else b""
    if len(magic) < 4 or len(axes) < 4 * magic[3]:
        raise damaged(path, "its header is incomplete")
    return np.dtype(_TYPES[magic[2]]), struct.unpack(f">{magic[3]}I", axes)


def _content(array: NDArray[Any]) -> str:
    return f"contains {array.dtype} of shape {list(array.shape)}"
