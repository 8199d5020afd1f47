"""`coterie data fetch`: the only code that uses the network.

Datasets come from Hugging Face through its package `datasets` (the optional extra `data`), whose cache resumes
interrupted downloads. Each becomes one `NAME.npz` with a checksum file, the format that `sources/` reads first.
The file is written under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import source_class
from coterie.data.home import data_folder
from coterie.data.readers._images import pixels_of
from coterie.data.readers.idx import read_pair
from coterie.data.sources.emnist import Emnist
from coterie.data.sources.leaf import CELEBA_SIZE
from coterie.data.sources.npz import count_samples
from coterie.data.sources.sign import Sign
from coterie.data.sources.stored import StoredSource, checksum, checksum_path, verify
from coterie.errors import DataError, MissingExtra, StorageError, UnknownName

_ORIGINALS = "put the original files in the data folder instead"
_BATCH = 1_000  # images decoded at a time
Progress = Callable[[int, int], None]  # images done, total images


@dataclass(frozen=True)
class Recipe:
    """A dataset on the hub: its repository and the columns to read."""

    repository: str
    config: str | None = None
    image: str = "image"
    label: str = "label"
    user: str | None = None
    splits: tuple[str, ...] = ("train", "test")
    has_split: bool = True  # whether train and test are an official split
    channels: int = 1
    size: int | None = None  # side to resize images to; None: keep their size
    min_images: int = 1  # users with fewer images are left out


@dataclass(frozen=True)
class IdxRecipe:
    """EMNIST's idx files in a repository on the hub."""

    repository: str
    source: Emnist


RECIPES: dict[str, Recipe | IdxRecipe] = {
    "mnist": Recipe("ylecun/mnist"),
    "fashion-mnist": Recipe("zalando-datasets/fashion_mnist"),
    "cifar10": Recipe("uoft-cs/cifar10", image="img", channels=3),
    "cifar100": Recipe("uoft-cs/cifar100", image="img", label="fine_label", channels=3),
    "svhn": Recipe("ufldl-stanford/svhn", config="cropped_digits", channels=3),
    "usps": Recipe("flwrlabs/usps"),
    "femnist": Recipe("flwrlabs/femnist", label="character", user="writer_id", splits=("train",), has_split=False),
    # CelebA's official split is by person, so nobody would have both train and test images. LEAF leaves out people
    # with fewer than five images, and its network takes 84x84.
    "celeba": Recipe(
        "flwrlabs/celeba",
        config="img_align+identity+attr",
        label="Smiling",
        user="celeb_id",
        splits=("train", "valid", "test"),
        has_split=False,
        channels=3,
        size=CELEBA_SIZE,
        min_images=5,
    ),
    "emnist-byclass": IdxRecipe("Royc30ne/emnist-byclass", Emnist(split="byclass")),
    "emnist-balanced": IdxRecipe("Royc30ne/emnist-balanced", Emnist(split="balanced")),
    "emnist-letters": IdxRecipe("Royc30ne/emnist-letters", Emnist(split="letters")),
    "emnist-digits": IdxRecipe("Royc30ne/emnist-digits", Emnist(split="digits")),
}

_INSTEAD = {
    "sign": "sign is not on Hugging Face; run 'git clone https://github.com/ardamavi/Sign-Language-Digits-Dataset' "
    "in the data folder.",
    "emnist": "emnist has four splits; fetch emnist-byclass, emnist-balanced, emnist-letters or emnist-digits.",
    "digits-4": "digits-4 combines mnist, usps, svhn and sign; fetch each of the first three "
    "and run 'git clone https://github.com/ardamavi/Sign-Language-Digits-Dataset' in the data folder.",
}


def stored_sources() -> list[StoredSource]:
    """Every stored source; EMNIST once per split."""
    plain = [source_class(name)() for name, recipe in RECIPES.items() if isinstance(recipe, Recipe)]
    emnist = [recipe.source for recipe in RECIPES.values() if isinstance(recipe, IdxRecipe)]
    found = [source for source in (*plain, *emnist, Sign()) if isinstance(source, StoredSource)]
    return sorted(found, key=lambda source: source.stem)


