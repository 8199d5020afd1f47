"""Fetching, from a hub that stands in for the network: nothing half done is ever left where it would be used."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coterie.data import fetch as fetching
from coterie.data.fetch import RECIPES, fetch
from coterie.data.sources.npz import read_npz
from coterie.errors import DataError, MissingExtra, StorageError, UnknownName
from coterie.randomness import Rng
from tests.data.sources.conftest import hub  # noqa: F401
from tests.data.sources.originals import CASES

pytestmark = pytest.mark.usefixtures("hub")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_and_its_checksum(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    found = fetch("usps", tmp_path / "new" / "folder", progress=lambda done, total: seen.append((done, total)))
    assert found.path == tmp_path / "new" / "folder" / "usps.npz"
    assert names(found.path.parent) == ["usps.npz", "usps.npz.sha256"]
    assert found.sha256 == hashlib.sha256(found.path.read_bytes()).hexdigest()
    assert found.path.with_name("usps.npz.sha256").read_text() == f"{found.sha256}  usps.npz\n"
    assert (found.samples, found.size, found.already) == (17, found.path.stat().st_size, False)
    assert seen == [(0, 17), (12, 17), (17, 17)]


def test_the_same_bytes_every_time(tmp_path: Path):
    assert fetch("cifar10", tmp_path / "a").sha256 == fetch("cifar10", tmp_path / "b").sha256


def test_batches_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = [fetch(name, tmp_path / "a").sha256 for name in ("celeba", "emnist-letters", "femnist")]
    monkeypatch.setattr(fetching, "_BATCH", 3)
    assert [fetch(name, tmp_path / "b").sha256 for name in ("celeba", "emnist-letters", "femnist")] == whole


def test_numpy_reads_it_and_images_are_not_twice_in_memory(tmp_path: Path):
    with np.load(fetch("cifar10", tmp_path).path, allow_pickle=False) as arrays:
        assert arrays["x"].shape == (17, 3, 32, 32)  # channels first: read without turning
        assert arrays["x"].dtype == np.uint8
        assert arrays["is_train"].tolist() == [True] * 12 + [False] * 5


def test_requests_to_the_hub(tmp_path: Path, request: pytest.FixtureRequest):
    asked = request.getfixturevalue("hub")
    fetch("svhn", tmp_path)
    fetch("cifar100", tmp_path)
    fetch("emnist-digits", tmp_path)
    assert asked[:4] == [
        ("ufldl-stanford/svhn", "cropped_digits", "train"),
        ("ufldl-stanford/svhn", "cropped_digits", "test"),
        ("uoft-cs/cifar100", None, "train"),
        ("uoft-cs/cifar100", None, "test"),
    ]
    assert asked[4] == ("Royc30ne/emnist-digits", "emnist-digits-train-images-idx3-ubyte.gz", "dataset")
    assert len(asked) == 8


def test_people_with_few_images_are_left_out(tmp_path: Path):
    data = read_npz(fetch("celeba", tmp_path).path)
    assert data.user_names == ("9", "17", "120")
    assert len(data) == 17
    assert data.is_train is None


def test_already_there(tmp_path: Path, request: pytest.FixtureRequest):
    first = fetch("usps", tmp_path)
    request.getfixturevalue("hub").clear()
    again = fetch("usps", tmp_path)
    assert again == first._replace(already=True)
    assert request.getfixturevalue("hub") == []
    first.path.with_name("usps.npz.sha256").unlink()
    assert fetch("usps", tmp_path).sha256 is None


def test_existing_data_is_checked_and_force_replaces_it(tmp_path: Path):
    first = fetch("usps", tmp_path)
    first.path.write_bytes(first.path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"does not match the checksum .*--force"):
        fetch("usps", tmp_path)
    assert fetch("usps", tmp_path, force=True) == first


def test_a_damaged_file_without_a_checksum(tmp_path: Path):
    (tmp_path / "usps.npz").write_bytes(b"PK not really")
    with pytest.raises(DataError, match="is not a readable"):
        fetch("usps", tmp_path)


class Breaks:
    """An image that cannot be decoded."""

    def convert(self, mode: str) -> Any:
        raise OSError("image file is truncated")


def broken(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The hub breaks off in the second split, after the first was written."""
    rows = CASES["usps"].hub
    assert rows is not None
    picture = Breaks()
    monkeypatch.setattr(picture.__class__, "convert", lambda self, mode: (_ for _ in ()).throw(error))
    monkeypatch.setitem(rows["test"][2], "image", picture)  # type: ignore[arg-type]


def test_a_download_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        broken(patch, OSError("image file is truncated"))
        with pytest.raises(DataError, match=r"could not be fetched .*flwrlabs/usps \(image file is truncated\)"):
            fetch("usps", tmp_path)
    assert names(tmp_path) == []


def test_an_interrupted_download_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = fetch("usps", tmp_path)
    with monkeypatch.context() as patch:
        broken(patch, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            fetch("usps", tmp_path, force=True)
    assert names(tmp_path) == ["usps.npz", "usps.npz.sha256"]
    assert fetch("usps", tmp_path) == first._replace(already=True)


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach\n  the hub")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"\(Couldn't reach the hub\); nothing was changed, so try again"):
        fetch("mnist", tmp_path)


def test_columns_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = CASES["femnist"].hub
    assert rows is not None
    monkeypatch.delitem(rows["train"][0], "writer_id")
    with pytest.raises(DataError, match=r"has no column 'writer_id' \(found: image, hsf_id, character\)"):
        fetch("femnist", tmp_path)


@pytest.mark.parametrize("part", ["train", "test"])
def test_images_of_different_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str):
    rows = CASES["usps"].hub
    assert rows is not None
    for row in rows[part] if part == "test" else rows[part][:1]:
        monkeypatch.setitem(row, "image", Image.new("L", (3, 3)))
    with pytest.raises(DataError, match="images of different sizes"):
        fetch("usps", tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["mnist", "emnist-letters"])
def test_the_extra_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    for package in ("datasets", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"Fetching {name} requires .* 'coterie\[data\]'"):
        fetch(name, tmp_path)


def test_a_folder_that_cannot_be_created(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        fetch("usps", tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "said"),
    [("sign", "git clone"), ("emnist", "emnist-byclass, emnist-balanced"), ("digits-4", "mnist, usps, svhn and sign")],
)
def test_datasets_that_cannot_be_fetched(tmp_path: Path, name: str, said: str):
    with pytest.raises(DataError, match=said):
        fetch(name, tmp_path)


def test_an_unknown_name(tmp_path: Path):
    with pytest.raises(UnknownName, match="Did you mean 'mnist'"):
        fetch("mnits", tmp_path)


def test_every_recipe_has_a_source(tmp_path: Path):
    for name in RECIPES:
        fetch(name, tmp_path)
        CASES[name].source.load(None, Rng.seed(0), tmp_path)
