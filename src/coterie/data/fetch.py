"""`coterie data fetch`: the one place that goes to the network, and only when the user types it.

Data comes from Hugging Face through its package `datasets` (the optional extra `data`), whose own cache resumes
what was interrupted. It becomes one `NAME.npz` with its checksum beside it, the form that the sources in
`datasets/` read first. The file is written under a temporary name and renamed when it is complete.
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

from coterie.data.readers.idx import read_pair
from coterie.data.sources.emnist import Emnist
from coterie.data.sources.leaf import CELEBA_SIZE
from coterie.data.sources.npz import count_samples
from coterie.data.sources.stored import checksum, checksum_path, data_folder, verify
from coterie.errors import DataError, MissingExtra, StorageError, UnknownName

_BATCH = 1_000  # pictures decoded at a time
Progress = Callable[[int, int], None]  # pictures done, pictures in all


@dataclass(frozen=True)
class Recipe:
    """A dataset on the hub: its repository, and which of its columns are ours."""

    repository: str
    config: str | None = None
    image: str = "image"
    label: str = "label"
    user: str | None = None
    splits: tuple[str, ...] = ("train", "test")
    has_split: bool = True  # whether 'train' and 'test' are an official split of the samples
    channels: int = 1
    size: int | None = None  # side that the pictures are brought to; None: as they are
    least: int = 1  # users with fewer pictures are left out


@dataclass(frozen=True)
class IdxRecipe:
    """EMNIST's own idx files, kept in a repository of the hub as they are."""

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
    # CelebA's own split is by person, so that nobody would have both train and test pictures; LEAF leaves out
    # people with fewer than five pictures, and its network takes 84x84.
    "celeba": Recipe(
        "flwrlabs/celeba",
        config="img_align+identity+attr",
        label="Smiling",
        user="celeb_id",
        splits=("train", "valid", "test"),
        has_split=False,
        channels=3,
        size=CELEBA_SIZE,
        least=5,
    ),
    "emnist-byclass": IdxRecipe("Royc30ne/emnist-byclass", Emnist(split="byclass")),
    "emnist-balanced": IdxRecipe("Royc30ne/emnist-balanced", Emnist(split="balanced")),
    "emnist-letters": IdxRecipe("Royc30ne/emnist-letters", Emnist(split="letters")),
    "emnist-digits": IdxRecipe("Royc30ne/emnist-digits", Emnist(split="digits")),
}

_INSTEAD = {
    "sign": "sign is not on Hugging Face; 'git clone https://github.com/ardamavi/Sign-Language-Digits-Dataset' "
    "in the data folder instead.",
    "emnist": "emnist has four parts; fetch emnist-byclass, emnist-balanced, emnist-letters or emnist-digits.",
    "digits-4": "digits-4 is made of mnist, usps, svhn and sign; fetch each of the first three "
    "and 'git clone https://github.com/ardamavi/Sign-Language-Digits-Dataset' in the data folder.",
}


class Fetched(NamedTuple):
    """What lies in the data folder now."""

    name: str
    path: Path
    samples: int
    size: int  # bytes
    sha256: str | None  # None: a file of the user's own, without a checksum
    already: bool  # it was there before


class Batch(NamedTuple):
    """Some samples on their way to the file."""

    x: NDArray[np.uint8]  # [n, H, W] or [n, 3, H, W]
    y: NDArray[np.int64]  # [n]
    is_train: bool | None
    user: NDArray[Any] | None  # [n]


def fetch(
    name: str, data_dir: Path | None = None, *, force: bool = False, progress: Progress = lambda done, total: None
) -> Fetched:
    """Bring a dataset into the data folder, unless it is there already; `force` replaces it."""
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
    with _refused(folder):
        folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{path.name}.{os.getpid()}.partial"
    try:
        _write(partial, total, batches, progress)
        with _refused(folder):
            sha256 = checksum(partial)
            # An old checksum beside a new file would call it damaged, should the power fail in between.
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
        with _unreachable(name, recipe.repository):
            part = hub.load_dataset(recipe.repository, recipe.config, split=split)
        missing = [column for column in wanted if column not in part.column_names]
        if missing:
            raise DataError(
                f"{recipe.repository} has no column '{missing[0]}' (found: {', '.join(part.column_names)}), so it was "
                "changed on the hub; put a copy in the original form in the data folder instead."
            )
        parts.append(part.select_columns(wanted))
    kept = _kept(recipe, parts)
    return int(sum(flags.sum() for flags in kept)), _decoded(recipe, name, parts, kept)


def _kept(recipe: Recipe, parts: list[Any]) -> list[NDArray[np.bool_]]:
    """Which samples of each split are taken: those of users with enough of them."""
    if recipe.user is None or recipe.least == 1:
        return [np.ones(len(part), bool) for part in parts]
    users = [np.array(list(part[recipe.user])) for part in parts]
    _, index, counts = np.unique(np.concatenate(users), return_inverse=True, return_counts=True)
    enough = (counts >= recipe.least)[index.reshape(-1)]
    return np.split(enough, np.cumsum([len(part) for part in users])[:-1])