class Fetched(NamedTuple):
    """The result of `fetch`."""

    name: str
    path: Path
    samples: int
    size: int  # bytes
    sha256: str | None  # None: there is no checksum file
    already: bool  # whether it existed before


class Batch(NamedTuple):
    """Some samples to be written."""

    x: NDArray[np.uint8]  # [n, H, W] or [n, 3, H, W]
    y: NDArray[np.int64]  # [n]
    is_train: bool | None
    user: NDArray[Any] | None  # [n]


def fetch(
    name: str, data_dir: Path | None = None, *, force: bool = False, progress: Progress = lambda done, total: None
) -> Fetched:
    """Download a dataset into the data folder, unless it exists; `force` replaces it."""
    if name in _INSTEAD:
        raise DataError(_INSTEAD[name])
    if name not in RECIPES:
        raise UnknownName("dataset to fetch named", name, RECIPES)
    folder = data_folder(data_dir)
    path = folder / f"{name}.npz"
    if path.exists() and not force:
        sha256 = verify(path, name)
        return Fetched(name, path, count_samples(path), path.stat().st_size, sha256, already=True)
    recipe = RECIPES[name]
    total, batches = _from_idx(recipe, name) if isinstance(recipe, IdxRecipe) else _from_hub(recipe, name)
    with _storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{path.name}.{os.getpid()}.partial"
    try:
        _write(partial, total, batches, progress)
        with _storage_errors(folder):
            sha256 = checksum(partial)
            # Removed first: after a crash, an old checksum would make the new file look damaged.
            checksum_path(path).unlink(missing_ok=True)
            partial.replace(path)
            checksum_path(path).write_text(f"{sha256}  {path.name}\n", encoding="utf-8")
    finally:
        partial.unlink(missing_ok=True)
    return Fetched(name, path, total, path.stat().st_size, sha256, already=False)


def _from_hub(recipe: Recipe, name: str) -> tuple[int, Iterator[Batch]]:
    """The number of samples, and the samples of all splits."""
    hub = _module("datasets", name)
    wanted = [column for column in (recipe.image, recipe.label, recipe.user) if column]
    parts = []
    for split in recipe.splits:
        with _hub_errors(name, recipe.repository):
            part = hub.load_dataset(recipe.repository, recipe.config, split=split)
        missing = [column for column in wanted if column not in part.column_names]
        if missing:
            raise DataError(
                f"{recipe.repository} has no column '{missing[0]}' (found: {', '.join(part.column_names)}), so it was "
                f"changed on the hub; {_ORIGINALS}."
            )
        parts.append(part.select_columns(wanted))
    kept = _kept(recipe, parts)
    return int(sum(flags.sum() for flags in kept)), _decoded(recipe, name, parts, kept)


def _kept(recipe: Recipe, parts: list[Any]) -> list[NDArray[np.bool_]]:
    """Flags of the samples to keep, by split: those of users with enough images."""
    if recipe.user is None or recipe.min_images == 1:
        return [np.ones(len(part), bool) for part in parts]
    users = [np.array(list(part[recipe.user])) for part in parts]
    _, index, counts = np.unique(np.concatenate(users), return_inverse=True, return_counts=True)
    enough = (counts >= recipe.min_images)[index.reshape(-1)]
    return np.split(enough, np.cumsum([len(part) for part in users])[:-1])


def _decoded(recipe: Recipe, name: str, parts: list[Any], kept: list[NDArray[np.bool_]]) -> Iterator[Batch]:
    for split, part, flags in zip(recipe.splits, parts, kept, strict=True):
        is_train = split == "train" if recipe.has_split else None
        start = 0
        rows = iter(part.iter(batch_size=_BATCH))
        while True:
            with _hub_errors(name, recipe.repository):  # images are decoded here
                raw = next(rows, None)
                if raw is None:
                    break
                take = np.flatnonzero(flags[start : start + len(raw[recipe.label])])
                pixels = [_pixels(raw[recipe.image][row], recipe) for row in take]
            start += len(raw[recipe.label])
            if not pixels:
                continue
            if len({image.shape for image in pixels}) > 1:
                raise DataError(
                    f"{recipe.repository} has images of different sizes, so it was changed on the hub; {_ORIGINALS}."
                )
            y = np.array([int(raw[recipe.label][row]) for row in take], np.int64)
            user = None if recipe.user is None else np.array([raw[recipe.user][row] for row in take])
            yield Batch(np.stack(pixels), y, is_train, user)


