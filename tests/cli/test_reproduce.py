"""`coterie reproduce`: a suite from its file to its table, interrupted, resumed, scaled and listed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.cli import reproduce as module
from coterie.methods.ifca import IFCA
from coterie.reproduce.outcome import of_result
from tests.reproduce.conftest import TEXT

from .conftest import Command

OUT = Path("runs/reproduce")


@pytest.fixture
def suite(command: Command) -> str:
    """The file of a small suite, in the folder of the command."""
    Path("tiny.toml").write_text(TEXT)
    return "tiny.toml"


def test_from_a_suite_to_its_table(command: Command, suite: str):
    done = command("reproduce", suite, "--write", "docs", "--seeds", "1")
    assert done.code == 0
    assert "80.00 → " in done.out
    assert "- Digits in place of faces." in done.out
    result = json.loads((OUT / "tiny/result.json").read_text())
    assert result == json.loads(Path("docs/tiny/result.json").read_text())
    assert (result["missing"], result["seeds"]) == ([], [0])
    assert result["command"] == "coterie reproduce tiny.toml --seeds 1"
    cells = {(cell["row"], cell["column"]): cell for cell in result["cells"]}
    assert cells["IFCA", "all"]["settings"]["algorithm.init"] == "paper"
    assert cells["IFCA", "all"]["rounds"] == 4
    summary = json.loads((OUT / "tiny/half/coterie-s0/summary.json").read_text())
    assert cells["coterie", "half"]["ours"]["accuracy"]["values"] == [100 * summary["accuracy"]["macro"]]
    assert not (OUT / "tiny/half/coterie-s0/checkpoint").exists()
    before = summary["seconds"]
    again = command("reproduce", suite, "--json", "--seeds", "1", "--jobs", "2", "--device", "cpu")  # all is there
    assert [one["suite"] for one in again.json] == ["tiny"]
    assert json.loads((OUT / "tiny/half/coterie-s0/summary.json").read_text())["seconds"] == before


def test_the_same_command_continues_after_the_limit(command: Command, suite: str, monkeypatch: pytest.MonkeyPatch):
    whole = command("reproduce", suite, "--seeds", "1", "--out", "whole", "--json").json[0]
    rounds = OUT / "tiny/all/ifca-s0/rounds.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(module, "monotonic", lambda: 99.0 if rounds.exists() else 0.0)  # over in the second run
        first = command("reproduce", suite, "--seeds", "1", "--limit-seconds", "10")
    assert first.code == 0
    assert "the time is over" in first.err
    assert "3 runs are missing; the same command continues." in first.out
    assert len(json.loads((OUT / "tiny/result.json").read_text())["missing"]) == 3
    assert (OUT / "tiny/all/ifca-s0/checkpoint").exists()  # saved in the middle
    (listed,) = command("reproduce", "--list", suite, "--json").json
    assert (listed["done"], listed["total"], listed["state"]) == (1, 8, "part")
    second = command("reproduce", suite, "--seeds", "1", "--json").json[0]
    assert second["missing"] == []
    assert [cell["ours"] for cell in second["cells"]] == [cell["ours"] for cell in whole["cells"]]


def test_a_run_that_another_suite_has_is_not_run_again(command: Command, suite: str):
    first = command("reproduce", suite, "--seeds", "1", "--json").json[0]
    Path("other.toml").write_text(TEXT.replace('label = "IFCA"', 'label = "FeSEM"').replace('"ifca"', '"fesem"'))
    (OUT / "tiny/half/global-s0/config.toml").write_text("run = 3")  # damaged: not taken
    other = command("reproduce", "other.toml", "--seeds", "1")
    assert other.code == 0
    assert "other: 2 runs are those of other suites" in other.err
    taken, own = (OUT / "other" / place / "summary.json" for place in ("all/global-s0", "half/global-s0"))
    assert taken.read_text() == (OUT / "tiny/all/global-s0/summary.json").read_text()
    assert own.read_text() != (OUT / "tiny/half/global-s0/summary.json").read_text()  # its own times
    result = json.loads((OUT / "other/result.json").read_text())
    assert result["missing"] == []
    same = [(cell["row"], cell["column"], cell["ours"]) for cell in result["cells"] if cell["row"] != "FeSEM"]
    assert same == [(cell["row"], cell["column"], cell["ours"]) for cell in first["cells"] if cell["row"] != "IFCA"]


def test_a_written_result_is_continued_in_a_fresh_folder(command: Command, suite: str):
    whole = command("reproduce", suite, "--seeds", "2", "--out", "whole", "--json").json[0]
    command("reproduce", suite, "--seeds", "1", "--write", "docs", "--out", "one")
    done = command("reproduce", suite, "--seeds", "2", "--write", "docs", "--out", "other")
    assert done.code == 0
    assert "tiny: 4 runs are in the written result" in done.err
    assert not Path("other/tiny/all/global-s0").exists()
    result = json.loads(Path("docs/tiny/result.json").read_text())
    assert result["missing"] == []
    assert [cell["ours"] for cell in result["cells"]] == [cell["ours"] for cell in whole["cells"]]
    assert [cell["runs"] for cell in result["cells"]] == [cell["runs"] for cell in whole["cells"]]


def test_a_part_of_a_table_is_added_to_what_is_written(command: Command, suite: str):
    command("reproduce", suite, "-r", "Global", "--seeds", "1", "--write", "docs", "--out", "one")
    part = command("reproduce", suite, "-r", "IFCA", "--seeds", "1-1", "--write", "docs", "--out", "two", "--json")
    assert [cell["row"] for cell in part.json[0]["cells"]] == ["IFCA"]
    result = json.loads(Path("docs/tiny/result.json").read_text())
    assert result["seeds"] == [0, 1]
    assert [(cell["row"], cell["runs"]) for cell in result["cells"]] == [
        ("Global", ["all/global-s0"]),
        ("Global", ["half/global-s0"]),
        ("IFCA", ["all/ifca-s1"]),
    ]
    assert len(result["missing"]) == 3
    assert result["command"] == "coterie reproduce tiny.toml --rows Global --rows IFCA"


def test_a_count_of_seeds_takes_the_first_of_the_suite(command: Command, suite: str):
    Path(suite).write_text(TEXT.replace("seeds = [0, 1]", "seeds = [42, 43]"))
    (result,) = command("reproduce", suite, "-r", "IFCA", "--seeds", "1", "--json").json
    assert (result["seeds"], result["cells"][0]["runs"]) == ([42], ["all/ifca-s42"])
    assert "--seeds must be a count" in command("reproduce", suite, "--seeds", "one").error


def test_a_written_run_can_be_run_again(command: Command, suite: str):
    flags = ("-r", "Global", "--seeds", "1", "--write", "docs")
    command("reproduce", suite, *flags, "--out", "one")
    path = Path("docs/tiny/result.json")
    expected = [cell["ours"] for cell in json.loads(path.read_text())["cells"]]
    path.write_text(path.read_text().replace(str(expected[0]["accuracy"]["values"][0]), "1.0"))
    kept = command("reproduce", suite, *flags, "--out", "two", "--json").json[0]
    assert kept["cells"][0]["ours"]["accuracy"]["values"] == [1.0]
    command("reproduce", suite, *flags, "--out", "three", "--again")
    assert [cell["ours"] for cell in json.loads(path.read_text())["cells"]] == expected


def test_what_is_written_is_there_even_if_the_command_is_killed(
    command: Command, suite: str, monkeypatch: pytest.MonkeyPatch
):
    from coterie.runs import batch

    def killed(*arguments: object, **options: object) -> Iterator[object]:
        for number, outcome in enumerate(run_cases(*arguments, **options)):  # type: ignore[arg-type]
            yield outcome
            if number == 1:
                raise SystemExit(9)

    run_cases = batch.run_cases
    monkeypatch.setattr(batch, "run_cases", killed)
    monkeypatch.setattr(module, "_SAVED_EVERY", 0.0)
    command("reproduce", suite, "--seeds", "1", "--write", "docs")
    result = json.loads(Path("docs/tiny/result.json").read_text())
    assert sum(len(cell["runs"]) for cell in result["cells"]) == 2
    assert len(result["missing"]) == 2


@of_result
def number_of_runs(result: dict[str, Any], runs: Path, folder: Path) -> list[Path]:
    (folder / "number.txt").write_text(str(sum(len(cell["runs"]) for cell in result["cells"])))
    return [folder / "number.txt"]


def test_figures_of_runs_that_are_elsewhere_stay_and_those_of_the_result_are_drawn(command: Command, suite: str):
    figures = f'figures = ["coterie.reproduce.figures:accuracy_by_round", "{__name__}:number_of_runs"]\n'
    Path(suite).write_text(figures + TEXT)
    command("reproduce", suite, "--seeds", "1", "--write", "docs", "--out", "one")
    before = json.loads(Path("docs/tiny/result.json").read_text())["figures"]
    assert before == ["accuracy-by-round.png", "number.txt"]
    drawn, number = (Path("docs/tiny", name).read_bytes() for name in before)
    done = command("reproduce", suite, "--seeds", "2", "--write", "docs", "--out", "other")
    assert "figures of tiny that show runs stay: 4 of its runs are not here" in done.err
    assert json.loads(Path("docs/tiny/result.json").read_text())["figures"] == before
    assert Path("docs/tiny/accuracy-by-round.png").read_bytes() == drawn
    assert (number, Path("docs/tiny/number.txt").read_bytes()) == (b"4", b"8")


def test_rows_columns_and_scale(command: Command, suite: str):
    done = command("reproduce", suite, "-r", "Global", "-r", "Magic", "-c", "half", "--scale", "0.5", "--json")
    (result,) = done.json
    assert [(cell["row"], cell["column"], cell["rounds"]) for cell in result["cells"]] == [
        ("Global", "half", 2),
        ("Magic", "half", None),
    ]
    assert result["scale"] == 0.5
    assert result["notes"][0].startswith("A quick look")
    assert (OUT / "scale-0.5/tiny/half/global-s1/summary.json").exists()
    assert not (OUT / "tiny").exists()
    assert command("reproduce", suite, "--scale", "2").error.startswith("--scale must be")


def test_missing_data_is_one_sentence_and_the_other_suites_are_run(command: Command, suite: str, tmp_path: Path):
    arguments = ("--data-dir", tmp_path / "data", "--seeds", "1", "-q")
    alone = command("reproduce", "md_icfl/table4", *arguments).error
    assert alone.startswith(f"md_icfl/table4: There is no mnist in {tmp_path / 'data'} (expected mnist.npz")
    Path("needy.toml").write_text(TEXT.replace("seeds =", 'data = ["cifar100"]\nseeds ='))
    both = command("reproduce", "needy.toml", suite, *arguments)
    assert both.code == 2
    assert "needy: There is no cifar100" in both.err
    assert "80.00 → " in both.out


def test_runs_with_other_settings_are_not_mixed(command: Command, suite: str):
    command("reproduce", suite, "--seeds", "1", "-r", "Global", "-c", "all")
    Path(suite).write_text(TEXT.replace("work.epochs = 1", "work.epochs = 2"))
    assert (
        "work.epochs is 1 there and 2 here. Choose another --out" in command("reproduce", suite, "--seeds", "1").error
    )


def test_a_failed_run_is_reported_and_the_others_are_there(
    command: Command, suite: str, monkeypatch: pytest.MonkeyPatch
):
    def fails(*_: object) -> None:
        raise ValueError("no luck")

    monkeypatch.setattr(IFCA, "start", fails)
    done = command("reproduce", suite, "--seeds", "1", "-c", "all", "-q")
    assert done.code == 1
    assert "1 of 2 runs failed. IFCA, all, seed 0 failed: IFCA.start failed (" in done.err
    assert "): ValueError: no luck" in done.err
    assert "80.00 → " in done.out


def test_the_list_shows_every_suite_without_importing_torch(command: Command, tmp_path: Path):
    code = (
        "import sys; from coterie.cli.main import main\n"
        "try: main(['reproduce', '--list', '--json', '--data-dir', 'data'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    listed = {one["name"]: one for one in json.loads(done.stdout)}
    assert list(listed)[:3] == ["md_icfl/table4", "md_icfl/table5", "md_icfl/table6"]  # by priority
    assert listed["md_icfl/table5"]["missing"] == ["mnist", "usps", "svhn", "sign"]
    assert {one["state"] for one in listed.values()} == {"not started"}
    assert listed["md_icfl/table4"]["total"] == 63
    assert [listed[f"md_icfl/{name}"]["gpu"] for name in ("table1", "tables1-3-lenet")] == [True, False]


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_a_gpu_a_suite_that_needs_one_must_be_named_itself(
    command: Command, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    Path("empty").mkdir()
    flags = ("--data-dir", "empty", "--device", "auto")
    every = command("reproduce", "md_icfl", *flags)
    assert "md_icfl/table4: There is no mnist" in every.err
    assert ("md_icfl/table1: There is no cifar10" in every.err) == has_gpu
    assert ("left out, as one run takes a day or more without a GPU: md_icfl/table1, " in every.err) != has_gpu
    own = command("reproduce", "md_icfl/table1", *flags)
    assert "md_icfl/table1: There is no cifar10" in own.err
    assert "left out" not in own.err


def test_the_list_knows_written_results(command: Command, suite: str):
    command("reproduce", suite, "--write", "docs/results", "-q")
    (OUT / "tiny").rename("elsewhere")
    (one,) = command("reproduce", "--list", suite, "--json").json
    assert (one["done"], one["total"], one["state"]) == (8, 8, "done")
    assert one["date"][:4] == str(time.gmtime().tm_year)
    assert "8/8" in command("reproduce", "--list", suite).out


def test_a_suite_must_be_named(command: Command):
    assert command("reproduce").error == "Name a suite, or 'all'; 'coterie reproduce --list' lists them."


def test_figures_are_named_in_what_is_written(command: Command, suite: str):
    text = Path(suite).read_text()
    Path(suite).write_text(f'figures = ["coterie.reproduce.figures:accuracy_by_round"]\n{text}')
    done = command("reproduce", suite, "--write", "docs", "--seeds", "1", "-r", "Global")
    assert done.code == 0
    assert json.loads(Path("docs/tiny/result.json").read_text())["figures"] == ["accuracy-by-round.png"]
    assert "![accuracy by round](accuracy-by-round.png)" in Path("docs/tiny/table.md").read_text()
    assert Path("docs/tiny/accuracy-by-round.png").is_file()
    Path(suite).write_text(f'figures = ["coterie.reproduce.figures:features"]\n{text}')
    failed = command("reproduce", suite, "--write", "docs", "--seeds", "1", "-r", "Global")  # the models are gone
    assert failed.code == 0
    assert "no figures of tiny: " in failed.err
    assert json.loads(Path("docs/tiny/result.json").read_text())["figures"] == ["accuracy-by-round.png"]  # as before


def test_the_leaderboard_is_written_beside_the_results(command: Command, suite: str):
    rows = ("-r", "Global", "-r", "IFCA", "-c", "all")  # a cell with FedAvg alone is not on the board
    command("reproduce", suite, "--write", "docs/results/own", "--seeds", "1", *rows)
    done = command("reproduce", "--leaderboard")
    assert done.code == 0
    assert "written: docs/results/leaderboard.html" in done.out.replace("\n", "")
    assert "fedavg" in Path("docs/results/leaderboard.html").read_text()
    assert command("reproduce", "--leaderboard", "--results", "nowhere").error.startswith("nowhere has no results.")