def _decoded(recipe: Recipe, name: str, parts: list[Any], kept: list[NDArray[np.bool_]]) -> Iterator[Batch]:
    for split, part, flags in zip(recipe.splits, parts, kept, strict=True):
        is_train = split == "train" if recipe.has_split else None
        start = 0
        rows = iter(part.iter(batch_size=_BATCH))
        while True:
            with _unreachable(name, recipe.repository):  # pictures are decoded here, damaged ones too
                raw = next(rows, None)
                if raw is None:
                    break
                take = np.flatnonzero(flags[start : start + len(raw[recipe.label])])
                pixels = [_pixels(raw[recipe.image][row], recipe) for row in take]
            start += len(raw[recipe.label])
            if not pixels:
                continue
            if len({picture.shape for picture in pixels}) > 1:
                raise DataError(f"{recipe.repository} has pictures of several sizes, so it was changed on the hub.")
            y = np.array([int(raw[recipe.label][row]) for row in take], np.int64)
            user = None if recipe.user is None else np.array([raw[recipe.user][row] for row in take])
            yield Batch(np.stack(pixels), y, is_train, user)


def _pixels(picture: Any, recipe: Recipe) -> NDArray[np.uint8]:
    """A Pillow picture as [H, W] or [3, H, W]."""
    shown = picture.convert("L" if recipe.channels == 1 else "RGB")
    if recipe.size is not None and shown.size != (recipe.size, recipe.size):
        shown = shown.resize((recipe.size, recipe.size), importlib.import_module("PIL.Image").Resampling.BILINEAR)
    pixels = np.asarray(shown, dtype=np.uint8)
    return pixels if recipe.channels == 1 else pixels.transpose(2, 0, 1)


def _from_idx(recipe: IdxRecipe, name: str) -> tuple[int, Iterator[Batch]]:
    """EMNIST's idx files from the hub's cache, read as a user's own copy is."""
    hub = _module("huggingface_hub", name)
    pairs = []
    for part in ("train", "test"):
        paths = []
        for file in recipe.source.idx_names(part):
            with _unreachable(name, recipe.repository):
                paths.append(Path(hub.hf_hub_download(recipe.repository, f"{file}.gz", repo_type="dataset")))
        pairs.append(read_pair(paths[0], paths[1], transposed=recipe.source.transposed))
    data = recipe.source.of_pairs(*pairs).validate()
    x, y, is_train = data.x[:, 0].numpy(), data.y.numpy(), data.is_train
    assert is_train is not None  # of_pairs says which

    def batches() -> Iterator[Batch]:
        for flag in (True, False):  # train comes first
            rows = np.flatnonzero(is_train == flag)
            for start in range(0, len(rows), _BATCH):
                piece = slice(rows[start], rows[min(start + _BATCH, len(rows)) - 1] + 1)
                yield Batch(x[piece], y[piece], flag, None)

    return len(y), batches()


def _write(partial: Path, total: int, batches: Iterator[Batch], progress: Progress) -> None:
    """One .npz, its pictures written as they come: memory holds one batch of them."""
    y, is_train, user = [], [], []
    done = 0
    progress(done, total)
    with _refused(partial.parent), zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo("x.npy"), "w", force_zip64=True) as stream:
            shape: tuple[int, ...] = ()
            for batch in batches:
                if not done:
                    shape = batch.x.shape[1:]
                    header = {"descr": "|u1", "fortran_order": False, "shape": (total, *shape)}
                    np.lib.format.write_array_header_1_0(stream, header)
                if batch.x.shape[1:] != shape:
                    raise DataError("The hub sent pictures of several sizes; nothing was kept.")
                stream.write(np.ascontiguousarray(batch.x).data)
                y.append(batch.y)
                is_train.append(None if batch.is_train is None else np.full(len(batch.y), batch.is_train))
                user.append(batch.user)
                done += len(batch.y)
                progress(done, total)
        if done != total or not done:
            raise DataError(f"The hub sent {done:,} of {total:,} pictures; nothing was kept, so try again.")
        columns: dict[str, list[Any]] = {"y": y, "is_train": is_train, "user": user}
        for column, pieces in columns.items():
            found = [piece for piece in pieces if piece is not None]
            if found:
                with archive.open(zipfile.ZipInfo(f"{column}.npy"), "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, np.concatenate(found), allow_pickle=False)
    with _refused(partial.parent), partial.open("rb") as written:
        os.fsync(written.fileno())


def _module(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(f"Fetching {name}", "data") from error


@contextlib.contextmanager
def _unreachable(name: str, repository: str) -> Iterator[None]:
    """Whatever the hub's packages raise, as one sentence: they raise their own errors and those of five libraries."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{name} could not be fetched from huggingface.co/datasets/{repository} ({said}); "
            "nothing was changed, so try again: what had arrived is kept in the hub's cache."
        ) from error


@contextlib.contextmanager
def _refused(folder: Path) -> Iterator[None]:
    """A disk that is full or says no."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{folder} did not take the data ({error}); nothing there was changed.") from error
