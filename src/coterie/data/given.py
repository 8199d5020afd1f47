"""The data of one client in the forms that users have it, as arrays.

    (x, y)                            numpy arrays, torch tensors, lists or pandas columns
    torch Dataset or DataLoader       of items (x, y); of a loader its dataset is taken, not its order
    pandas DataFrame                  the labels are a column, all other columns are features
    Hugging Face Dataset              the same
    {"train":, "valid":, "test":}     each one of the above; "train" is needed

None of these libraries is imported here: an object is known by what it offers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, TensorDataset

from coterie.data.columns import Columns, features_of, label_column
from coterie.data.values import array_of
from coterie.errors import DataError

_WANTED = (
    "(x, y) of arrays or tensors, a torch Dataset or DataLoader, a pandas DataFrame, a Hugging Face Dataset, "
    "or a dict of these with 'train' and maybe 'valid' and 'test'"
)
_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "test": "test"}


@dataclass(frozen=True)
class Samples:
    """Some samples of a client."""

    x: NDArray[Any]  # [n, ...]
    y: NDArray[Any]  # [n, ...]
    class_names: tuple[str, ...] = ()  # where the data names its classes


def clients_in(clients: Any) -> Iterator[tuple[Any, Any]]:
    """Each client's name and its data, from a mapping, or from Flower's partitions."""
    if isinstance(clients, Mapping):
        yield from clients.items()
        return
    if hasattr(clients, "load_partition"):
        yield from _partitions(clients)
        return
    what = type(clients).__name__
    raise DataError(
        f"Clients must be a dict of name -> data, or a Flower FederatedDataset or partitioner. Got {what} instead; "
        "for a list of clients use dict(enumerate(clients))."
    )


def samples_of(data: Any, client: str, label: str) -> dict[str, Samples]:
    """The samples of a client by split; everything is "train" if its data has no splits."""
    if not isinstance(data, Mapping):
        return {"train": _samples(data, client, label)}
    unknown = [key for key in data if key not in _SPLITS]
    if unknown or "train" not in data:
        why = f"a dict with the key {unknown[0]!r}" if unknown else "a dict without 'train'"
        raise _not_understood(client, why)
    return {_SPLITS[key]: _samples(part, client, label) for key, part in data.items() if part is not None}


def _samples(data: Any, client: str, label: str) -> Samples:
    if isinstance(data, DataLoader):
        data = data.dataset
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(part, "__len__") for part in data):
        return _pair(data[0], data[1], client)
    if hasattr(data, "columns") and hasattr(data, "iloc"):  # pandas
        return _table({str(name): array_of(data[name]) for name in data.columns}, client, label)
    if hasattr(data, "column_names") and hasattr(data, "features"):  # Hugging Face
        columns = {name: _stacked(data[name], client) for name in data.column_names}
        named = getattr(data.features.get(label), "names", None) or ()
        return _table(columns, client, label, tuple(named))
    is_other = isinstance(data, tuple | list | str | bytes | np.ndarray) or not hasattr(data, "__getitem__")
    if is_other or not hasattr(data, "__len__") or hasattr(data, "numel"):
        count = f" of {len(data)}" if isinstance(data, tuple | list) else ""
        raise _not_understood(client, f"{type(data).__name__}{count}")
    return _items(data, client, label)


def _pair(x: Any, y: Any, client: str) -> Samples:
    try:
        found = Samples(array_of(x), array_of(y))
    except (ValueError, TypeError) as error:
        raise DataError(f"Client '{client}': x and y must be arrays of one shape each ({error}).") from error
    return _checked(found, client)


def _items(data: Any, client: str, label: str) -> Samples:
    """A map-style dataset, item by item."""
    if not len(data):
        raise DataError(f"Client '{client}' has a dataset without samples; leave the client out.")
    items = [data[i] for i in range(len(data))]
    if isinstance(items[0], Mapping):
        columns = {str(key): _stacked([item[key] for item in items], client) for key in items[0]}
        return _table(columns, client, label)
    if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
        what = type(items[0]).__name__
        raise DataError(f"Client '{client}': items of {type(data).__name__} must be (x, y). Got {what} instead.")
    x, y = (_stacked([item[place] for item in items], client) for place in (0, 1))
    return _checked(Samples(x, y), client)


def _table(columns: Columns, client: str, label: str, class_names: tuple[str, ...] = ()) -> Samples:
    where = f"Client '{client}'"
    y = label_column(columns, label, where, "label='NAME'")
    rest = {name: values for name, values in columns.items() if name != label}
    return _checked(Samples(features_of(rest, where), y, class_names), client)


def _stacked(values: Any, client: str) -> NDArray[Any]:
    """A column or a list of items as one array [n, ...]; pictures of Pillow become their pixels."""
    try:
        return np.stack([array_of(value) for value in values]) if len(values) else np.empty(0)
    except ValueError as error:
        raise DataError(f"Client '{client}' has samples of different shapes ({error}); pad or resize them.") from error


def _checked(samples: Samples, client: str) -> Samples:
    if samples.x.ndim and samples.y.ndim and len(samples.x) != len(samples.y):
        raise DataError(f"Client '{client}' has {len(samples.x)} samples but {len(samples.y)} labels.")
    return samples


def _partitions(source: Any) -> Iterator[tuple[str, Any]]:
    """The clients of a Flower partitioner, or of a FederatedDataset with one partitioner for each split."""
    splits = getattr(source, "partitioners", None)
    if not isinstance(splits, Mapping):
        for number in range(source.num_partitions):
            yield str(number), source.load_partition(number)
        return
    if not splits:
        raise DataError("The FederatedDataset has no partitioners; give it some, by split.")
    counts = {split: partitioner.num_partitions for split, partitioner in splits.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"The FederatedDataset must have as many partitions in every split. Got {counts} instead.")
    for number in range(next(iter(counts.values()))):
        parts = {split: source.load_partition(number, split) for split in splits}
        yield str(number), parts if len(parts) > 1 else next(iter(parts.values()))


def _not_understood(client: str, what: str) -> DataError:
    return DataError(f"The data of client '{client}' must be {_WANTED}. Got {what} instead.")
