"""The notebooks of the documentation run from top to bottom, in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 3
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_the_index_names_every_notebook():
    text = (BOOKS[0].parent / "index.md").read_text(encoding="utf-8")
    assert len(BOOKS) == 3
    assert all(f"({path.name})" in text for path in BOOKS)


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_cells_run_as_a_script(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    matplotlib = pytest.importorskip("matplotlib", reason="needs pip install 'coterie[report]'")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_cells_run_in_a_kernel(path: Path, tmp_path: Path):
    nbformat = pytest.importorskip("nbformat", reason="needs pip install 'coterie[notebooks]'")
    nbclient = pytest.importorskip("nbclient", reason="needs pip install 'coterie[notebooks]'")
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any(output.output_type == "execute_result" for output in shown)
