"""Code that settings name: found without running anything, never inside a run folder."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from coterie.errors import ConfigError, RunError
from coterie.trust import check_trust, import_object, run_folder_of


@pytest.mark.parametrize("spec", ["no_such_module_here:make", "json:", ":make", ".relative:make"])
def test_import_errors_are_one_sentence(spec: str):
    with pytest.raises(ConfigError, match=f"^model {spec} cannot be imported: "):
        import_object(spec, "model")


def test_import_object():
    assert import_object("math:pi", "loss") == math.pi


@pytest.mark.parametrize("mark", ["rounds.jsonl", "clients.npz", "config.toml"])
def test_no_package_on_the_way_into_a_run_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str):
    inside = tmp_path / "shelf_of_trust" / "run"
    inside.mkdir(parents=True)
    (inside / mark).write_text("schema = 1\n")
    for file in (inside / "__init__.py", inside / "code.py"):
        file.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nthing = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    with pytest.raises(ConfigError, match=f"is inside the run folder {inside}"):
        import_object("shelf_of_trust.run.code:thing", "loss")
    assert not (tmp_path / "executed").exists()


def test_the_current_folder_is_not_searched_if_it_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rounds.jsonl").touch()
    (tmp_path / "module_in_a_run.py").write_text("thing = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        import_object("module_in_a_run:thing", "loss")
    assert str(tmp_path) not in sys.path


def test_a_file_is_in_a_run_folder_also_by_a_link(tmp_path: Path):
    run = tmp_path / "runs" / "x"
    (run / "artifacts").mkdir(parents=True)
    (run / "config.toml").write_text("schema = 1\n[run]\n")
    (tmp_path / "link").symlink_to(run / "artifacts")
    assert run_folder_of(run) == run_folder_of(run / "artifacts" / "a.py") == run
    assert run_folder_of(tmp_path / "link" / "a.py") == run
    assert run_folder_of(tmp_path / "a.py") is None
    (tmp_path / "config.toml").write_text("[run]\nrounds = 3\n")  # a project's own file
    assert run_folder_of(tmp_path / "a.py") is None


def test_what_would_be_imported_is_named():
    tables = {"run": {"model": "a.b:Net", "loss": "mse", "algorithm": "c:D"}, "work": {"optimizer": "e:F"}}
    with pytest.raises(RunError) as caught:
        check_trust(tables, Path("runs/x"), trust=False, given={("work", "optimizer")})
    assert "run.algorithm = 'c:D', run.model = 'a.b:Net'." in str(caught.value)
    assert "e:F" not in str(caught.value)
    check_trust(tables, Path("runs/x"), trust=True)
    check_trust({"run": {"model": "mlp", "device": "cuda:0"}}, Path("runs/x"), trust=False)