def _pixels(image: Any, recipe: Recipe) -> NDArray[np.uint8]:
    """A Pillow image as [H, W] or [3, H, W]."""
    size = None if recipe.size is None else (recipe.size, recipe.size)
    pixels = pixels_of(image, grey=recipe.channels == 1, size=size)
    return pixels[0] if recipe.channels == 1 else pixels


def _from_idx(recipe: IdxRecipe, name: str) -> tuple[int, Iterator[Batch]]:
    """The number of samples, and the samples of EMNIST's idx files."""
    hub = _module("huggingface_hub", name)
    pairs = []
    for part in ("train", "test"):
        paths = []
        for file in recipe.source.idx_names(part):
            with _hub_errors(name, recipe.repository):
                paths.append(Path(hub.hf_hub_download(recipe.repository, f"{file}.gz", repo_type="dataset")))
        pairs.append(read_pair(paths[0], paths[1], transposed=recipe.source.transposed))
    data = recipe.source.from_pairs(pairs).validate()
    x, y, is_train = data.x[:, 0].numpy(), data.y.numpy(), data.is_train
    assert is_train is not None  # from_pairs sets it

    def batches() -> Iterator[Batch]:
        for flag in (True, False):  # train comes first
            rows = np.flatnonzero(is_train == flag)
            for start in range(0, len(rows), _BATCH):
                piece = slice(rows[start], rows[min(start + _BATCH, len(rows)) - 1] + 1)
                yield Batch(x[piece], y[piece], flag, None)

    return len(y), batches()


def _write(partial: Path, total: int, batches: Iterator[Batch], progress: Progress) -> None:
    """Write one .npz; images are written batch by batch to save memory."""
    y, is_train, user = [], [], []
    done = 0
    progress(done, total)
    with _storage_errors(partial.parent), zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo("x.npy"), "w", force_zip64=True) as stream:
            shape: tuple[int, ...] = ()
            for batch in batches:
                if not done:
                    shape = batch.x.shape[1:]
                    header = {"descr": "|u1", "fortran_order": False, "shape": (total, *shape)}
                    np.lib.format.write_array_header_1_0(stream, header)
                if batch.x.shape[1:] != shape:
                    raise DataError(f"The hub sent images of different sizes; {_ORIGINALS}.")
                stream.write(np.ascontiguousarray(batch.x).data)
                y.append(batch.y)
                is_train.append(None if batch.is_train is None else np.full(len(batch.y), batch.is_train))
                user.append(batch.user)
                done += len(batch.y)
                progress(done, total)
        if done != total or not done:
            raise DataError(f"The hub sent {done:,} of {total:,} images; nothing was saved, so try again.")
        columns: dict[str, list[Any]] = {"y": y, "is_train": is_train, "user": user}
        for column, pieces in columns.items():
            found = [piece for piece in pieces if piece is not None]
            if found:
                with archive.open(zipfile.ZipInfo(f"{column}.npy"), "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, np.concatenate(found), allow_pickle=False)
    with _storage_errors(partial.parent), partial.open("rb") as written:
        os.fsync(written.fileno())


def _module(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(f"Fetching {name}", "data") from error


@contextlib.contextmanager
def _hub_errors(name: str, repository: str) -> Iterator[None]:
    """Turn any error of the hub's packages, which raise many types, into a DataError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{name} could not be fetched from huggingface.co/datasets/{repository} ({reason}); "
            "nothing was changed, so try again: the download resumes from the hub's cache."
        ) from error


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"The data could not be written to {folder} ({error}); nothing was changed.") from error
