"""The user's own pictures: a folder of class folders, of user/class folders, or with an index in a csv."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from coterie.data.dataset import Dataset, register_source
from coterie.data.groups import words_of_groups
from coterie.data.readers.folder import image_list, read_folder
from coterie.data.sources.files import FileSource, register_file
from coterie.data.values import inputs_of
from coterie.errors import ConfigError
from coterie.settings import setting


@register_file
@register_source
@dataclass(frozen=True)
class Pictures(FileSource):
    """Image files; they need the optional extra `data`."""

    key: ClassVar[str] = "pictures"
    summary: ClassVar[str] = (
        "your own folder of pictures: class/, user/class/, train/class/ or a csv with file and label"
    )
    form: ClassVar[str] = "folders of pictures"

    size: tuple[int, ...] = setting(
        (), "height and width to which all pictures are resized; by default as they are", ge=1
    )
    channels: int | None = setting(None, "1 (grey) or 3 (colour); by default as the first picture", ge=1)

    @classmethod
    def takes(cls, path: Path) -> bool:
        return path.is_dir() and not (path / "x.npy").exists()

    def has_users(self) -> bool:
        return "user" in image_list(Path(self.path))[0]

    def read(self) -> Dataset:
        if len(self.size) not in (0, 2):
            raise ConfigError(
                f"dataset.size must be a height and a width, such as [32, 32]. Got {list(self.size)} instead."
            )
        size = (self.size[0], self.size[1]) if self.size else None
        found = read_folder(Path(self.path), size=size, channels=self.channels)
        x, mean, std = inputs_of(found.x, self.path)
        return Dataset(
            Path(self.path).name,
            x,
            torch.from_numpy(found.y),
            len(found.class_names),
            is_train=found.is_train,
            is_valid=found.is_valid,
            user=found.user,
            user_names=found.user_names,
            group=found.group,
            group_names=words_of_groups(found.group_names),
            mean=mean,
            std=std,
            class_names=()
            if found.class_names == tuple(map(str, range(len(found.class_names))))
            else found.class_names,
        )
