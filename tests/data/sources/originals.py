"""Small copies of the stored datasets: as .npz, in the form their authors gave them out, and on a hub.

The pictures, labels and users of one `Case` are the same in all three, so that the datasets must be too.
"""

from __future__ import annotations

import bz2
import gzip
import json
import pickle
import struct
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

from coterie.data.sources.cifar import Cifar10, Cifar100
from coterie.data.sources.emnist import Emnist
from coterie.data.sources.leaf import CelebA, Femnist
from coterie.data.sources.mnist import FashionMnist, Mnist
from coterie.data.sources.sign import Sign
from coterie.data.sources.stored import StoredSource
from coterie.data.sources.svhn import Svhn
from coterie.data.sources.usps import Usps

TRAIN, TEST = 12, 5
IS_TRAIN = np.repeat([True, False], [TRAIN, TEST])


@dataclass(frozen=True)
class Case:
    """One dataset in small."""

    source: StoredSource
    arrays: Mapping[str, np.ndarray]  # content of the .npz
    write: Callable[[Path], None]  # the original form, into the data folder
    hub: Mapping[str, list[dict[str, Any]]] | None = None  # split -> rows

    @property
    def name(self) -> str:
        return self.source.stem

    def write_npz(self, folder: Path, **changes: np.ndarray | None) -> Path:
        arrays = {key: value for key, value in (dict(self.arrays) | changes).items() if value is not None}
        np.savez_compressed(folder / f"{self.name}.npz", **arrays)
        return folder / f"{self.name}.npz"


def pictures(shape: tuple[int, ...], seed: int = 0, rows: int = TRAIN + TEST) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), dtype=np.uint8)


def labels(classes: int, rows: int = TRAIN + TEST) -> np.ndarray:
    return (np.arange(rows) * 7) % classes


def idx_bytes(array: np.ndarray) -> bytes:
    code = {"u1": 0x08, "i4": 0x0C}[array.dtype.str[1:]]
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx(place: Path, names: Mapping[str, tuple[str, str]], x: np.ndarray, y: np.ndarray) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", IS_TRAIN), ("test", ~IS_TRAIN)):
        images, classes = names[part]
        (place / f"{images}.gz").write_bytes(gzip.compress(idx_bytes(x[rows])))
        (place / f"{classes}.gz").write_bytes(gzip.compress(idx_bytes(y[rows].astype(np.uint8))))


def rows_of(image: str, label: str, x: np.ndarray, y: np.ndarray) -> dict[str, list[dict[str, Any]]]:
    rows = [{image: Image.fromarray(pixels), label: int(c), "more": "?"} for pixels, c in zip(x, y, strict=True)]
    return {"train": rows[:TRAIN], "test": rows[TRAIN:]}


def idx_case(source: Any, place: str) -> Case:
    x, y = pictures((28, 28)), labels(10)
    names = {part: source.idx_names(part) for part in ("train", "test")}
    return Case(
        source,
        {"x": x, "y": y.astype(np.uint8), "is_train": IS_TRAIN},
        lambda folder: write_idx(folder / place, names, x, y),
        rows_of("image", "label", x, y),
    )


def emnist_case(split: str, place: str) -> Case:
    source = Emnist(split=split)  # type: ignore[arg-type]
    x, y = pictures((28, 28), seed=1), labels(source.num_classes)
    in_file = y + 1 if split == "letters" else y
    names = {part: source.idx_names(part) for part in ("train", "test")}
    turned = np.ascontiguousarray(x.transpose(0, 2, 1))
    return Case(
        source,
        {"x": x, "y": y, "is_train": IS_TRAIN},
        lambda folder: write_idx(folder / place, names, turned, in_file),
    )


