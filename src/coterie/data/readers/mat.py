"""SVHN's .mat files (format 2, cropped digits) and USPS in libsvm text format.

Netzer et al., 2011 (train_32x32.mat, test_32x32.mat); Hull, 1994 (usps.bz2, usps.t.bz2 of the LIBSVM page).
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.data.readers._files import (
    DAMAGED,
    check_classes,
    damaged,
    invalid,
    must_exist,
    open_compressed,
    read_up_to,
)
from coterie.errors import DataError

_USPS_SIDE = 16
_USPS_BYTES, _USPS_LINES = 64 << 20, 20_000  # at most; the training file has 18 MB and 7,291 lines
_SVHN_IMAGES = 700_000  # at most; the file of extra images has 531,131


def read_svhn(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Cropped SVHN digits: uint8 [S, 3, 32, 32] and classes 0 ... 9 (the file labels the digit 0 as 10)."""
    from scipy.io import loadmat, whosmat

    must_exist(path, "SVHN .mat file")
    try:
        sizes = {name: math.prod(shape) for name, shape, _ in whosmat(path)}  # before anything is unpacked
        if sizes.get("X", 0) > 32 * 32 * 3 * _SVHN_IMAGES or sizes.get("y", 0) > _SVHN_IMAGES:
            raise invalid(path, "announces more images than SVHN has")
        content = loadmat(path, variable_names=["X", "y"])
    except DataError:
        raise
    except NotImplementedError as error:
        raise invalid(path, "is a MATLAB 7.3 file", "give SVHN's own train_32x32.mat or test_32x32.mat") from error
    except Exception as error:  # scipy raises many types for damaged files
        raise damaged(path, error) from error
    missing = [name for name in ("X", "y") if name not in content]
    if missing:
        raise invalid(path, f"has no '{missing[0]}'", "give SVHN in format 2, train_32x32.mat or test_32x32.mat")
    x, labels = content["X"], content["y"]
    if not isinstance(x, np.ndarray) or not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iuf":
        raise invalid(path, "has X or y that are not numbers")
    if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.dtype != np.uint8:
        raise invalid(path, f"has X of shape {list(x.shape)} and type {x.dtype}, not [32, 32, 3, S] of bytes")
    y = np.nan_to_num(labels.reshape(-1).astype(np.float64), nan=-1, posinf=-1).clip(-1, 1e6).astype(np.int64)
    if len(y) != x.shape[3]:
        raise invalid(path, f"has {x.shape[3]} images but {len(y)} labels")
    y[y == 10] = 0
    check_classes(y, 10, path)
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y


def read_usps(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """USPS digits: uint8 [S, 16, 16] (ink 255) and classes 0 ... 9 (1 ... 10 in the file)."""
    from sklearn.datasets import load_svmlight_file

    must_exist(path, "USPS file")
    try:
        with open_compressed(path) as stream:
            content = read_up_to(stream, _USPS_BYTES + 1)
        if len(content) > _USPS_BYTES or content.count(b"\n") > _USPS_LINES:
            raise invalid(path, "unpacks to more than USPS has", "give usps.bz2 or usps.t.bz2")
        sparse, labels = load_svmlight_file(
            io.BytesIO(content), n_features=_USPS_SIDE**2, dtype=np.float64, zero_based=False
        )
    except DAMAGED as error:
        raise damaged(path, error) from error
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid(path, f"is not USPS in libsvm format: {error}", "give usps.bz2 or usps.t.bz2") from error
    values = sparse.toarray()
    if not len(values):
        raise damaged(path, "it has no samples")
    if not np.abs(values).max() <= 1:
        raise invalid(path, "has values outside -1 ... 1", "give usps.bz2 or usps.t.bz2 as published")
    y = np.nan_to_num(np.asarray(labels, np.float64), nan=-1, posinf=-1).clip(-1, 1e6).astype(np.int64) - 1
    check_classes(y, 10, path)
    x = np.rint((values + 1) * 127.5).astype(np.uint8)
    return x.reshape(-1, _USPS_SIDE, _USPS_SIDE), y
