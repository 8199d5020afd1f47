"""CIFAR as published; pickles never run code."""

import os
import pickle
import tarfile

import numpy as np
import pytest

from coterie.data.readers._pickles import RefusedPickle, load_plain
from coterie.data.readers.cifar import read_cifar10, read_cifar100, read_pickled_batch
from coterie.errors import DataError

_NAMES10 = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]


def batch10(seed, rows=4):
    rng = np.random.default_rng(seed)
    return {
        b"batch_label": b"training batch",
        b"labels": rng.integers(0, 10, rows).tolist(),
        b"data": rng.integers(0, 256, (rows, 3072), dtype=np.uint8),
        b"filenames": [b"a_%d.png" % i for i in range(rows)],
    }


def batch100(seed, rows=4):
    rng = np.random.default_rng(seed)
    content = batch10(seed, rows)
    del content[b"labels"]
    labels = {b"fine_labels": rng.integers(0, 100, rows).tolist(), b"coarse_labels": rng.integers(0, 20, rows).tolist()}
    return content | labels


def python2_pickle(rows):
    """The opening and the array pattern of the true files, byte by byte as Python 2 wrote them."""
    labels = b"".join(b"K" + bytes([i]) for i in range(rows))
    shape = b"K" + bytes([rows]) + b"M\x00\x0c\x86"
    pixels = np.arange(rows * 3072, dtype=np.int64).astype(np.uint8).tobytes()
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05("
        + labels
        + b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\t"
        + b"(K\x01"
        + shape
        + b"cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(pixels).to_bytes(4, "little")
        + pixels
        + b"tbU\tfilenamesq\x0c]q\r(U\x05a.pngq\x0eh\x0eeu."
    )


@pytest.fixture
def folder10(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(_NAMES10):
        (folder / name).write_bytes(pickle.dumps(batch10(seed), protocol=2))
    return folder


def check10(found):
    assert found.x.shape == (24, 3, 32, 32)
    assert found.x.dtype == np.uint8
    assert found.is_train.tolist() == [True] * 20 + [False] * 4
    assert found.coarse is None
    for number in range(6):
        rows = slice(4 * number, 4 * number + 4)
        assert np.array_equal(found.x[rows].reshape(4, -1), batch10(number)[b"data"])
        assert found.y[rows].tolist() == batch10(number)[b"labels"]


def test_cifar10_pickles(folder10):
    check10(read_cifar10(folder10))
    check10(read_cifar10(folder10.parent))


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_cifar10_archive(folder10, tmp_path, mode):
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, mode) as tar:
        tar.add(folder10, arcname="cifar-10-batches-py")
    check10(read_cifar10(archive))
    archive.write_bytes(archive.read_bytes()[:40_000])
    with pytest.raises(DataError, match="truncated or damaged"):
        read_cifar10(archive)


def test_an_archive_that_is_none(tmp_path):
    (tmp_path / "cifar.tar.gz").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(DataError, match="truncated or damaged"):
        read_cifar10(tmp_path / "cifar.tar.gz")


