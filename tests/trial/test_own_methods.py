"""A new user's trial of "a method of my own": what they write, the command they try, and what comes of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import coterie
from coterie.runs.files import Files
from tests.cli.conftest import Command

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ("--clients", 8, "--rounds", 2, "--epochs", 1, "--quiet", "--set", "engine.plan=stacked")

METHOD = """
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

import coterie
from coterie import Algorithm, Answer, CenterSums, ClusterState, client_step


@client_step
def work_at_home(block, models, work):
    return Answer(params=block.train(models, work), samples=block.samples)


@dataclass(frozen=True)
class Mine(Algorithm):
    key: ClassVar[str] = "mine"

    def start(self, task, engine, rng):
        return ClusterState.common_start(engine, num_clusters=1)

    def round(self, state, engine, cohort, rng):
        sums, labels = CenterSums(1, like=state.centers), state.labels.clone()
        rows = torch.zeros_like(cohort)
        for chunk in engine.call(work_at_home, cohort, models=state.centers, refs=rows, rng=rng):
            sums.add(chunk.answer.params, torch.zeros_like(chunk.clients), chunk.answer.samples)
            labels[chunk.clients] = 0
        return replace(state, centers=sums.means(keep=state.centers), labels=labels)
"""
RETURNED = "return replace(state, centers=sums.means(keep=state.centers), labels=labels)"
ANSWERED = "return Answer(params=block.train(models, work), samples=block.samples)"
ROUND, STEP = "    def round(", "def work_at_home("  # where a wrong state or answer comes from


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a method to mine.py, which no other test has imported."""

    def write(text: str) -> None:
        (tmp_path / "mine.py").write_text(text)
        monkeypatch.delitem(sys.modules, "mine", raising=False)

    return write


def test_the_documented_way(command: Command, written):
    written(METHOD)
    done = command("run", "-a", "mine:Mine", *QUICK, "--json").json
    assert done["algorithm"] == "mine:Mine"
    assert done["clients_met"] == 8
    assert "labels" not in " ".join(done["notes"])


KEEPING = """\
from dataclasses import dataclass
from coterie.methods.parts.own_parts import OwnParts, named
@dataclass(frozen=True)
class Mine(OwnParts):
    key = 'mine'
    keeps = named('1.*')
"""


def test_a_method_that_declares_what_stays_with_the_clients(command: Command, written):
    written(KEEPING)
    mine = command("run", "-a", "mine:Mine", *QUICK, "--json").json
    whole = command("run", "-a", "fedavg", *QUICK, "--json").json
    # mlp on 8 x 8 digits: 64 x 200 + 200 of its 64 x 200 + 200 + 200 x 10 + 10 parameters stay at home
    assert mine["bytes"]["up"] / whole["bytes"]["up"] == pytest.approx(2010 / 15010, rel=0.02)
    written(KEEPING.replace("'1.*'", "'first.*'"))
    assert command("run", "-a", "mine:Mine", *QUICK).error.startswith("No parameter is named first.*. The network has")


def test_centers_are_exported_without_the_code_of_the_method(command: Command, written):
    written(METHOD)
    command("run", "-a", "mine:Mine", "--name", "a", *QUICK)
    assert command("export", "runs/a", "--cluster", 0, "-o", "trusted.safetensors", "--trust").code == 0
    Path("mine.py").unlink()
    done = command("export", "runs/a", "--cluster", 0, "-o", "m.safetensors")
    assert done.code == 0, done.err
    found, trusted = load_file("m.safetensors"), load_file("trusted.safetensors")
    assert found.keys() == trusted.keys()
    assert all(torch.equal(found[name], trusted[name]) for name in found)


def test_centers_without_what_clients_keep_need_the_method(command: Command, written):
    written(KEEPING)
    command("run", "-a", "mine:Mine", "--name", "a", *QUICK)
    said = command("export", "runs/a", "--cluster", 0).error
    assert "run.algorithm = 'mine:Mine'. Say --trust (in Python trust=True)" in said
    assert command("export", "runs/a", "--cluster", 0, "--trust").code == 0


