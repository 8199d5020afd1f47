"""The runs of one folder, read again only when they have changed.

A run is identified by its path relative to the folder. Paths that lead out of it (`..`, absolute paths, links) are
refused before anything is opened, and so are links inside a run folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from coterie.errors import RunError
from coterie.runs.folder import RunFolder
from coterie.runs.reading import RunData, find_runs, is_run, read_run
from coterie.views.report.compare import value_of
from coterie.views.report.payload import page_payload, tsne_payload

_LIST_FOR = 0.5  # seconds before the list is read again
_KEPT = 64  # cached answers
MOST_COMPARED = 50
_WATCHED = ("config.toml", "environment.json", "rounds.jsonl", "summary.json", "clients.npz", "labels.npy", ".lock")


class Refused(RunError):
    """The name is not that of a run in the folder."""


class Store:
    """Cached JSON answers about the runs of a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._answers: OrderedDict[tuple[str, str], tuple[str, bytes]] = OrderedDict()
        self._entries: dict[str, tuple[str, dict[str, Any]]] = {}
        self._list: tuple[float, str, bytes] | None = None
        self._lock = threading.Lock()  # of the caches; held briefly
        self._works: dict[str, threading.Lock] = {}  # one thread computes an answer, others wait for it

    # ---- names ----

    def path_of(self, name: str) -> Path:
        """The folder of a run; Refused if it is not one of this folder."""
        parts = PurePosixPath(name).parts
        is_path = os.sep != "/" and os.sep in name  # elsewhere a backslash is a letter
        if not parts or "\0" in name or name.startswith("/") or is_path or ".." in parts or len(name) > 1000:
            raise Refused("There is no such run.")
        root = self.root.resolve()
        if len(parts) == 1 and is_run(root) and parts[0] == root.name:
            return root  # the folder is itself a run
        try:
            found = root.joinpath(*parts).resolve()
            inside = found != root and found.is_relative_to(root)
            if not inside or any(part.startswith(".") for part in parts) or not found.is_dir() or not is_run(found):
                raise Refused("There is no such run.")
        except (OSError, RuntimeError, ValueError) as error:
            raise Refused("There is no such run.") from error
        return found

    # ---- answers: an ETag and the bytes ----

    def runs(self) -> tuple[str, bytes]:
        """All runs with state and progress; damaged ones with the reason."""
        with self._lock:
            if self._list is not None and time.monotonic() - self._list[0] < _LIST_FOR:
                return self._list[1:]
        with self._work("list"):
            runs = [self._entry(name, path) for name, path in find_runs(self.root)] if self.root.is_dir() else []
            content = _json({"folder": str(self.root), "runs": runs})
            mark = hashlib.sha256(content).hexdigest()[:16]
            with self._lock:
                known = {run["id"] for run in runs}
                self._entries = {name: entry for name, entry in self._entries.items() if name in known}
                self._list = (time.monotonic(), mark, content)
        return mark, content

    def run(self, name: str) -> tuple[str, bytes]:
        """The data of a run's page."""
        path = self.path_of(name)
        return self._answer(("run", name), [path], lambda: self._page([(name, self._read(path))]))

    def compare(self, names: Sequence[str]) -> tuple[str, bytes]:
        """The data of a comparison; damaged runs are left out and reported as problems."""
        names = list(dict.fromkeys(names))
        if len(names) > MOST_COMPARED:
            raise Refused(f"At most {MOST_COMPARED} runs are compared at a time.")
        paths = [self.path_of(name) for name in names]

        def make() -> Any:
            good: list[tuple[str, RunData]] = []
            damaged: list[str] = []
            for name, path in zip(names, paths, strict=True):
                try:
                    good.append((name, self._read(path)))
                except RunError as error:
                    damaged.append(str(error))
            if not good:
                raise RunError(" ".join(damaged) or "No run was named.")
            page = self._page(good)
            page["runs"][0]["problems"] = [*damaged, *page["runs"][0]["problems"]]
            return page

        return self._answer(("compare", "\0".join(names)), paths, make)

    def tsne(self, name: str) -> tuple[str, bytes]:
        """The t-SNE map of a run; it takes seconds, so pages request it separately."""
        path = self.path_of(name)
        return self._answer(("tsne", name), [path], lambda: tsne_payload(self._read(path)))

    # ---- parts ----

    def _read(self, path: Path, *, whole: bool = True) -> RunData:
        return read_run(path, whole=whole)

    def _page(self, named: Sequence[tuple[str, RunData]]) -> dict[str, Any]:
        page = page_payload([run for _, run in named], tsne=False)
        return page | {"runs": [run | {"id": name} for run, (name, _) in zip(page["runs"], named, strict=True)]}

    def _entry(self, name: str, path: Path) -> dict[str, Any]:
        mark = _mark(path)
        with self._lock:
            kept = self._entries.get(name)
        if kept is not None and kept[0] == mark:
            return kept[1]
        entry = self._summary_of(name, path)
        with self._lock:
            self._entries[name] = (mark, entry)
        return entry

    def _summary_of(self, name: str, path: Path) -> dict[str, Any]:
        try:
            if path.is_symlink() and not path.resolve().is_relative_to(self.root.resolve()):
                raise RunError(f"{name} is a link out of the folder and is not followed.")
            run = self._read(path, whole=False)
            changed = max((path / file).stat().st_mtime for file in _WATCHED if (path / file).exists())
        except (RunError, OSError, RuntimeError) as error:
            # Paths as they are within the folder.
            reason = str(error).replace(f"{self.root.resolve()}/", "").replace(f"{self.root}/", "")
            return {"id": name, "state": "damaged", "reason": reason}
        facts = ("state", "algorithm", "dataset", "seed", "done", "planned")
        return {
            "id": name,
            **{fact: getattr(run, fact) for fact in facts},
            **{score: run.last(score) for score in ("accuracy", "loss", "ari")},
            "left": run.seconds_left,
            "seconds": value_of(run, "seconds"),
            "changed": int(changed),
        }

    def _answer(self, key: tuple[str, str], paths: Sequence[Path], make: Callable[[], Any]) -> tuple[str, bytes]:
        with self._work("\0".join(key)):
            mark = hashlib.sha256("".join(_mark(path) for path in paths).encode()).hexdigest()[:16]
            with self._lock:
                kept = self._answers.get(key)
                if kept is not None and kept[0] == mark:
                    self._answers.move_to_end(key)
                    return kept
            answer = (mark, _json(make()))
            with self._lock:
                self._answers[key] = answer
                while len(self._answers) > _KEPT:
                    self._answers.popitem(last=False)
            return answer

    def _work(self, key: str) -> threading.Lock:
        with self._lock:
            if len(self._works) > 10_000:
                self._works = {name: lock for name, lock in self._works.items() if lock.locked()}
            return self._works.setdefault(key, threading.Lock())


def _mark(path: Path) -> str:
    """A text that changes when the run does."""
    parts = []
    artifacts = [f"artifacts/{name}" for name in ("sketches.npz", "members.npz", "method.npz", "failures.json")]
    for name in (*_WATCHED, *artifacts):
        try:
            found = (path / name).stat()
            parts.append(f"{name} {found.st_mtime_ns} {found.st_size} {found.st_ino}")
        except OSError:
            parts.append(name)
    return f"{path} {RunFolder(path).is_held()} " + " ".join(parts)


def _json(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace")
