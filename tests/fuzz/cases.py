"""Seeded cases of hostile input, each in process: it succeeds, or ends in one sentence.

    python -m tests.fuzz.cases KIND FIRST COUNT        prints a line of JSON for each case that did neither

A case is a function of a random generator and an empty folder. `tests/fuzz/test_fuzz.py` runs the kinds in processes
whose memory is limited.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = 6 << 30  # bytes of address space; torch alone takes two thirds of it
Case = Callable[[random.Random, Path], None]


# ---- damage ----

WORDS = ["", "x", "[/]", "[red]", "\x1b[2J", "$\\frac$", "\ud800", "../..", "a:b", "os:system", "nan", "é" * 50, "\0"]
NUMBERS = [0, 1, -1, 2, 7, 255, 2**31, 2**53, 2**63, 2**70, -(2**70), 0.5, 1e308, float("inf"), float("nan"), 1e-320]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON can hold."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(WORDS)
    if kind == 4:
        return rng.choice([None, True, False])
    if kind < 7:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(rng.choice([*WORDS, "round", "rounds"])): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def changed(rng: random.Random, found: Any) -> Any:
    """The same value with one thing in it changed, removed or added."""
    if isinstance(found, dict) and found and rng.random() < 0.9:
        key = rng.choice(sorted(found))
        act = rng.random()
        if act < 0.2:
            return {k: v for k, v in found.items() if k != key}
        if act < 0.3:
            return found | {rng.choice(WORDS): value(rng)}
        return found | {key: changed(rng, found[key])}
    if isinstance(found, list) and found and rng.random() < 0.8:
        place = rng.randrange(len(found))
        return [*found[:place], *([] if rng.random() < 0.3 else [changed(rng, found[place])]), *found[place + 1 :]]
    return value(rng)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Bytes cut, changed, doubled or replaced."""
    act, place = rng.randrange(6), rng.randrange(len(content) + 1)
    if act == 0:
        return content[:place]
    if act == 1 and content:
        few = bytearray(content)
        for _ in range(rng.randrange(1, 9)):
            few[rng.randrange(len(few))] = rng.randrange(256)
        return bytes(few)
    if act == 2:
        return content[:place] + rng.randbytes(rng.randrange(1, 40)) + content[place:]
    if act == 3:
        return content[:place] + content[rng.randrange(len(content) + 1) :]
    if act == 4:
        return rng.choice([b"", b"\0" * 100, b"[" * 20_000, b'{"a":' * 5000, b"\xff\xfe", rng.randbytes(200)])
    return content + content


# ---- what is attacked ----

_made: dict[str, Path] = {}


def finished_run(method: str) -> Path:
    """A small finished run, made once."""
    if method not in _made:
        from coterie.runs.execution import execute
        from coterie.runs.experiment import resolve
        from coterie.runs.folder import RunFolder
        from coterie.runs.settings import merge

        head = {"algorithm": method, "clients": 6, "rounds": 2, "checkpoint_every": 0.0}
        settings = {"run": head, "work": {"epochs": 1}, "engine": {"plan": "layers", "precision": "float32"}}
        experiment = resolve(merge(settings))
        folder = RunFolder.create(Path(tempfile.mkdtemp(prefix="coterie-fuzz-")), "x", "x", experiment.tables())
        execute(experiment, folder)
        _made[method] = folder.path
    return _made[method]


def command(*arguments: object) -> None:
    """The command line: exit 0, or 2 with one sentence that does not steer the terminal; 1 and 130 have their own."""
    from coterie.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        code = stopped.code
    errors = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    assert code in (0, 2), (code, err.getvalue()[-500:])
    assert (code == 2) == (len(errors) == 1), err.getvalue()[-500:]
    assert "\x1b" not in out.getvalue() + err.getvalue(), "an escape sequence reached the terminal"
    assert not Path("executed").exists(), "code of somebody else was run"


def look(rng: random.Random, path: Path) -> None:
    """One of the commands that take a run folder."""
    asked: list[tuple[object, ...]] = [("show", path), ("show", path, "--json"), ("list", "runs", path.parent)]
    asked += [("report", path, "--no-tsne"), ("export", path, "--cluster", "0"), ("resume", path, "--quiet")]
    asked += [("resume", path, "--quiet", "--override", "--trust"), ("report", path, "--no-tsne", "--png", "pictures")]
    command(*rng.choice(asked))


def copied(rng: random.Random, folder: Path) -> Path:
    path = folder / "runs" / "x"
    shutil.copytree(finished_run(rng.choice(["fedavg", "fesem", "coterie", "local"])), path)
    (path / "artifacts" / "evil.py").write_text("open('executed', 'w')\n")
    return path


# ---- kinds ----