# what is wrong -> what is said, where from
WRONG = {
    "no state": ((RETURNED, "pass"), r"Mine\.round \({}\) must return a ClusterState\. Got NoneType instead\.", ROUND),
    "centers of another shape": (
        (RETURNED, "return replace(state, centers=state.centers[:, :3])"),
        r"Mine\.round \({}\) returned a wrong state: centers is torch\.float32 of shape \(1, 3\), not .*",
        ROUND,
    ),
    "labels of another type": (
        (RETURNED, "return replace(state, labels=labels.float())"),
        r"Mine\.round \({}\) returned a wrong state: labels is torch\.float32 .*",
        ROUND,
    ),
    "labels out of range": (
        (RETURNED, "return replace(state, labels=labels + 99)"),
        r"Mine\.round \({}\) returned a wrong state: labels are out of range: 99, with 1 cluster \(-1 to 0\)\.",
        ROUND,
    ),
    "labels of a cluster without a center": (
        (RETURNED, "return replace(state, labels=labels + 1)"),
        r"Mine\.round \({}\) returned a wrong state: labels are out of range: 1, with 1 cluster \(-1 to 0\)\.",
        ROUND,
    ),
    "labels of a client that is not there": (
        (RETURNED, "return replace(state, centers=state.centers[:0], labels=labels + 8)"),
        r"Mine\.round \({}\) returned a wrong state: labels are out of range: 8, with 8 clients and no centers .*",
        ROUND,
    ),
    "one center without its axis": (
        (RETURNED, "return replace(state, centers=state.centers[0])"),
        r"Mine\.round \({}\) .* of shape \(4810,\), not torch\.float32 of \(K, 4810\)\.",
        ROUND,
    ),
    "centers that are not finite": (
        (RETURNED, "return replace(state, centers=state.centers * float('nan'), labels=labels)"),
        r"Mine\.round \({}\) returned a wrong state: centers are not finite\.",
        ROUND,
    ),
    "models that are not there": (
        ("rows = torch.zeros_like(cohort)", "rows = torch.ones_like(cohort)"),
        r"refs of work_at_home must be rows of models, 0 to 0\. Got 1 instead\.",
        None,
    ),
    "an own state that is not declared": (
        (RETURNED, "return type('Own', (ClusterState,), {})(state.common, state.centers, labels)"),
        r"Mine\.round \({}\) must return a ClusterState\. Got Own instead; set state_type .*",
        ROUND,
    ),
    "no answer": (
        (ANSWERED, "block.train(models, work)"),
        r"work_at_home \({}\) must return a coterie\.Answer\. Got NoneType instead\.",
        "@client_step\n",
    ),
    "an answer of numbers": (
        (ANSWERED, "return Answer(params=block.train(models, work), samples=3)"),
        r"work_at_home \({}\) must answer with tensors\. Got int for 'samples' instead\.",
        "@client_step\n",
    ),
    "an answer for nobody": (
        (ANSWERED, "return Answer(params=block.train(models, work).mean(0), samples=block.samples)"),
        r"work_at_home \({}\) answered 'params' of shape \(\d+,\) for \d+ clients; .*",
        "@client_step\n",
    ),
    "an undecorated step": (
        ("@client_step\n", "\n"),
        r"work_at_home \({}\) is not a client step; decorate the function with @coterie\.client_step\.",
        STEP,
    ),
    "a tensor that was not answered": (
        ("chunk.answer.samples)", "chunk.answer.weights)"),
        r"Mine\.round failed \({}\): AttributeError: the answer has no 'weights'; it has params, samples",
        "sums.add(",
    ),
    "a mistake in the step": (
        (ANSWERED, "return Answer(params=block.trane(models, work))"),
        r".*work_at_home failed at every client: AttributeError: .* \({}\)",
        "return Answer(params=block.trane",
    ),
    "a mistake before the first round": (
        ("return ClusterState.common_start(engine, num_clusters=1)", "return 1 / 0"),
        r"Mine\.start failed \({}\): ZeroDivisionError: division by zero",
        "return 1 / 0",
    ),
    "a mistake in the file": (
        ("import torch\n", "import torch\n\ntorch.nothing_like_it\n"),
        r"algorithm mine:Mine cannot be imported: AttributeError: .* \({}\)\.",
        "torch.nothing_like_it",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_is_one_sentence(command: Command, written, what: str):
    change, said, place = WRONG[what]
    text = METHOD.replace(*change)
    assert text != METHOD
    written(text)
    expected = said.format(re.escape(f"mine.py, line {line_of(text, place)}") if place else "")
    assert re.fullmatch(expected, command("run", "-a", "mine:Mine", *QUICK).error)


def test_debug_gives_the_traceback(command: Command, written):
    written(METHOD.replace(RETURNED, "raise ValueError('hello')"))
    for words in (("--debug", "run"), ("run", "--debug")):
        done = command(*words, "-a", "mine:Mine", *QUICK)
        assert done.code == 2
        assert "Traceback" in done.err
        assert "raise ValueError('hello')" in done.err
        assert done.err.splitlines()[-1].startswith("error: Mine.round failed (mine.py, line ")


def test_a_function_that_is_missing_is_named(command: Command, written):
    written(METHOD.replace("def start(", "def begin("))
    assert command("run", "-a", "mine:Mine", *QUICK).error == "algorithm mine:Mine has no start; write that function."


def test_a_method_that_never_sets_labels_is_told(command: Command, written):
    written(METHOD.replace("            labels[chunk.clients] = 0\n", ""))
    notes = command("run", "-a", "mine:Mine", *QUICK, "--json").json["notes"]
    assert [note for note in notes if note.startswith("Mine never sets labels")]


def test_where_nobody_answers_labels_are_not_the_reason(command: Command, written):
    written(METHOD)
    notes = command("run", "-a", "mine:Mine", "--lr", "1e30", *QUICK, "--json").json["notes"]
    assert not [note for note in notes if "never sets labels" in note]


# ---- the personalized example ----


@pytest.fixture
def blend(command: Command, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return "own_personalized:Blend"


def test_the_personalized_example_on_the_command_line(command: Command, blend: str):
    run = ("run", "-a", blend, "--clients", 8, "--rounds", 4, "--quiet", "--set", "engine.precision=float64")
    loop, fast = (
        command(*run, "--engine", engine, "--name", engine, "--json").json for engine in ("loop", "vectorized")
    )
    assert loop["accuracy"]["macro"] == pytest.approx(fast["accuracy"]["macro"])
    assert fast["bytes"]["up"] == fast["bytes"]["down"]  # the own model is never sent
    said = command("export", "runs/loop", "--all").error  # the method says what clients are served with
    assert said.endswith("or give your own method again (in Python algorithm=...).")


def test_it_resumes_with_what_clients_remember(command: Command, blend: str):
    run = ("run", "-a", blend, "--clients", 8, "--quiet", "--set", "engine.plan=stacked")
    whole = command(*run, "--rounds", 4, "--name", "whole", "--json").json
    command(*run, "--rounds", 2, "--name", "half")
    folder = Files(Path("runs/half"))
    (folder.path / "summary.json").unlink()
    config = folder.path / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    assert "would import code" in command("resume", "runs/half").error
    again = command("resume", "runs/half", "--trust", "--override", "--json").json
    assert again["loss"] == whole["loss"]


def test_both_models_have_a_say(blend: str):
    from own_personalized import Blend

    scores = {
        name: coterie.run(method, "rotated-digits", rounds=20).summary["accuracy"]["macro"]
        for name, method in (("local", "local"), ("fedavg", "fedavg"), ("blend", Blend()))
    }
    assert scores["blend"] > max(scores["local"], scores["fedavg"])