def test_cifar10_binary(tmp_path):
    for seed, name in enumerate(_NAMES10):
        content = batch10(seed)
        rows = np.concatenate([np.array(content[b"labels"], np.uint8)[:, None], content[b"data"]], axis=1)
        (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
    check10(read_cifar10(tmp_path))
    (tmp_path / "data_batch_2.bin").write_bytes(rows.tobytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_2.bin is truncated or damaged"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize("kind", ["python", "binary"])
def test_cifar100(tmp_path, kind):
    train, test = batch100(1, 6), batch100(2, 3)
    for name, content in (("train", train), ("test", test)):
        if kind == "python":
            (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
        else:
            labels = np.array([content[b"coarse_labels"], content[b"fine_labels"]], np.uint8).T
            (tmp_path / f"{name}.bin").write_bytes(np.concatenate([labels, content[b"data"]], axis=1).tobytes())
    found = read_cifar100(tmp_path)
    assert found.y.tolist() == train[b"fine_labels"] + test[b"fine_labels"]
    assert found.coarse.tolist() == train[b"coarse_labels"] + test[b"coarse_labels"]
    assert found.is_train.tolist() == [True] * 6 + [False] * 3
    assert np.array_equal(found.x[6:].reshape(3, -1), test[b"data"])


def test_the_pickles_of_python_2():
    data = python2_pickle(3)
    batch = read_pickled_batch(data, 10, "data_batch_1")
    assert batch.y.tolist() == [0, 1, 2]
    assert batch.x.reshape(-1)[:5].tolist() == [0, 1, 2, 3, 4]
    assert load_plain(data).keys() == pickle.loads(data, encoding="bytes").keys()
    assert load_plain(data)[b"filenames"] == [b"a.png", b"a.png"]


def test_arrays_stored_by_column():
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    assert np.array_equal(load_plain(pickle.dumps(array, protocol=2)), array)


class Evil:
    """Leaves a file behind when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_an_evil_pickle_is_refused_and_not_run(folder10, tmp_path):
    trace = tmp_path / "trace"
    evil = pickle.dumps(batch10(0) | {b"extra": Evil(trace)}, protocol=2)
    (folder10 / "data_batch_3").write_bytes(evil)
    with pytest.raises(DataError, match=r"data_batch_3 is not a readable CIFAR pickle: it names 'posix system'"):
        read_cifar10(folder10)
    assert not trace.exists()
    pickle.loads(evil)  # it would have run
    assert trace.exists()


_DTYPE = b"cnumpy\ndtype\n(U\x02%sK\x00K\x01tR"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"\x80\x02}",
        b"\x80\x02.",
        b"\x80\x02](K\x01",
        b"\x80\x02K\x01K\x02.",
        b"\x80\x02h\x05.",
        b"\x80\x02\x86.",
        b"\x80\x02(.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02}K\x01s.",
        b"\x80\x02})K\x02s.",
        b"\x80\x02K\x01)R.",
        b"\x80\x02K\x01)b.",
        b"\x80\x02cnumpy\nndarray\n.",
        b"\x80\x02cnumpy\nndarray\n)R.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR.",
        b"\x80\x02" + _DTYPE % b"O8" + b".",
        b"\x80\x02" + _DTYPE % b"u1" + b".",
        b"\x80\x02" + _DTYPE % b"u1" + b"(K\x03U\x01?tb.",
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.",
        b"(dp0\nS'labels'\np1\n(lp2\ns.",
        pickle.dumps([1.5], protocol=2),
        pickle.dumps(np.array([None]), protocol=2),
        pickle.dumps(np.zeros(3, np.uint8), protocol=2).replace(b"K\x03\x85", b"K\x04\x85"),
        pickle.dumps(print, protocol=4),
    ],
)
def test_other_pickles_are_refused(data):
    with pytest.raises(RefusedPickle):
        load_plain(data)


def test_deeply_nested_keys_are_refused():
    with pytest.raises(RefusedPickle, match="keys"):
        load_plain(b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"labels": [0, 1, 2]}, "4 images but labels of shape"),
        ({b"labels": [0, 1, 2, 10]}, "label 10, which is not one of the 10 classes"),
        ({b"labels": b"abcd"}, "'labels' as bytes"),
        ({b"data": np.zeros((4, 3), np.uint8)}, "not rows of 3072 bytes"),
    ],
)
def test_wrong_contents_are_refused(change, message):
    with pytest.raises(DataError, match=message):
        read_pickled_batch(pickle.dumps(batch10(0) | change, protocol=2), 10, "data_batch_1")


def test_missing_files_are_named(folder10, tmp_path):
    with pytest.raises(DataError, match="has no 'fine_labels'"):
        read_pickled_batch(pickle.dumps(batch10(0), protocol=2), 100, "train")
    with pytest.raises(DataError, match="instead of a dict"):
        read_pickled_batch(pickle.dumps([1], protocol=2), 10, "data_batch_1")
    (folder10 / "data_batch_4").unlink()
    with pytest.raises(DataError, match="has no file data_batch_4"):
        read_cifar10(folder10)
    with pytest.raises(DataError, match="has no file train"):
        read_cifar100(folder10)
    with pytest.raises(DataError, match="There is no CIFAR folder"):
        read_cifar10(tmp_path / "nothing")


def test_an_archive_with_a_giant_file_is_refused(tmp_path):
    info = tarfile.TarInfo("train")
    info.size = 2 << 30
    (tmp_path / "cifar.tar").write_bytes(info.tobuf() + bytes(2048))
    with pytest.raises(DataError, match="too large for CIFAR"):
        read_cifar100(tmp_path / "cifar.tar")
