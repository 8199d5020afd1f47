"""idx files as MNIST, EMNIST and QMNIST give them out."""

import gzip
import struct

import numpy as np
import pytest

from coterie.data.readers.idx import read_idx, read_images, read_labels, read_pair, read_qmnist_labels
from coterie.errors import DataError

_CODES = {"u1": 0x08, "i4": 0x0C, "f4": 0x0D}


def idx_bytes(array):
    header = bytes([0, 0, _CODES[array.dtype.str[1:]], array.ndim])
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_images_and_labels_plain_and_gzipped(tmp_path, images, pack):
    labels = np.array([3, 1, 4, 1, 5], np.uint8)
    (tmp_path / "images").write_bytes(pack(idx_bytes(images)))
    (tmp_path / "labels").write_bytes(pack(idx_bytes(labels)))
    x, y = read_pair(tmp_path / "images", tmp_path / "labels")
    assert np.array_equal(x, images)
    assert x.dtype == np.uint8
    assert y.tolist() == [3, 1, 4, 1, 5]
    assert y.dtype == np.int64


def test_emnist_images_are_transposed_back(tmp_path, images):
    (tmp_path / "images").write_bytes(idx_bytes(np.ascontiguousarray(images.transpose(0, 2, 1))))
    x = read_images(tmp_path / "images", transposed=True)
    assert np.array_equal(x, images)
    assert x.flags.c_contiguous


def test_qmnist_labels_have_eight_columns(tmp_path):
    table = np.arange(24, dtype=np.int32).reshape(3, 8) * 1000
    (tmp_path / "labels").write_bytes(gzip.compress(idx_bytes(table)))
    assert np.array_equal(read_qmnist_labels(tmp_path / "labels"), table)
    assert read_labels(tmp_path / "labels").tolist() == [0, 8000, 16000]


def test_numbers_come_in_the_machines_byte_order(tmp_path):
    values = np.array([1.5, -2.0], np.float32)
    (tmp_path / "values").write_bytes(idx_bytes(values))
    found = read_idx(tmp_path / "values")
    assert found.dtype.isnative
    assert found.tolist() == [1.5, -2.0]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("cut", [0, 3, 9, -1])
def test_a_file_that_ends_early_is_refused(tmp_path, images, pack, cut):
    (tmp_path / "images").write_bytes(pack(idx_bytes(images)[:cut]))
    with pytest.raises(DataError, match=r"truncated or damaged.*again"):
        read_images(tmp_path / "images")


def test_a_gzip_that_ends_early_is_refused(tmp_path, images):
    (tmp_path / "images.gz").write_bytes(gzip.compress(idx_bytes(images))[:-12])
    with pytest.raises(DataError, match="truncated or damaged"):
        read_images(tmp_path / "images.gz")


def test_a_header_that_asks_for_terabytes_is_refused(tmp_path):
    header = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**16, 2**16)
    (tmp_path / "images.gz").write_bytes(gzip.compress(header))
    with pytest.raises(DataError, match="announces"):
        read_images(tmp_path / "images.gz")


def test_wrong_files_are_refused(tmp_path, images):
    (tmp_path / "images").write_bytes(idx_bytes(images))
    (tmp_path / "labels").write_bytes(idx_bytes(np.zeros(4, np.uint8)))
    (tmp_path / "long").write_bytes(idx_bytes(images) + b"x")
    (tmp_path / "page").write_bytes(b"<html>404</html>")
    with pytest.raises(DataError, match=r"5 images but .* 4 labels"):
        read_pair(tmp_path / "images", tmp_path / "labels")
    with pytest.raises(DataError, match="give the file of images"):
        read_images(tmp_path / "labels")
    with pytest.raises(DataError, match="give the file of labels"):
        read_labels(tmp_path / "images")
    with pytest.raises(DataError, match="eight columns"):
        read_qmnist_labels(tmp_path / "labels")
    with pytest.raises(DataError, match="has more than"):
        read_images(tmp_path / "long")
    with pytest.raises(DataError, match="is not an idx file"):
        read_images(tmp_path / "page")
    with pytest.raises(DataError, match="There is no idx file"):
        read_images(tmp_path / "nothing")
    with pytest.raises(DataError, match="is a folder"):
        read_images(tmp_path)


def test_a_bomb_is_refused_by_its_header(tmp_path):
    content = bytes([0, 0, 8, 3]) + struct.pack(">3I", 4_000_000, 28, 28) + bytes(1000)
    (tmp_path / "images.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"announces 3,136,000,000 bytes, more than"):
        read_idx(tmp_path / "images.gz")
