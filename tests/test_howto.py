"""The pages for users cannot rot: their commands run as they stand, in an empty folder, with the built wheel.

A fenced block `bash` is run, in the order of the page. A block with a title is the file of that name in `examples` or
`docs/snippets`, word for word: pages read the same on the site and in the repository. A comment above a block says what
it needs:

    <!-- needs: onnx -->              run only if this extra is installed
    <!-- not run: needs Slurm -->     never run here, and why
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOWTO = sorted((DOCS / "howto").glob("*.md"))
PAGES = [DOCS / "start.md", *HOWTO]
SCRIPTS = {path.name: path for path in (DOCS / "snippets").glob("*.py")}
FILES = SCRIPTS | {path.name: path for path in (ROOT / "examples").glob("*.py")}
PACKAGE = {"flower": "flwr", "report": "matplotlib", "onnx": "onnxruntime", "data": "datasets"}  # of an extra
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>needs|not run): (?P<reason>.*?) -->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Code:
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str
    mark: str | None  # "needs", "not run" or None
    reason: str | None


def blocks(page: Path) -> list[Code]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Code(m["language"], m["title"], m["text"], m["mark"], m["reason"]) for m in found]


def commands(page: Path) -> list[Code]:
    return [block for block in blocks(page) if block.language == "bash"]


def has(extra: str) -> bool:
    return find_spec(PACKAGE.get(extra, extra)) is not None


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {block.title: block.text for block in blocks(page) if block.title is not None}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_commands_or_files(page: Path):
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(blocks(page))
    assert text.count("<!-- ") == len([block for block in blocks(page) if block.mark])  # none is misspelled
    assert not re.search(r"^    coterie ", text, re.MULTILINE)  # an indented block would not be run
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for block in commands(page):
        assert block.mark != "needs" or block.reason in extras
    assert [block for block in commands(page) if block.mark != "not run"], "nothing of this page is run"


def test_every_snippet_is_shown_as_it_is():
    shown = set()
    for page in DOCS.rglob("*.md"):
        python = [block for block in blocks(page) if block.language == "python"]
        assert len(files(page)) == len(python), page
        for name, text in files(page).items():
            assert text == FILES[name].read_text(encoding="utf-8"), f"{page} differs from {FILES[name]}"
        shown |= files(page).keys()
    assert SCRIPTS.keys() <= shown


def test_pages_are_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert len(HOWTO) == 9
    assert all(f": {page.relative_to(DOCS)}\n" in site for page in PAGES)


def test_the_readme_shows_the_first_example():
    code = (ROOT / "examples" / "first.py").read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([line for line in code.splitlines() if line]) <= 10


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a shell in which `coterie` and `python` use the wheel of this tree, and nothing else of it."""
    home = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", home / "tree" / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, home / "tree")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", home, home / "tree"], check=True)
    (wheel,) = home.glob("coterie-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", home / "package", wheel], check=True)
    python = home / "package" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    shell = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "COTERIE_DATA"}}
    shell |= {
        "PYTHONPATH": str(home / "package"),
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "COTERIE_DATA": str(home / "no-data"),
        "MPLBACKEND": "Agg",
    }
    where = subprocess.run(
        ["python", "-c", "import coterie; print(coterie.__file__)"],
        env=shell, cwd=home, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(home / "package")
    return shell


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page(page: Path, installed: dict[str, str], tmp_path: Path):
    for name, text in files(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    missing = []
    for block in commands(page):
        if block.mark == "not run":
            continue
        if block.mark == "needs" and not has(str(block.reason)):
            missing.append(block.reason)
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text], cwd=tmp_path, env=installed, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
    if missing:
        pytest.skip(f"all commands ran but those that need the extras {missing}")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - {name for page in PAGES for name in files(page)}))
def test_snippets_of_other_pages(name: str, installed: dict[str, str], tmp_path: Path):
    if not has("report"):
        pytest.skip("needs the extra report")
    done = subprocess.run(["python", SCRIPTS[name]], cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
