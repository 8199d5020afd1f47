"""Imports follow the path of the data, and a run needs no optional dependency."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# A folder imports from itself and from those before it. docs/architecture.md draws the same order.
PATH = ("version", "errors", "settings", "randomness", "trust")  # the root modules that everything may use
PATH += ("data", "nets", "client", "engines", "methods", "runs", "deploy", "views", "reproduce", "cli")
PATH += ("api", "__init__", "__main__")  # the end of the path

REGISTRIES = {  # modules that may load the members of their own folder by name
    "coterie.data.dataset": "coterie.data.sources",
    "coterie.data.scenario": "coterie.data.scenarios",
    "coterie.nets.registry": "coterie.nets.zoo",
    "coterie.methods.base": "coterie.methods",
    "coterie.engines": "coterie.engines",
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((SOURCE / "coterie").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports anywhere: at the top, inside functions, for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            module = node.module or ""
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= {full if full in known else module for full in inner}
    return {item for item in found if item in known and item != name}


def station(name: str) -> str:
    """The folder of a module, or the module itself where it lies in the root."""
    return name.split(".")[1] if "." in name else "__init__"


def is_registry(name: str, target: str) -> bool:
    """Whether `name` is a registry and `target` one of its members."""
    return name in REGISTRIES and target.startswith(REGISTRIES[name])


def test_every_folder_has_a_place_on_the_path():
    assert {station(name) for name in modules()} <= set(PATH)


def test_few_modules_lie_in_the_root():
    assert len([path for path in modules().values() if path.parent == SOURCE / "coterie"]) <= 8


def test_imports_point_one_way_along_the_path():
    known = modules()
    wrong = [
        f"{name} imports {target}"
        for name, path in known.items()
        if name != "coterie"  # the package itself is the end of the path
        for target in imports_of(name, path, known)
        if PATH.index(station(target)) > PATH.index(station(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_cycle():
    known = modules()
    graph = {
        name: {target for target in imports_of(name, path, known) if not is_registry(name, target)}
        for name, path in known.items()
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            pytest.fail("a cycle: " + " -> ".join([*above[above.index(name) :], name]))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize(("given", "used"), [(None, "passive"), ("active", "active")])
def test_idle_threads_of_torch_sleep_unless_the_user_wants_it_otherwise(given: str | None, used: str):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    code = """
import os, sys, coterie.cli.main
assert "torch" not in sys.modules  # OpenMP reads the variable when torch is imported
print(os.environ["OMP_WAIT_POLICY"])
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{used}\n"


OPTIONAL = ("pandas", "matplotlib", "starlette", "uvicorn", "tensorboard", "mlflow", "wandb", "selenium", "flwr", "PIL")

CODE = f"""
import sys
from importlib.machinery import PathFinder
sys.argv = ["coterie"]
find = PathFinder.find_spec

def found(name, path=None, target=None):  # as if none of them were installed
    return None if name.partition(".")[0] in {OPTIONAL!r} else find(name, path, target)

PathFinder.find_spec = found
from coterie.cli.main import main
try:
    main(["run", "--rounds", "1", "--clients", "4", "--epochs", "1", "--name", "a", "--quiet", "--json"])
except SystemExit as done:
    assert done.code == 0
    try:
        main(["report", "runs/a", "--quiet", "--json"])
    except SystemExit as done:
        assert done.code == 0
for command, part in ((["report", "runs/a", "--png", "x", "--quiet"], "report"), (["ui"], "ui")):
    try:
        main(command)
    except SystemExit as done:
        assert done.code == 2, part
"""


def test_a_run_and_its_page_need_no_optional_part(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split("pip install ")[1] for line in done.stderr.splitlines()] == [
        "'coterie[report]'.",
        "'coterie[ui]'.",
    ]


ELSEWHERE = """
import importlib, os, sys
import torch, scipy, sklearn, rich, typer  # they know on which system they are
for name in ("fcntl", "resource", "pwd", "grp", "termios", "flwr", "ray", "cryptography", "triton"):
    sys.modules[name] = None  # as if it were not there
for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "geteuid", "getuid", "fork", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert (error.name or "").partition(".")[0] in ("flwr", "ray", "cryptography", "triton"), (name, error)
"""


def test_every_module_is_imported_where_there_is_no_unix():
    names = [name for name in modules() if name != "coterie.__main__"]
    code = [sys.executable, "-c", ELSEWHERE, *names]
    done = subprocess.run(code, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
