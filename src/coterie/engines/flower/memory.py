"""The memory of a client on its own disk: two generations, named by round.

The server writes a checkpoint after each round and may resume from the one before; the client then uses its memory
from before that round. A generation is one file, written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from coterie.errors import StorageError
from coterie.randomness import name_key

_NAME = re.compile(r"(\d{8})\.([0-9a-f]*)\.safetensors")
KEPT = 2  # generations


def folder_name(name: str) -> str:
    """A valid and unique folder name for any name."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:80]
    return safe if safe and safe == name else f"{safe}-{abs(name_key(name)):016x}"


class DiskMemory:
    """The memory of one client in one run, during one call."""

    def __init__(self, folder: Path, round: int, life: str, past: Mapping[str, int]) -> None:
        self._folder, self._round, self._life = folder, round, life
        self._past = past  # earlier server processes, and the last valid round of each
        self._held: dict[str, Tensor] | None = None

    def get(self, name: str, default: Tensor) -> Tensor:
        """The stored value [1, ...], or `default`."""
        return self._values().get(name, default)

    def put(self, name: str, value: Tensor) -> None:
        """Store a value [1, ...]; it is on disk when this returns."""
        values = self._values() | {name: value.detach().cpu().contiguous().clone()}
        self._write(values)
        self._held = values

    def everything(self) -> dict[str, Tensor]:
        """All stored values."""
        return dict(self._values())

    def replace(self, values: dict[str, Tensor]) -> None:
        """Replace all stored values."""
        self._write(values)
        self._held = dict(values)

    # ---- files ----

    def _generations(self) -> list[tuple[int, str, Path]]:
        """Rounds, server ids and files, newest first."""
        if not self._folder.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self._folder.iterdir()]
        return sorted(((int(m[1]), m[2], path) for m, path in found if m), reverse=True, key=lambda g: g[0])

    def _is_valid(self, round: int, life: str) -> bool:
        """Whether a generation belongs to the current run, and not to a round that the server has repeated since."""
        return round <= (self._round if life == self._life else self._past.get(life, -1))

    def _values(self) -> dict[str, Tensor]:
        if self._held is None:
            self._held = {}
            for round, life, path in self._generations():
                if self._is_valid(round, life):
                    self._held = self._read(path)
                    break
        return self._held

    def _read(self, path: Path) -> dict[str, Tensor]:
        try:
            with safe_open(str(path), framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except Exception as error:
            raise StorageError(
                f"The memory of this client cannot be read from {path}: {error}; delete the file to start without it."
            ) from error

    def _write(self, values: dict[str, Tensor]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"{self._round:08d}.{self._life}.safetensors"
        aside = path.with_suffix(f".{os.getpid()}.part")
        save_file(values, str(aside), metadata={"round": json.dumps(self._round)})
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        generations = self._generations()
        mine = [g for g in generations if self._is_valid(g[0], g[1])]
        kept = {path for _, _, path in mine[:KEPT]}
        for _, _, old in generations:
            if old not in kept:
                old.unlink(missing_ok=True)
