"""The user's own table, `.csv` or `.parquet`: columns by name for label, user, group and split, the rest features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from coterie.data.columns import LABEL, as_labels, as_numbers, as_splits, features_of, label_column
from coterie.data.dataset import Dataset, register_source
from coterie.data.groups import words_of_groups
from coterie.data.readers._files import indexed
from coterie.data.readers.table import SUFFIXES, column_names, read_table
from coterie.data.sources.files import FileSource, register_file
from coterie.data.values import inputs_of, targets_of
from coterie.errors import DataError
from coterie.settings import setting


@register_file
@register_source
@dataclass(frozen=True)
class Table(FileSource):
    """One table; a row is a sample."""

    key: ClassVar[str] = "table"
    summary: ClassVar[str] = "your own .csv or .parquet file: columns label and optionally user, group, split"
    form: ClassVar[str] = ".csv and .parquet files"

    label: str = setting(LABEL, "column of the labels")
    labels: Literal["auto", "classes", "numbers"] = setting(
        "auto", "what the labels are; auto: words and integers are classes, other numbers are targets"
    )
    user: str | None = setting(None, "column of the users, one client each; by default 'user', if there is one")
    group: str | None = setting(None, "column of the true groups; by default 'group', if there is one")
    split: str | None = setting(None, "column with train, valid or test; by default 'split', if there is one")
    ignore: tuple[str, ...] = setting((), "columns that are not used")

    @classmethod
    def takes(cls, path: Path) -> bool:
        return path.suffix in SUFFIXES

    def has_users(self) -> bool:
        return self._column("user", column_names(Path(self.path))) is not None

    def read(self) -> Dataset:
        path, where = Path(self.path), self.path
        columns = read_table(path)
        unknown = [name for name in self.ignore if name not in columns]
        if unknown:
            several = "write several as [a, b]" if "," in unknown[0] else "take it out of dataset.ignore"
            raise DataError(f"{where} has no column '{unknown[0]}'; {several}.")
        named = {role: self._column(role, columns) for role in ("user", "group", "split")}
        label = label_column(columns, self.label, where, "--set dataset.label=NAME")
        used = {self.label, *named.values(), *self.ignore}
        features = {name: as_numbers(values) for name, values in columns.items() if name not in used}
        way_out = "leave it out with --set dataset.ignore=NAME"
        if named["user"] is None:
            way_out = f"{way_out}; if it names the clients, say --set dataset.user=NAME"
        x = features_of(features, where, way_out)
        inputs = inputs_of(x, where)
        targets = targets_of(as_labels(label, self.labels, where), where)
        found = {role: None if name is None else columns[name] for role, name in named.items()}
        user, names = (None, ()) if found["user"] is None else indexed(found["user"])
        group, groups = (None, ()) if found["group"] is None else indexed(found["group"])
        is_train, is_valid = (None, None) if found["split"] is None else as_splits(found["split"], where)
        return Dataset(
            path.stem,
            inputs.x,
            targets.y,
            targets.num_classes,
            is_train=is_train,
            is_valid=is_valid,
            user=user,
            user_names=names,
            group=group,
            group_names=words_of_groups(groups),
            mean=inputs.mean,
            std=inputs.std,
            class_names=targets.class_names,
        )

    def _column(self, role: Literal["user", "group", "split"] | str, names: object) -> str | None:
        """The name of the column that has this role; None if there is none."""
        known = list(names)  # type: ignore[call-overload]
        chosen: str | None = getattr(self, role)
        if chosen is not None and chosen not in known:
            raise DataError(
                f"{self.path} has no column '{chosen}' (it has {', '.join(known[:12])}); see dataset.{role}."
            )
        return chosen or (role if role in known else None)
