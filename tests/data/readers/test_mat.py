"""SVHN's .mat and USPS's libsvm text."""

import bz2

import numpy as np
import pytest
from scipy.io import savemat

from coterie.data.readers.mat import read_svhn, read_usps
from coterie.errors import DataError


def svhn(rows=5):
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, rows), dtype=np.uint8)
    return {"X": x, "y": np.array([10, 1, 9, 10, 5], np.uint8)[:rows, None]}


def test_svhn(tmp_path):
    savemat(tmp_path / "train_32x32.mat", svhn(), do_compression=True)
    x, y = read_svhn(tmp_path / "train_32x32.mat")
    assert x.shape == (5, 3, 32, 32)
    assert x.dtype == np.uint8
    assert x[2, 1, 7, 9] == svhn()["X"][7, 9, 1, 2]
    assert y.tolist() == [0, 1, 9, 0, 5]
    assert y.dtype == np.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": svhn()["X"]}, "has no 'y'"),
        ({"digitStruct": np.zeros(3)}, "has no 'X'.*format 2"),
        (svhn() | {"y": np.ones((4, 1))}, "5 images but 4 labels"),
        (svhn() | {"y": np.full((5, 1), 11)}, "label 11"),
        (svhn() | {"X": np.zeros((32, 32, 5))}, "not \\[32, 32, 3, S\\]"),
    ],
)
def test_wrong_svhn_files_are_refused(tmp_path, content, message):
    savemat(tmp_path / "train.mat", content)
    with pytest.raises(DataError, match=message):
        read_svhn(tmp_path / "train.mat")


def test_damaged_svhn_files_are_refused(tmp_path):
    path = tmp_path / "train.mat"
    savemat(path, svhn(), do_compression=True)
    whole = path.read_bytes()
    for cut in (0, 50, 130, len(whole) // 2):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"truncated or damaged|has no 'X'"):
            read_svhn(path)
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(100))
    with pytest.raises(DataError, match=r"MATLAB 7.3"):
        read_svhn(path)
    with pytest.raises(DataError, match="There is no SVHN"):
        read_svhn(tmp_path / "nothing.mat")


def usps_text(values, labels):
    """As on the LIBSVM page: indices from 1, zeros left out."""
    lines = []
    for row, label in zip(values, labels, strict=True):
        cells = [f"{i}:{v:.6g}" for i, v in enumerate(row, start=1) if v]
        lines.append(" ".join([str(label), *cells]))
    return "\n".join(lines) + "\n"


@pytest.fixture
def values():
    found = np.random.default_rng(0).integers(-10, 11, (4, 256)) / 10
    found[0, 0], found[0, 1], found[0, 2] = -1, 0, 1
    return found


@pytest.mark.parametrize("pack", [bytes, bz2.compress])
def test_usps(tmp_path, values, pack):
    (tmp_path / "usps").write_bytes(pack(usps_text(values, [1, 10, 3, 4]).encode()))
    x, y = read_usps(tmp_path / "usps")
    assert x.shape == (4, 16, 16)
    assert x[0, 0, :3].tolist() == [0, 128, 255]
    assert np.array_equal(x.reshape(4, -1), np.rint((values + 1) * 127.5))
    assert y.tolist() == [0, 9, 2, 3]


def test_wrong_usps_files_are_refused(tmp_path, values):
    path = tmp_path / "usps.bz2"
    packed = bz2.compress(usps_text(values, [1, 2, 3, 4]).encode())
    for content, message in [
        (packed[:-20], "truncated or damaged"),
        (b"", "truncated or damaged"),
        (b"<html>404</html>\n", "not USPS in libsvm format"),
        (b"1 257:0.5\n", "not USPS in libsvm format"),
        (b"1 0:0.5\n", "not USPS in libsvm format"),
        (b"1 1:1.5\n", "outside -1"),
        (b"1 1:nan\n", "outside -1"),
        (b"0 1:0.5\n", "label -1"),
        (b"11 1:0.5\n", "label 10"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_usps(path)
    with pytest.raises(DataError, match="There is no USPS file"):
        read_usps(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"1 1:1\n" * 30_000, b"1 " + b" " * (65 << 20)])
def test_a_bomb_in_place_of_usps_is_refused(tmp_path, content):
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(content))
    with pytest.raises(DataError, match="unpacks to more than USPS has"):
        read_usps(tmp_path / "usps.bz2")


@pytest.mark.parametrize("y", ["words", np.array([[np.nan]] * 5), np.array([[np.inf]] * 5), np.array([[1e300]] * 5)])
def test_labels_of_svhn_that_are_none(tmp_path, y):
    savemat(tmp_path / "train_32x32.mat", svhn() | {"y": y})
    with pytest.raises(DataError, match=r"not numbers|has the label|images but"):
        read_svhn(tmp_path / "train_32x32.mat")


def test_svhn_of_too_many_images_is_refused_before_it_is_read(tmp_path, monkeypatch):
    savemat(tmp_path / "train_32x32.mat", svhn())
    monkeypatch.setattr("coterie.data.readers.mat._SVHN_IMAGES", 4)
    with pytest.raises(DataError, match="announces more images than SVHN has"):
        read_svhn(tmp_path / "train_32x32.mat")
