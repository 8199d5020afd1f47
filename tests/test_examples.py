"""The examples run as they stand, as a user would run them."""

from __future__ import annotations

import re
import runpy
from inspect import ismodule
from pathlib import Path
from unittest.mock import patch

import pytest

from coterie.runs.metrics import METRICS

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name != "adapters.py"], ids=lambda path: path.name)
def test_example_runs(path, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # an example saves a picture
    with patch.dict(METRICS):  # an example registers one of its own
        runpy.run_path(str(path), run_name="__main__")
    assert "accuracy 0." in capsys.readouterr().out


def test_own_algorithm_is_short_and_the_same_on_both_engines(capsys):
    path = next(p for p in EXAMPLES if p.name == "own_algorithm.py")
    runpy.run_path(str(path), run_name="__main__")
    loop, vectorized = capsys.readouterr().out.splitlines()
    assert loop.removeprefix("loop: ") == vectorized.removeprefix("vectorized: ")
    text = path.read_text()
    body = text[text.index("@client_step") : text.index("if __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) < 40


@pytest.mark.parametrize("method", ["examples.own_algorithm:FedMedian", "examples.own_personalized:Blend"])
def test_own_methods_follow_the_schedule(method, monkeypatch):
    import coterie

    monkeypatch.syspath_prepend(str(EXAMPLES[0].parents[1]))
    runs = [
        coterie.run(method, "rotated-digits", rounds=2, clients=4, schedule=schedule)
        for schedule in ("constant", "cosine")
    ]
    assert runs[0].summary["loss"]["macro"] != runs[1].summary["loss"]["macro"]


def test_public_names_are_what_can_be_imported():
    import coterie

    assert all(getattr(coterie, name) is not None for name in coterie.__all__)
    public = {name for name, value in vars(coterie).items() if not name.startswith("_") and not ismodule(value)}
    assert public - {"TYPE_CHECKING", "Any", "VERSION", "annotations", "import_module"} == set(coterie.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = coterie.nothing


def test_public_names_are_in_the_reference():
    import coterie

    shown = re.findall(r"^::: (\S+)$", (EXAMPLES[0].parents[1] / "docs" / "api.md").read_text(), re.MULTILINE)
    missing = {name for name in coterie.__all__ if not any(path.endswith(f".{name}") for path in shown)}
    assert missing == {"CoterieError"}  # it is on the page of its module
    assert "coterie.errors" in shown


@pytest.mark.slow
def test_adapters_cost_a_fraction_of_the_bytes_and_find_the_kinds(capsys, monkeypatch):
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason="needs pip install 'coterie[text]'")
    path = next(p for p in EXAMPLES if p.name == "adapters.py")
    monkeypatch.syspath_prepend(str(path.parent))  # as Python does for a script
    adapted = runpy.run_path(str(path))["adapted"]((8,), 2)
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}
    assert all("lora_" in name or "head" in name for name in trained)
    runpy.run_path(str(path), run_name="__main__")
    full, small = (
        {line.split(",")[1].partition(":")[0].strip(): line for line in lines}
        for lines in (lambda out: (out[:2], out[2:]))(capsys.readouterr().out.splitlines())
    )
    megabytes = [float(re.search(r"([\d.]+) MB up", line["coterie"])[1]) for line in (full, small)]
    assert megabytes[1] < megabytes[0] / 10
    assert "K = 2, ARI 1.00" in small["coterie"]
    accuracy = {method: float(re.search(r"accuracy ([\d.]+)", line)[1]) for method, line in small.items()}
    assert accuracy["coterie"] > accuracy["fedavg"]