def config(rng: random.Random, folder: Path) -> None:
    """Settings in a run folder, or in a file of the user."""
    from coterie.runs.folder import to_toml

    path = copied(rng, folder)
    tables = json.loads(json.dumps(__import__("tomllib").loads((path / "config.toml").read_text())))
    for _ in range(rng.randrange(1, 3)):
        table = rng.choice(sorted(tables))
        if isinstance(tables[table], dict) and tables[table]:
            key = rng.choice(sorted(tables[table]))
            tables[table][key] = rng.choice([value(rng), "runs.x.artifacts.evil:loss", 10**12])
        else:
            tables[table] = value(rng)
    try:
        text = to_toml(tables).encode("utf-8", "surrogatepass")
    except AttributeError:
        text = b"schema = 1"
    (path / "config.toml").write_bytes(damaged(rng, text) if rng.random() < 0.3 else text)
    if rng.random() < 0.5:
        (path / "summary.json").unlink()
    if rng.random() < 0.3:
        command("run", "--config", path / "config.toml", "--rounds", "1", "--name", "again", "--quiet")
    else:
        look(rng, path)


FLAGS = ["--clients", "--rounds", "--lr", "--epochs", "--batch-size", "--clusters", "--seed", "--participation"]
FLAGS += ["--dataset", "--scenario", "--model", "--loss", "--algorithm", "--optimizer", "--schedule", "--unseen"]
FLAGS += ["--attack", "--engine", "--device", "--name", "--evaluate-every", "--data-dir", "--dropout", "--clip-norm"]
SETS = ["scenario.groups", "scenario.alpha", "scenario.quantity", "scenario.tests", "scenario.valid", "model.hidden"]
SETS += ["algorithm.robust", "algorithm.warmup", "engine.plan", "engine.chunk", "run.initial", "work.lr", "x", "a.b.c"]


def flags(rng: random.Random, folder: Path) -> None:
    """The command line."""
    asked: list[object] = ["run", "--clients", "5", "--rounds", "1", "--epochs", "1", "--quiet", "-a", "fedavg"]
    for _ in range(rng.randrange(1, 4)):
        odd = rng.choice(
            [*WORDS[:8], *map(str, NUMBERS), "1000000000000", "1e400", "0x10", "१", "-", "--", "a=b", "[1,2]"]
        )
        odd = odd.replace("\0", "")
        if rng.random() < 0.4:
            asked += ["--set", f"{rng.choice(SETS)}={odd}"]
        else:
            asked += [rng.choice(FLAGS), odd]
    if "2147483648" in asked or "9007199254740992" in asked or "255" in asked:  # work that is meant to take long
        asked = [
            str(item).replace("2147483648", "3").replace("9007199254740992", "3").replace("255", "3") for item in asked
        ]
    command(*asked)


def npz(rng: random.Random, folder: Path) -> None:
    """The user's own file."""
    import numpy as np

    draw = np.random.default_rng(rng.randrange(2**32))
    count = rng.choice([0, 1, 5, 40])
    shapes = [(count, 3), (count, 1, 4, 4), (count, 4, 4), (count,), (), (count, 0)]
    kinds = ["f4", "f8", "u1", "i8", "U3", "c16", "?", "S2", "M8[s]", "u8"]

    def array(shape: tuple[int, ...]) -> Any:
        kind = rng.choice(kinds)
        made = (draw.random(shape) * rng.choice([1, 10, 2**28, 1e300])).astype("f8")
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return made.astype(kind)

    arrays = {"x": draw.random((count, 3)), "y": np.arange(count) % 3}
    for name in rng.sample(["x", "y", "user", "group", "is_train", "split", "more"], rng.randrange(1, 4)):
        arrays[name] = array(rng.choice(shapes))
    if rng.random() < 0.2:
        arrays["user"] = np.array([rng.choice(WORDS).replace("\0", "") for _ in range(count)] or ["a"])
    with contextlib.suppress(ValueError):
        np.savez(folder / "own.npz", **arrays)
    if rng.random() < 0.4 and (folder / "own.npz").exists():
        (folder / "own.npz").write_bytes(damaged(rng, (folder / "own.npz").read_bytes()))
    command("run", "-a", "fedavg", "--dataset", folder / "own.npz", "--rounds", "1", "--name", "a", "--quiet")


