"""The stored sources: original, npz and fetched give the same dataset; invalid files are refused."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.data.dataset import Dataset, source_class
from coterie.data.fetch import RECIPES, fetch
from coterie.data.home import data_folder
from coterie.data.sources.emnist import Emnist
from coterie.data.sources.leaf import CelebA, Femnist
from coterie.data.sources.mnist import FashionMnist, Mnist
from coterie.data.sources.sign import Sign
from coterie.data.sources.stored import fixed_split, resize
from coterie.errors import ConfigError, DataError
from coterie.randomness import Rng
from coterie.settings import build

from .originals import CASES, IS_TRAIN, TEST, TRAIN, Case, idx_bytes, labels, leaf_file, pictures

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def load(source, folder: Path) -> Dataset:
    return source.load(None, Rng.seed(0), folder)


def assert_same(one: Dataset, other: Dataset) -> None:
    for field in dataclasses.fields(Dataset):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), field.name
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b, field.name


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("no source may use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@every_case
def test_npz_and_original_are_the_same(case: Case, tmp_path: Path):
    for form in ("npz", "original"):
        (tmp_path / form).mkdir()
    case.write_npz(tmp_path / "npz")
    case.write(tmp_path / "original")
    packed, original = load(case.source, tmp_path / "npz"), load(case.source, tmp_path / "original")
    assert_same(packed, original)
    assert packed.name == case.name
    assert packed.x.dtype == torch.uint8
    assert packed.x.is_contiguous()
    assert packed.x.ndim == 4
    assert (packed.mean, packed.std) == (127.5, 127.5)
    assert packed.num_classes == case.source.num_classes
    assert packed.y.tolist() == case.arrays["y"].tolist()


@every_case
def test_fetched_data_is_the_same(case: Case, tmp_path: Path, hub):
    if case.name not in RECIPES:
        pytest.skip("not on the hub")
    for form in ("npz", "fetched"):
        (tmp_path / form).mkdir()
    case.write_npz(tmp_path / "npz")
    fetch(case.name, tmp_path / "fetched")
    assert_same(load(case.source, tmp_path / "npz"), load(case.source, tmp_path / "fetched"))


@every_case
def test_sources_are_registered_under_their_keys(case: Case, tmp_path: Path):
    assert source_class(case.source.key) is type(case.source)
    assert case.source.find(tmp_path) is None
    path = case.write_npz(tmp_path)
    found = case.source.find(tmp_path)
    assert found is not None
    assert (found.form, found.path, found.size) == ("npz", path, path.stat().st_size)


@every_case
def test_nothing_there(case: Case, tmp_path: Path):
    with pytest.raises(DataError) as caught:
        load(case.source, tmp_path)
    said = str(caught.value)
    assert f"There is no {case.name} in {tmp_path} (expected {case.name}.npz or " in said
    assert "\n" not in said
    if case.name in RECIPES:
        assert f"'coterie data fetch {case.name}'" in said
    else:
        assert "git clone" in said


@every_case
def test_a_file_cut_short(case: Case, tmp_path: Path):
    path = case.write_npz(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"is not a readable \.npz file"):
        load(case.source, tmp_path)


@every_case
def test_originals_cut_short_or_without_a_part(case: Case, tmp_path: Path):
    case.write(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for path in (files[0], files[-1]):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=str(path.name)):
            load(case.source, tmp_path)
        path.write_bytes(content)
    if len(files) == 1 or case.name == "sign":  # the number of images is not fixed
        return
    files[0].unlink()
    with pytest.raises(DataError):
        load(case.source, tmp_path)


def test_the_checksum_beside_a_file(tmp_path: Path):
    case = CASES["usps"]
    path = case.write_npz(tmp_path)
    sidecar = tmp_path / "usps.npz.sha256"
    sidecar.write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest().upper()}  usps.npz\n")
    assert len(load(case.source, tmp_path)) == TRAIN + TEST
    case.write_npz(tmp_path, y=labels(9))
    with pytest.raises(DataError, match=r"usps\.npz does not match the checksum .* 'coterie data fetch usps --force'"):
        load(case.source, tmp_path)
    sidecar.write_text("")
    with pytest.raises(DataError, match="does not match the checksum"):
        load(case.source, tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"y": None}, "has no array 'y'"),
        ({"y": labels(11)}, "labels must be less than the number of classes, 10. Got 10 instead."),
        ({"y": labels(10) * 0.5}, "y must contain integer classes"),
        ({"y": labels(10, 3)}, "17 samples but 3 labels"),
        ({"x": np.ones((17, 4))}, "x must be uint8 images"),
        ({"x": np.ones((17, 4), np.uint8)}, "Got uint8 of shape [17, 4] instead."),
    ],
)
def test_a_bad_file_gives_one_sentence(tmp_path: Path, changes, sentence: str):
    CASES["usps"].write_npz(tmp_path, **changes)
    with pytest.raises(DataError) as caught:
        load(CASES["usps"].source, tmp_path)
    assert sentence in str(caught.value)


def test_classes_are_those_of_the_whole_dataset(tmp_path: Path):
    CASES["cifar100"].write_npz(tmp_path, y=np.zeros(17, int))
    assert load(CASES["cifar100"].source, tmp_path).num_classes == 100


def test_the_npz_comes_first(tmp_path: Path):
    case = CASES["usps"]
    case.write(tmp_path)
    case.write_npz(tmp_path, y=np.zeros(17, int))
    assert load(case.source, tmp_path).y.sum() == 0


def test_the_data_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COTERIE_DATA", raising=False)
    assert data_folder() == tmp_path / ".cache" / "coterie"
    monkeypatch.setenv("COTERIE_DATA", "~/mine")
    assert data_folder(None) == tmp_path / "mine"
    assert data_folder(Path("there")) == Path("there")
    (tmp_path / "mine").mkdir()
    CASES["usps"].write_npz(tmp_path / "mine")
    assert len(CASES["usps"].source.load(None, Rng.seed(0), None)) == 17


def write_qmnist(folder: Path, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """QMNIST's labels; its test file has more than MNIST's digits. Returns writers and series."""
    folder.mkdir(exist_ok=True)
    writers, series = (np.arange(17) * 3) % 7 + 100, (np.arange(17) % 2) * 4
    table = np.zeros((17, 8), np.int32)
    table[:, 0], table[:, 1], table[:, 2] = y, series, writers
    more = np.full((4, 8), 9, np.int32)
    for name, part in (("train", table[IS_TRAIN]), ("test", np.concatenate([table[~IS_TRAIN], more]))):
        (folder / f"qmnist-{name}-labels-idx2-int.gz").write_bytes(gzip.compress(idx_bytes(part)))
    return writers, series


@pytest.mark.parametrize("form", ["npz", "original"])
def test_writers_of_mnist_from_qmnist(tmp_path: Path, form: str):
    case = CASES["mnist"]
    case.write_npz(tmp_path) if form == "npz" else case.write(tmp_path)
    assert load(Mnist(), tmp_path).user is None
    writers, series = write_qmnist(tmp_path / "qmnist", labels(10))
    data = load(Mnist(), tmp_path)
    assert data.user_names == tuple(str(name) for name in range(100, 107))
    assert [int(data.user_names[i]) for i in data.user] == writers.tolist()
    assert data.group.tolist() == (series // 4).tolist()
    # A file that has the columns itself, as population and user, says the same.
    (tmp_path / "own").mkdir()
    case.write_npz(tmp_path / "own", user=writers.astype(np.int16), population=series.astype(np.uint8))
    assert_same(load(Mnist(), tmp_path / "own"), data)


def test_qmnist_labels_of_other_digits_are_refused(tmp_path: Path):
    CASES["mnist"].write(tmp_path)
    write_qmnist(tmp_path / "qmnist", (labels(10) + 1) % 10)
    with pytest.raises(DataError, match="are not those of MNIST"):
        load(Mnist(), tmp_path)


def test_fashion_is_never_taken_for_digits(tmp_path: Path):
    """Their files have the same names."""
    CASES["mnist"].write(tmp_path)
    assert FashionMnist().find(tmp_path) is None
    assert FashionMnist().find(tmp_path / "mnist") is None
    assert Mnist().find(tmp_path / "mnist") is not None
    CASES["fashion-mnist"].write(tmp_path)
    fashion = tmp_path / "FashionMNIST" / "raw"
    assert FashionMnist().find(fashion) is not None
    assert Mnist().find(fashion) is None


def test_idx_files_spelled_with_a_point(tmp_path: Path):
    CASES["mnist"].write(tmp_path)
    for path in list((tmp_path / "mnist").iterdir()):
        plain = path.name.removesuffix(".gz").replace("-idx", ".idx")
        (tmp_path / plain).write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert len(load(Mnist(), tmp_path)) == 17


def test_labels_that_are_missing_are_named(tmp_path: Path):
    CASES["mnist"].write(tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"There is no idx file at .*t10k-labels-idx1-ubyte"):
        load(Mnist(), tmp_path)


def test_letters_of_emnist_count_from_one(tmp_path: Path):
    CASES["emnist-letters"].write(tmp_path)
    path = tmp_path / "emnist-letters-train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros(TRAIN, np.uint8))))
    with pytest.raises(DataError, match=r"has the label 0, but its letters are 1 \.\.\. 26"):
        load(Emnist(split="letters"), tmp_path)


def test_a_division_that_emnist_does_not_have():
    with pytest.raises(ConfigError, match="split of Emnist must be 'byclass', 'balanced', 'letters' or 'digits'"):
        build(Emnist, {"split": "bymerge"}, "source")


def test_cifar_as_an_archive(tmp_path: Path):
    import tarfile

    case = CASES["cifar10"]
    case.write(tmp_path)
    whole = load(case.source, tmp_path)
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")
    assert_same(load(case.source, tmp_path / "packed"), whole)


def test_leaf_with_its_fixed_split(tmp_path: Path):
    x = (pictures((784,), rows=1) / 255).tolist()
    for part, name in (("train", "f1"), ("test", "f0")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.json").write_text(leaf_file({name: (x, [3])}))
    data = load(Femnist(), tmp_path)
    assert data.is_train.tolist() == [True, False]
    assert data.user_names == ("f0", "f1")
    assert data.user.tolist() == [1, 0]


def test_json_of_something_else_is_no_femnist(tmp_path: Path):
    (tmp_path / "notes.json").write_text("{}")
    assert Femnist().find(tmp_path) is None


def test_the_size_of_faces(tmp_path: Path):
    CASES["celeba"].write(tmp_path)
    assert load(CelebA(), tmp_path).input_shape == (3, 84, 84)
    small = load(CelebA(size=32), tmp_path)
    assert small.input_shape == (3, 32, 32)
    (tmp_path / "npz").mkdir()
    CASES["celeba"].write_npz(tmp_path / "npz")
    again = load(CelebA(size=32), tmp_path / "npz")  # from 84, so not to the last bit
    assert (again.x.int() - small.x.int()).abs().max() <= 12
    assert (again.x.float() - small.x.float()).abs().mean() < 1.5


def test_faces_without_images(tmp_path: Path):
    place = tmp_path / "celeba" / "all_data"
    place.mkdir(parents=True)
    (place / "a.json").write_text(leaf_file({"4": (["1.jpg"], [0])}))
    with pytest.raises(DataError, match="json files but not the images"):
        load(CelebA(), tmp_path)
    assert Femnist().find(tmp_path) is None


def test_sign_in_its_other_forms(tmp_path: Path):
    CASES["sign"].write(tmp_path)
    whole = load(Sign(), tmp_path)
    assert whole.is_train.sum() == 30  # ceil(0.8 x 3) of each class
    listed = tmp_path / "listed" / "sign"
    listed.mkdir(parents=True)
    lines = ["file,label,is_train"]
    for path in sorted((tmp_path / "sign" / "Dataset").rglob("*.JPG")):
        (listed / path.name).write_bytes(path.read_bytes())
        lines.append(f"{path.name},{path.parent.name},{'no' if path.name == 'IMG_0004.JPG' else 'yes'}")
    (listed / "all.csv").write_text("\n".join(lines))
    data = load(Sign(), tmp_path / "listed")
    assert torch.equal(data.x, whole.x)
    assert np.flatnonzero(~data.is_train).tolist() == [4]
    (tmp_path / "sign" / "Dataset" / "7").rename(tmp_path / "sign" / "Dataset" / "seven")
    with pytest.raises(DataError, match="has no folder '7'"):
        load(Sign(), tmp_path)


def test_a_split_of_our_own_is_fixed_and_by_class():
    y = torch.tensor([0] * 10 + [1] * 5)
    flags = fixed_split("sign", y)
    assert flags[:10].sum() == 8
    assert flags[10:].sum() == 4
    np.testing.assert_array_equal(flags, fixed_split("sign", y))


def test_resizing_by_slabs(monkeypatch):
    x = torch.from_numpy(pictures((3, 8, 8)))
    whole = resize(x, 4)
    monkeypatch.setattr("coterie.data.sources.stored._SLAB", 500)
    assert torch.equal(resize(x, 4), whole)
    assert resize(x, 8) is x
    grey = resize(x, 8, grey=True)
    assert grey.shape == (17, 1, 8, 8)
    r, g, b = x[3, :, 5, 2].tolist()
    assert abs(int(grey[3, 0, 5, 2]) - (0.299 * r + 0.587 * g + 0.114 * b)) <= 0.5
    plain = torch.full((2, 1, 16, 16), 200, dtype=torch.uint8)
    assert set(resize(plain, 28, grey=True).reshape(-1).tolist()) == {200}
