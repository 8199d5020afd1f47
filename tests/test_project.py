"""What surrounds the package says the same as pyproject.toml: extras, versions of Python, workflows, the image."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from coterie.runs.trackers import TRACKERS
from tests.test_imports import modules

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def workflow(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    return found


def test_every_extra_that_an_error_names_is_declared():
    named: set[str] = set()
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "MissingExtra"
            if is_call and isinstance(node.args[1], ast.Constant):
                named.add(str(node.args[1].value))
    assert {"report", "ui", "flower"} <= named <= EXTRAS.keys()
    assert set(TRACKERS) <= EXTRAS.keys()


def test_all_has_every_extra_for_users():
    (every,) = EXTRAS["all"]
    inside = re.fullmatch(r"coterie\[(.*)\]", every)
    assert inside is not None
    assert set(inside[1].split(",")) == EXTRAS.keys() - {"all", "browser", "notebooks", "docs", "dev"}


def test_the_app_of_sites_takes_a_flower_that_is_tested():
    text = (ROOT / "src/coterie/deploy/template/pyproject.toml.txt").read_text(encoding="utf-8")
    app, package = re.search(r'"flwr==(\d+)\.(\d+)\.\d+"', text), re.search(r">=(\d+)\.(\d+),<", EXTRAS["flower"][0])
    assert app is not None
    assert package is not None
    assert app.groups() == package.groups()


def test_workflows_run_on_the_versions_of_python_that_the_classifiers_name():
    named = {line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    jobs = workflow("check.yml")["jobs"]
    for job in ("check", "versions"):
        assert set(jobs[job]["strategy"]["matrix"]["python"]) == named
    floor = next(item for item in PROJECT["dependencies"] if item.startswith("torch"))
    lowest = next(
        item["torch"] for item in jobs["versions"]["strategy"]["matrix"]["include"] if item["which"] == "lowest"
    )
    assert lowest == floor.replace(">=", "==") + ".0"


def test_workflows_call_what_is_there():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    called = 0
    for name in ("check.yml", "release.yml"):
        for job in workflow(name)["jobs"].values():
            for step in job.get("steps", []):
                first, _, rest = step.get("run", "").partition(" ")
                words = rest.split()
                if first == "make":
                    assert words[0] in targets
                elif first == "python" and words[0].endswith(".py"):
                    assert (ROOT / words[0]).is_file()
                elif first.startswith("."):
                    assert (ROOT / first).is_file()
                else:
                    continue
                called += 1
    assert called >= 5


@pytest.mark.parametrize("name", ["bug.yml", "idea.yml"])
def test_issue_forms_have_what_github_requires(name: str):
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [field["id"] for field in form["body"]]
    assert len(fields) == len(set(fields))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_other_files_are_read_by_their_tools():
    yaml = pytest.importorskip("yaml")
    for name in (
        ".pre-commit-config.yaml",
        ".github/dependabot.yml",
        ".github/ISSUE_TEMPLATE/config.yml",
        "CITATION.cff",
    ):
        assert isinstance(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")), dict)
    assert json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))["image"]


def test_the_image_has_the_python_and_the_torch_of_make():
    image, make = ((ROOT / name).read_text(encoding="utf-8") for name in ("Dockerfile", "Makefile"))
    (torch,) = set(re.findall(r"torch==[\d.]+", make))
    assert f"ARG TORCH={torch}\n" in image
    copied = re.findall(r"^COPY (?!--from)(.*) /src", image, re.MULTILINE)
    assert copied
    assert all((ROOT / name).exists() for line in copied for name in line.split())


def test_the_address_of_the_repository_is_in_one_place():
    address = PROJECT["urls"]["Source"].removeprefix("https://")
    others = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *ROOT.glob("*.yml"), *(ROOT / "docs").rglob("*.md")]
    others += (ROOT / ".github").rglob("*.*")
    assert len(others) > 15
    assert not [path for path in others if path.is_file() and address in path.read_text(encoding="utf-8")]