def cifar_case(source: Any, folder_name: str, names: Mapping[str, slice], label: str) -> Case:
    x, y = pictures((32, 32, 3), seed=2), labels(source.num_classes)

    def write(folder: Path) -> None:
        place = folder / folder_name
        place.mkdir(parents=True)
        for name, rows in names.items():
            content = {b"data": x[rows].transpose(0, 3, 1, 2).reshape(-1, 3072), label.encode(): y[rows].tolist()}
            if label != "labels":
                content[b"coarse_labels"] = (y[rows] % 20).tolist()
            (place / name).write_bytes(pickle.dumps(content, protocol=2))

    column = "label" if label == "labels" else "fine_label"
    return Case(source, {"x": x, "y": y, "is_train": IS_TRAIN}, write, rows_of("img", column, x, y))


def svhn_case() -> Case:
    x, y = pictures((32, 32, 3), seed=3), labels(10)

    def write(folder: Path) -> None:
        (folder / "svhn").mkdir()
        for name, rows in (("train", IS_TRAIN), ("test", ~IS_TRAIN)):
            content = {"X": x[rows].transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[rows, None]}
            savemat(folder / "svhn" / f"{name}_32x32.mat", content, do_compression=True)

    return Case(Svhn(), {"x": x, "y": y, "is_train": IS_TRAIN}, write, rows_of("image", "label", x, y))


def usps_case() -> Case:
    x, y = pictures((16, 16), seed=4), labels(10)

    def line(pixels: np.ndarray, label: int) -> str:
        values = pixels.reshape(-1) / 127.5 - 1
        return f"{label + 1} " + " ".join(f"{i}:{value}" for i, value in enumerate(values, start=1))

    def write(folder: Path) -> None:
        for name, rows in (("usps.bz2", IS_TRAIN), ("usps.t.bz2", ~IS_TRAIN)):
            text = "\n".join(line(pixels, c) for pixels, c in zip(x[rows], y[rows], strict=True))
            (folder / name).write_bytes(bz2.compress(text.encode() + b"\n"))

    return Case(Usps(), {"x": x, "y": y, "is_train": IS_TRAIN}, write, rows_of("image", "label", x, y))