def readers(rng: random.Random, folder: Path) -> None:
    """Published formats."""
    import numpy as np

    from coterie.data.readers.cifar import read_binary_batch, read_pickled_batch
    from coterie.data.readers.idx import read_pair
    from coterie.data.readers.leaf import read_femnist
    from coterie.data.readers.mat import read_svhn, read_usps

    kind = rng.randrange(5)
    if kind == 0:
        images = b"\0\0\x08\x03" + bytes([0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2]) + bytes(8)
        labels = b"\0\0\x08\x01" + bytes([0, 0, 0, 2]) + b"\1\2"
        pack = rng.choice([bytes, gzip.compress, bz2.compress])
        (folder / "i").write_bytes(damaged(rng, pack(damaged(rng, images))))
        (folder / "l").write_bytes(pack(labels))
        read_pair(folder / "i", folder / "l")
    elif kind == 1:
        good: Any = {
            "data": np.zeros((2, 3072), np.uint8),
            "labels": [0, 1],
            "fine_labels": [0, 1],
            "coarse_labels": [0, 1],
        }
        key = rng.choice(sorted(good))
        good[key] = rng.choice([value(rng), np.zeros((2, 2)), [2**70, 1], ["a"], np.array(3), [1.5, 2]])
        content = pickle.dumps(good, protocol=2)
        content = damaged(rng, content) if rng.random() < 0.5 else content
        reader = rng.choice([read_pickled_batch, read_binary_batch])
        reader(content, rng.choice([10, 100]), "file")
    elif kind == 2:
        users: Any = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.0] * 784], "y": [1]}}}
        content = json.dumps(changed(rng, users)).encode()
        (folder / "all_data_0.json").write_bytes(damaged(rng, content) if rng.random() < 0.3 else content)
        read_femnist(folder)
    elif kind == 3:
        from scipy.io import savemat

        arrays: Any = {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [10]], np.uint8)}
        arrays[rng.choice("Xy")] = rng.choice(
            [np.zeros(3), "text", np.array([[np.nan], [1]]), np.zeros((2, 1), object) + 1]
        )
        savemat(folder / "f.mat", arrays, do_compression=rng.random() < 0.5)
        if rng.random() < 0.6:
            (folder / "f.mat").write_bytes(damaged(rng, (folder / "f.mat").read_bytes()))
        read_svhn(folder / "f.mat")
    else:
        text = "".join(
            f"{rng.choice([1, 10, 11, 0, 'x', 'nan', 1e300])} {rng.choice([1, 256, 257, 0, -1])}:0.5\n" for _ in "12"
        )
        pack = rng.choice([bytes, bz2.compress])
        (folder / "usps").write_bytes(damaged(rng, pack(text.encode())) if rng.random() < 0.5 else pack(text.encode()))
        read_usps(folder / "usps")


def checkpoints(rng: random.Random, folder: Path) -> None:
    """Checkpoints with right digests and wrong content."""
    import safetensors.torch
    import torch

    path = copied(rng, folder)
    places = sorted((path / "checkpoint").glob("round-*"))
    for place in places if rng.random() < 0.5 else places[-1:]:
        tensors = safetensors.torch.load_file(place / "tensors.safetensors")
        state = json.loads((place / "state.json").read_text())
        if rng.random() < 0.6:
            name = rng.choice(sorted(tensors))
            found = tensors.pop(name)
            forms = [
                found[:0] if found.dim() else found,
                found.flatten(),
                found.double(),
                found.bool(),
                found.to(torch.uint8),
            ]
            forms += [
                torch.full_like(found, 9),
                torch.zeros(3),
                torch.tensor(1),
                found.unsqueeze(0),
                torch.full_like(found, -5),
            ]
            if rng.random() < 0.85:
                tensors[rng.choice([name, name, name, "state.odd"])] = rng.choice(forms).clone()
        else:
            state = changed(rng, state)
        safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, place / "tensors.safetensors")
        (place / "state.json").write_text(json.dumps(state))
        if rng.random() < 0.1:
            (place / "state.json").write_bytes(damaged(rng, (place / "state.json").read_bytes()))
        parts = ("tensors.safetensors", "state.json")
        digests = {name: hashlib.sha256((place / name).read_bytes()).hexdigest() for name in parts}
        (place / "digests.json").write_text(json.dumps(digests))
    if rng.random() < 0.7:
        (path / "summary.json").unlink()
        if rng.random() < 0.5:  # from the checkpoint of the first round
            shutil.rmtree(places[-1])
        command("resume", path, "--quiet")
    else:
        look(rng, path)


