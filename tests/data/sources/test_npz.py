"""The user's own .npz file, and one-sentence errors."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch

from coterie.data.dataset import find_preset
from coterie.data.scenario import Scenario
from coterie.data.sources.npz import NpzFile, read_npz
from coterie.errors import DataError
from coterie.randomness import Rng


@pytest.fixture
def save(tmp_path):
    def write(**arrays):
        path = tmp_path / "own.npz"
        np.savez(path, **arrays)
        return path

    return write


def load(path):
    return NpzFile(path=str(path)).load(None, Rng.seed(0), None)


def test_tabular_data_with_classes(save):
    x = np.arange(12.0).reshape(4, 3)
    data = load(save(x=x, y=np.array([0, 2, 1, 2], dtype=np.int32)))
    assert data.name == "own"
    assert data.x.dtype == torch.float32
    np.testing.assert_array_equal(data.x.numpy(), x)
    assert data.y.tolist() == [0, 2, 1, 2]
    assert data.y.dtype == torch.int64
    assert data.num_classes == 3
    assert (data.mean, data.std) == (0.0, 1.0)
    assert data.user is None
    assert data.is_train is None


def test_float_targets_are_a_regression(save):
    data = load(save(x=np.ones((3, 2)), y=np.array([0.5, -1.0, 2.0])))
    assert data.num_classes == 0
    assert data.y.dtype == torch.float32


def test_truth_values_are_two_classes(save):
    data = load(save(x=np.ones((3, 2)), y=np.array([True, False, True])))
    assert data.num_classes == 2
    assert data.y.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 8, 9), (1, 8, 9)),
        ((5, 8, 9, 3), (3, 8, 9)),
        ((5, 8, 9, 1), (1, 8, 9)),
        ((5, 3, 8, 9), (3, 8, 9)),
        ((5, 1, 8, 3), (1, 8, 3)),
        ((5, 7), (7,)),
    ],
)
def test_images_become_channels_first(save, shape, expected):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = load(save(x=pixels, y=np.arange(5)))
    assert data.input_shape == expected
    assert data.x.dtype == torch.uint8
    assert (data.mean, data.std) == (127.5, 127.5)


def test_a_pixel_keeps_its_place_and_color(save):
    pixels = np.zeros((2, 4, 5, 3), dtype=np.uint8)
    pixels[1, 2, 3, 0] = 200
    data = load(save(x=pixels, y=np.array([0, 1])))
    assert int(data.x[1, 0, 2, 3]) == 200
    assert int(data.x.sum(dtype=torch.int64)) == 200


def test_users_groups_and_split(save):
    data = load(
        save(
            x=np.ones((4, 2)),
            y=np.array([0, 1, 0, 1]),
            user=np.array(["zoe", "adam", "zoe", "adam"]),
            group=np.array([10, 20, 10, 20]),
            is_train=np.array([1, 1, 0, 0]),
        )
    )
    assert data.user_names == ("adam", "zoe")
    assert data.user.tolist() == [1, 0, 1, 0]
    assert data.group.tolist() == [0, 1, 0, 1]
    assert data.is_train.tolist() == [True, True, False, False]
    assert data.is_train.dtype == bool


def test_users_may_be_numbers(save):
    data = load(save(x=np.ones((3, 2)), y=np.zeros(3, dtype=int), user=np.array([7, 3, 7])))
    assert data.user_names == ("3", "7")


def test_a_file_with_users_goes_by_user_and_one_without_is_distributed(save):
    arrays = {"x": np.ones((3, 2)), "y": np.zeros(3, dtype=int)}
    plain = find_preset(str(save(**arrays)))
    assert (plain.scenario, plain.clients) == ("iid", 10)
    users = find_preset(str(save(**arrays, user=np.arange(3))))
    assert (users.scenario, users.clients) == ("by_user", None)
    assert users.source_settings == {"path": users.name}


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"x": np.ones((2, 2))}, "has no array 'y' (found: x); save x and y with numpy.savez."),
        ({"z": np.ones(2)}, "has no array 'x' (found: z); save x and y with numpy.savez."),
        (
            {"x": np.ones(3), "y": np.arange(3)},
            "with at least two axes. Got (3,) instead.",
        ),
        ({"x": np.array([["a"], ["b"]]), "y": np.arange(2)}, "x must contain numbers. Got <U1 instead."),
        (
            {"x": np.ones((2, 2)), "y": np.array([1j, 2j])},
            "in 'y.npy' it holds values of type complex128.",
        ),
        ({"x": np.ones((2, 2)), "y": np.ones((2, 2), dtype=int)}, "y must have one class per sample. Got shape (2, 2)"),
        ({"x": np.ones((2, 2)), "y": np.array([0.5, np.nan])}, "y has NaN or infinite values"),
        ({"x": np.array([[1.0], [np.inf]]), "y": np.arange(2)}, "x has NaN or infinite values"),
        ({"x": np.ones((2, 2)), "y": np.array([0, -1])}, "labels must be 0 or larger. Got -1 instead."),
        ({"x": np.ones((2, 2)), "y": np.arange(3)}, "2 samples but 3 labels."),
        ({"x": np.ones((2, 2)), "y": np.array(0.5)}, "y must have one label per sample. Got float64 without an axis"),
        ({"x": np.ones((0, 2)), "y": np.zeros(0, dtype=int)}, "has no samples."),
        ({"x": np.ones((2, 2)), "y": np.arange(2), "user": np.arange(3)}, "2 samples but 3 entries in 'user'."),
        (
            {"x": np.ones((2, 2)), "y": np.arange(2), "is_train": np.array([0.5, 1])},
            "is_train must contain booleans. Got float64 instead.",
        ),
        ({"x": np.ones((2, 2), dtype=object), "y": np.arange(2)}, "is damaged or contains Python objects"),
    ],
)
def test_a_bad_file_gives_one_sentence(save, arrays, sentence):
    with pytest.raises(DataError) as caught:
        load(save(**arrays))
    assert sentence in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="There is no file"):
        read_npz(tmp_path / "none.npz")


@pytest.mark.parametrize("content", [b"", b"hello, this is text", b"PK\x03\x04 cut short"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "own.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not a readable \.npz file"):
        read_npz(path)


def test_a_file_cut_short(save):
    path = save(x=np.ones((50, 2)), y=np.arange(50))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"is not a readable \.npz file"):
        read_npz(path)


def test_a_file_with_a_damaged_array(save):
    path = save(x=np.ones((500, 2)), y=np.arange(500))
    content = bytearray(path.read_bytes())
    content[2000:2100] = b"\x07" * 100  # inside x: the checksum of the archive notices
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        read_npz(path)


def test_a_single_array(tmp_path):
    path = tmp_path / "own.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match=r"is a single array; save x and y together with numpy\.savez\."):
        read_npz(path)


def test_a_folder(tmp_path):
    with pytest.raises(DataError, match=r"is not a readable \.npz file"):
        read_npz(tmp_path)


def test_words_say_which_samples_are_for_validation(save):
    words = np.array(["train", "valid", "test", "train", "valid", "test"])
    x = np.arange(6.0)[:, None]
    data = load(save(x=x, y=np.arange(6) % 2, user=np.repeat("a", 6), group=np.repeat("north", 6), split=words))
    assert (data.is_train.tolist(), data.is_valid.tolist()) == ((words != "test").tolist(), (words == "valid").tolist())
    assert data.group_names == ("north",)
    federation = Scenario.named("by_user", {}).partition(data, None, Rng.seed(0))
    found = {split: sorted(federation.samples(0, split)[0][:, 0].tolist()) for split in ("train", "valid", "test")}
    assert found == {"train": [0, 3], "valid": [1, 4], "test": [2, 5]}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"is_train": np.array(True)}, "is_train must have one entry per sample"),
        ({"is_train": np.ones((4, 1), bool)}, "is_train must have one entry per sample"),
        (
            {"split": np.array(["train", "dev", "test", "test"])},
            "has 'dev' in its column of splits; write train, valid",
        ),
        ({"split": np.array(["train"])}, "Got <U5 of shape .1,. for 4 samples instead"),
        ({"split": np.zeros(4)}, "split must be one word per sample: train, valid or test"),
        ({"split": np.full(4, "test"), "is_train": np.ones(4, bool)}, "has both is_train and split; keep one of them"),
        ({"user": np.array(3)}, "user and group must have one entry per sample"),
        ({"group": np.ones((4, 2))}, "user and group must have one entry per sample"),
        ({"user": np.array(["a", "b\ud800", "c", "d"])}, "has characters that are no text"),
        ({"y": np.array([0, 1, 2**28, 3])}, "y has the class number 268435456; use numbers below"),
        ({"y": np.array([0, 1, 2**63 + 5, 3], np.uint64)}, "y has the class number 9223372036854775813"),
    ],
)
def test_columns_of_another_form(save, more, said):
    arrays = {"x": np.zeros((4, 3)), "y": np.arange(4)} | more
    with pytest.raises(DataError, match=said):
        load(save(**arrays))


@pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY\x01\x00\x04\x00{}  "])
def test_members_that_are_no_arrays(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("x.npy", content)
        archive.writestr("y.npy", content)
    with pytest.raises(DataError, match=r"own\.npz is damaged or contains Python objects"):
        load(tmp_path / "own.npz")


def test_a_header_that_announces_more_than_there_is(tmp_path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        for name in ("x.npy", "y.npy"):
            archive.writestr(name, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(DataError, match="announces 8796093022208 bytes"):
        load(tmp_path / "own.npz")