def leaf_file(users: Mapping[str, tuple[list[Any], list[int]]]) -> str:
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    return json.dumps({"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data})


def femnist_case() -> Case:
    x, y = pictures((28, 28), seed=5), labels(62)
    writers = np.repeat(["f0010_02", "f0009_41", "f0200_07"], [6, 4, 7])

    def write(folder: Path) -> None:
        place = folder / "femnist" / "data" / "all_data"
        place.mkdir(parents=True)
        users = {}
        for name in dict.fromkeys(writers.tolist()):
            mine = writers == name
            users[name] = ((x[mine].reshape(-1, 784) / 255).tolist(), y[mine].tolist())
        (place / "all_data_0.json").write_text(leaf_file(users))

    hub = [
        {"image": Image.fromarray(pixels), "writer_id": str(writer), "hsf_id": 0, "character": int(label)}
        for pixels, writer, label in zip(x, writers, y, strict=True)
    ]
    return Case(Femnist(), {"x": x, "y": y, "user": writers}, write, {"train": hub})


def celeba_case() -> Case:
    people = np.repeat([17, 9, 120], [6, 6, 5])
    y = labels(2)
    # Smooth images: resized noise would be meaningless, and png stores these exactly.
    ramp = np.linspace(0, 200, 218 * 178).reshape(218, 178, 1)
    full = [(ramp + np.array([row, 2 * row, 3 * row])).astype(np.uint8) for row in range(len(y))]
    x = np.stack([np.asarray(Image.fromarray(p).resize((84, 84), Image.Resampling.BILINEAR)) for p in full])

    def write(folder: Path) -> None:
        place = folder / "celeba" / "data"
        (place / "raw" / "img_align_celeba").mkdir(parents=True)
        (place / "all_data").mkdir()
        for row, pixels in enumerate(full):
            Image.fromarray(pixels).save(place / "raw" / "img_align_celeba" / f"{row:06d}.jpg", format="PNG")
        users = {
            str(person): ([f"{row:06d}.jpg" for row in np.flatnonzero(people == person)], y[people == person].tolist())
            for person in dict.fromkeys(people.tolist())
        }
        (place / "all_data" / "all_data.json").write_text(leaf_file(users))

    rows = [
        {"image": Image.fromarray(full[row]), "celeb_id": int(people[row]), "Smiling": bool(y[row]), "Bald": False}
        for row in range(len(y))
    ]
    stranger = {"image": Image.fromarray(full[0]), "celeb_id": 5, "Smiling": True, "Bald": True}
    hub = {"train": [*rows[:8], stranger], "valid": [stranger, *rows[8:12]], "test": rows[12:]}
    return Case(CelebA(), {"x": x, "y": y, "user": people}, write, hub)


def sign_case() -> Case:
    y = np.repeat(np.arange(10), 3)
    full = np.repeat(pictures((1, 1), seed=6, rows=len(y)), 100, axis=1).repeat(100, axis=2)  # one shade each

    def write(folder: Path) -> None:
        for row, label in enumerate(y):
            place = folder / "sign" / "Dataset" / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(full[row]).convert("RGB").save(place / f"IMG_{row:04d}.JPG", format="PNG")

    return Case(Sign(), {"x": full[:, :28, :28], "y": y}, write)


BATCHES = {f"data_batch_{n}": slice(2 * n - 2, 2 * n) for n in range(1, 5)}
CIFAR10 = BATCHES | {"data_batch_5": slice(8, TRAIN), "test_batch": slice(TRAIN, None)}
CIFAR100 = {"train": slice(0, TRAIN), "test": slice(TRAIN, None)}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        idx_case(Mnist(), "mnist"),
        idx_case(FashionMnist(), "FashionMNIST/raw"),
        emnist_case("byclass", "emnist"),
        emnist_case("balanced", "EMNIST/raw"),
        emnist_case("letters", "."),
        emnist_case("digits", "gzip"),
        cifar_case(Cifar10(), "cifar-10-batches-py", CIFAR10, "labels"),
        cifar_case(Cifar100(), "cifar100", CIFAR100, "fine_labels"),
        svhn_case(),
        usps_case(),
        femnist_case(),
        celeba_case(),
        sign_case(),
    )
}


class HubDataset:
    """The part of a `datasets` dataset that is used."""

    def __init__(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        self.rows, self.column_names = rows, columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows]

    def select_columns(self, columns: list[str]) -> HubDataset:
        return HubDataset(self.rows, columns)

    def iter(self, batch_size: int) -> Any:
        for start in range(0, len(self.rows), batch_size):
            rows = self.rows[start : start + batch_size]
            yield {column: [row[column] for row in rows] for column in self.column_names}


def fake_hub(asked: list[Any]) -> dict[str, types.ModuleType]:
    """Stand-ins for the packages `datasets` and `huggingface_hub`, for the cases above; `asked` notes the calls."""
    from coterie.data.fetch import RECIPES, IdxRecipe

    by_repository = {recipe.repository: CASES[name] for name, recipe in RECIPES.items()}

    def load_dataset(repository: str, config: str | None = None, *, split: str) -> HubDataset:
        asked.append((repository, config, split))
        rows = (by_repository[repository].hub or {})[split]
        return HubDataset(rows, list(rows[0]))

    datasets = types.ModuleType("datasets")
    datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
    cache: dict[str, Path] = {}

    def hf_hub_download(repository: str, name: str, *, repo_type: str) -> str:
        asked.append((repository, name, repo_type))
        return str(cache[repository] / name)

    def fill(folder: Path) -> None:
        for name, recipe in RECIPES.items():
            if isinstance(recipe, IdxRecipe):
                CASES[name].write(folder)
                cache[recipe.repository] = next(folder.rglob(f"{name}-train-images*")).parent

    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = hf_hub_download  # type: ignore[attr-defined]
    hub.fill = fill  # type: ignore[attr-defined]
    return {"datasets": datasets, "huggingface_hub": hub}