def folders(rng: random.Random, folder: Path) -> None:
    """Files of a run folder, damaged, replaced or of another kind."""
    path = copied(rng, folder)
    (folder / "outside").write_text("precious")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for _ in range(rng.randrange(1, 3)):
        file = rng.choice(files)
        act = rng.random()
        if file.is_symlink() or not file.is_file() or file.stat().st_nlink > 1:  # replaced before
            continue
        if act < 0.35 and file.suffix in (".json", ".jsonl"):
            text = file.read_text(errors="replace")
            lines = text.splitlines() if file.suffix == ".jsonl" else [text]
            with contextlib.suppress(ValueError):
                place = rng.randrange(len(lines))
                lines[place] = json.dumps(changed(rng, json.loads(lines[place])))
            file.write_text("\n".join(lines) + "\n")
        elif act < 0.5 and file.suffix in (".npz", ".npy"):
            with contextlib.suppress(OSError, ValueError, EOFError, zipfile.BadZipFile):  # damaged before
                _other_arrays(rng, file)
        elif act < 0.7:
            file.write_bytes(damaged(rng, file.read_bytes()))
        else:
            file.unlink()
            kind = rng.randrange(5)
            if kind == 0:
                file.symlink_to(rng.choice([folder / "outside", Path("/dev/zero"), folder, file]))
            elif kind == 1:
                os.mkfifo(file)
            elif kind == 2:
                file.mkdir()
            elif kind == 3:
                os.link(folder / "outside", file)
    if rng.random() < 0.4 and (path / "summary.json").is_file():
        (path / "summary.json").unlink()
    look(rng, path)
    assert (folder / "outside").read_text() == "precious"


def _other_arrays(rng: random.Random, file: Path) -> None:
    import numpy as np

    loaded = np.load(file, allow_pickle=False)
    arrays = dict(loaded) if file.suffix == ".npz" else {"": loaded}
    name = rng.choice(sorted(arrays))
    found = arrays[name]
    forms = [found[:0] if found.ndim else found, found.ravel(), np.zeros(3), np.array("x"), np.array(WORDS[:6])]
    if found.dtype.kind in "iuf":
        forms += [
            found + found.dtype.type(100),
            np.full_like(found, 7),
            np.full(found.shape, 2**28),
            found.astype("f8") / 0.0001,
        ]
        forms += [np.full(found.shape, np.nan), np.full(found.shape, -(2**62))]
    arrays[name] = rng.choice(forms)
    if file.suffix == ".npz":
        np.savez_compressed(file, **arrays)
    else:
        np.save(file, arrays[""])


def wire(rng: random.Random, folder: Path) -> None:
    """Answers and requests of Flower, where it is installed."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from coterie.client.forms import Form
    from coterie.engines.flower.wire import CALL, INFO, Call, answer, parted, read_answer, read_call, read_request

    content = RecordDict()
    if rng.random() < 0.5:
        import torch

        asked = Call("a:b", "c", 1, "round", 1, 0, {}, None, nonce="n")
        content = answer(asked, {"params": torch.ones(1, 3), "samples": torch.ones(1)}, 3)
        array = next(iter(content["answer"].values()))
        data = damaged(rng, array.data)
        stored = Array(dtype=array.dtype, shape=array.shape, stype=rng.choice(["numpy.ndarray", "x"]), data=data)
        content["answer"] = ArrayRecord({rng.choice(["params", "", "x"]): stored})
        if rng.random() < 0.5:
            told = {rng.choice(["gradients", "error", "x"]): rng.choice([1, -1, 2**62, "x" * 99, 0.5])}
            head = {"round": 1, "nonce": "n"} if rng.random() < 0.9 else {}
            content[INFO] = ConfigRecord({**head, **told})
        form = Form((3,), torch.float32, -1, 1, splits=("train",) if rng.random() < 0.5 else ())
        read_answer(parted(content)[0], asked, {"params": form}, {"train": 3, "valid": 0, "test": 0})
    else:
        call = {
            "step": "a:b",
            "client": "c",
            "round": 1,
            "phase": "round",
            "key": 1,
            "seed": 0,
            "work": {},
            "models": ["m"],
        }
        text = json.dumps(changed(rng, call) if rng.random() < 0.7 else call)
        content[CALL] = ConfigRecord({rng.choice(["json", "json", "x"]): text if rng.random() < 0.7 else "[" * 100_000})
        if rng.random() < 0.5:
            content["m"] = ArrayRecord({"params": Array(np.zeros(3, rng.choice([">f8", "f4", "i2", "c16"])))})
        read_call(content)
        read_request(content)


KINDS: dict[str, Case] = {case.__name__: case for case in (config, flags, npz, readers, checkpoints, folders, wire)}


def failure_of(kind: str, seed: int) -> str | None:
    """Run a case; what was wrong with its end, if anything."""
    from coterie.errors import CoterieError

    here = os.getcwd()
    path = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="coterie-fuzz-") as name:
        os.chdir(name)
        try:
            KINDS[kind](random.Random(f"{kind} {seed}"), Path(name))
        except CoterieError:
            return None
        except BaseException:
            return traceback.format_exc()[-2500:]
        finally:
            os.chdir(here)
            sys.path[:] = path
    return None


def main() -> None:
    """Run the cases of a kind with the seeds FIRST, FIRST + 1, ..."""
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    try:
        for seed in range(first, first + count):
            found = failure_of(kind, seed)
            if found is not None:
                print(json.dumps({"kind": kind, "seed": seed, "found": found}), flush=True)
    finally:
        for path in _made.values():
            shutil.rmtree(path.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
