"""The leaderboard, from results written by hand: order, means, variants, escaping, and what is missing."""

from __future__ import annotations

import builtins
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import RunError
from coterie.reproduce.leaderboard import (
    Place,
    board_figure,
    board_html,
    index_text,
    lines_of,
    read_results,
    write_board,
)

MACHINE = {"platform": "Linux", "processor": "x86_64", "threads": 2, "gpu": None, "torch": "2", "python": "3"}
ACCURACY = {"accuracy": {"label": "accuracy, %", "digits": 2, "better": "high"}}


def cell(
    method: str, accuracy: float | None, column: str = "all", *, mode: str = "paper", sent: float = 100.0, **more: Any
) -> dict[str, Any]:
    ours = {} if accuracy is None else {"accuracy": {"mean": accuracy, "std": 0.5, "n": 2, "values": [accuracy] * 2}}
    published = more.pop("published", {})
    row = {
        "row": method,
        "column": column,
        "method": method,
        "mode": mode,
        "settings": {},
        "published": published,
        "ours": ours,
        "difference": {key: ours[key]["mean"] - value for key, value in published.items() if key in ours},
        "bytes": None if accuracy is None else {"mean": sent},
        "runs": [] if accuracy is None else [f"{method}-s0", f"{method}-s1"],
    }
    return row | more


def result(suite: str, *cells: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "suite": suite,
        "paper": f"Paper of {suite.partition('/')[0]}",
        "title": f"Title of {suite}",
        "date": "2026-11-16T10:00:00",
        "machine": MACHINE,
        "scale": 1,
        "seeds": [0, 1],
        "notes": [],
        "metrics": ACCURACY,
        "cells": list(cells),
        "means": [],
        "missing": [],
        "figures": [],
    } | more


@pytest.fixture
def two() -> list[dict[str, Any]]:
    """Two suites; IFCA is missing in one cell."""
    return [
        result(
            "a/table1",
            cell("fedavg", 80.0, published={"accuracy": 81.0}),
            cell("ifca", 90.0, sent=250.0, published={"accuracy": 88.5}),
            cell("ifca", 95.0, mode="ours", sent=300.0),
            cell("local", 80.0, sent=0.0),
            cell("fedavg", 70.0, "half"),
            cell("ifca", None, "half", published={"accuracy": 77.0}),
            cell("local", 65.0, "half", sent=0.0),
            missing=[{"row": "ifca", "column": "half", "seed": 0}],
        ),
        result("b/table2", cell("fedavg", 60.0, sent=10.0), cell("ifca", 50.0, sent=15.0)),
    ]


def write(folder: Path, results: list[dict[str, Any]]) -> None:
    for one in results:
        (folder / one["suite"]).mkdir(parents=True, exist_ok=True)
        (folder / one["suite"] / "result.json").write_text(json.dumps(one))


def test_lines_are_ordered_by_their_mean_regret(two: list[dict[str, Any]]):
    lines = {(line.method, line.mode): line for line in lines_of(two)}
    assert list(lines) == [("ifca", "ours"), ("fedavg", "paper"), ("ifca", "paper"), ("local", "paper")]
    fedavg, ifca = lines["fedavg", "paper"], lines["ifca", "paper"]
    assert (fedavg.regret, ifca.regret) == (pytest.approx((15 + 0 + 0) / 3), pytest.approx((5 + 10) / 2))
    assert fedavg.rank == pytest.approx((3.5 + 1 + 1) / 3)  # two with 80.0 share the third and fourth place
    assert (fedavg.share, ifca.share) == (1, pytest.approx((2.5 + 1.5) / 2))
    assert lines["local", "paper"].share == 0


def test_a_missing_cell_counts_for_nothing(two: list[dict[str, Any]]):
    ifca = next(line for line in lines_of(two) if (line.method, line.mode) == ("ifca", "paper"))
    assert list(ifca.entries) == [Place("a/table1", "all"), Place("b/table2", "all")]
    entry = ifca.entries[Place("a/table1", "all")]
    assert (entry.published, entry.difference) == (88.5, 1.5)


def test_cells_without_fedavg_and_figures_are_not_on_the_board():
    rows = [cell("fedavg", 80.0), cell("ifca", 90.0), cell("ifca", 91.0, "K = 2"), cell("fedavg", None, "K = 2")]
    rows += [cell("fedavg", 82.0, "alone"), cell("ifca", None, "alone")]
    results = [result("a/t", *rows), result("a/figures-x", *rows)]
    lines = lines_of(results)
    assert [(line.method, list(line.entries)) for line in lines] == [
        ("ifca", [Place("a/t", "all")]),
        ("fedavg", [Place("a/t", "all")]),
    ]
    page = board_html(results, lines, None)
    assert "K = 2" not in page
    assert "alone" not in page
    assert "figures-x" in page  # in the list of suites


def test_a_line_whose_bytes_are_not_known_has_no_share():
    lines = lines_of([result("a/t", cell("fedavg", 80.0), cell("ifca", 90.0, bytes=None))])
    assert [(line.method, line.share) for line in lines] == [("ifca", None), ("fedavg", 1)]


def test_rows_of_one_method_and_mode_are_told_apart_by_their_settings():
    rows = [
        cell("fedavg", 60.0),
        cell("fesem", 80.0, row="FeSEM(2)", settings={"algorithm.num_clusters": 2, "algorithm.init": "paper"}),
        cell("fesem", 82.0, row="FeSEM(4)", settings={"algorithm.num_clusters": 4, "algorithm.init": "random"}),
        cell("md_icfl", 70.0, row="MD-ICFL-1", settings={"run.rounds": 3}),
        cell("md_icfl", 71.0, row="MD-ICFL-2", settings={"run.rounds": 3, "algorithm.sampler": "generator"}),
    ]
    names = {(line.name, line.short) for line in lines_of([result("a/t", *rows)])}
    assert names == {
        ("fedavg", "fedavg"),
        ("fesem (num_clusters=2)", "FeSEM(2)"),
        ("fesem (num_clusters=4)", "FeSEM(4)"),
        ("md_icfl", "md_icfl"),
        ("md_icfl (sampler=generator)", "MD-ICFL-2"),
    }


def test_rows_that_are_only_published_and_suites_without_metrics_have_no_line():
    published = cell("magic", None, published={"accuracy": 99.0}) | {"method": None}
    measured = cell("fedavg", 50.0), cell("local", 40.0)
    bare = result("a/bytes", cell("fedavg", None), cell("local", None), metrics={})
    assert [line.method for line in lines_of([result("a/t", published, *measured), bare])] == ["fedavg", "local"]


def test_a_stand_in_has_no_difference():
    easy = cell("fedavg", 90.0, published={"accuracy": 70.0}) | {"difference": {}}
    results = [result("a/t", easy, cell("local", 60.0))]
    assert "90.00<small>70.00</small></td>" in board_html(results, lines_of(results), None)


def test_the_page_shows_ours_published_and_difference(two: list[dict[str, Any]]):
    page = board_html(two, lines_of(two), None)
    rows = re.findall(r"<tr><td>(.*?)</tr>", page)
    assert rows[0].startswith('ifca <span class="dim">ours</span></td><td class="number" data-value="1">1</td>')
    assert "90.00<small>88.50 +1.50</small></td>" in page
    assert page.count("<th class") == 4 + 3
    assert '<td class="number best" data-value="95" data-regret="0" data-rank="1" data-share="3"' in page
    assert "<option>Paper of a</option><option>Paper of b</option>" in page
    assert "12 of 13 runs" in page
    assert "+1.50 (ifca, all)" in page
    assert "http" not in page.replace("http-equiv", "")


def test_texts_are_escaped():
    bad = "<script>alert(1)</script>\"'"
    evil = cell("fedavg", 80.0, bad, published={"accuracy": 1.0}, row=bad) | {"mode": bad}
    one = result(
        bad, evil, cell("local", 70.0, bad), paper=bad, title=bad, date=bad, seeds=[bad], machine=MACHINE | {"gpu": bad}
    )
    page = board_html([one], lines_of([one]), None)
    assert "<script>alert" not in page
    assert page.count("<script>") == 1
    assert bad in unescape(page)
    assert not re.search(r'(title|data-paper|href)="[^"]*<', page)


def test_the_list_of_suites(two: list[dict[str, Any]]):
    quick = result("c/t", cell("fedavg", 50.0, published={"accuracy": 52.0}), scale=0.1)
    text = index_text([*two, quick])
    assert (
        "| [a/table1](a/table1/table.md) | Paper of a. Title of a/table1 | 12 of 13 runs | 0, 1 | 2026-11-16 |" in text
    )
    assert "| x86_64, 2 threads a run | +1.50 (ifca, all) |" in text
    assert "| all 2 runs, quick look (scale 0.1) |" in text
    assert text.rstrip().endswith("| -2.00 (fedavg, all) |")


def test_a_part_of_a_shipped_suite_is_not_called_all_of_it():
    text = index_text([result("md_icfl/table4", cell("fedavg", 91.0, "R = 1"))])
    assert "| 2 of 63 runs |" in text


def test_the_figure_has_a_point_for_every_line_and_a_dot_for_every_cell(two: list[dict[str, Any]]):
    lines = lines_of(two)
    (axes,) = board_figure(lines).axes
    dots = [one.get_offsets() for one in axes.collections if one.get_gid() == "cells"]
    assert sum(map(len, dots)) == sum(len(line.entries) for line in lines)
    assert sorted(text.get_text() for text in axes.texts) == ["fedavg", "ifca", "ifca", "local"]
    points = {tuple(text.xy) for text in axes.texts}
    assert (3.0, 0.0) in points  # IFCA of ours: three times FedAvg's bytes, and the best of its only cell
    left = min(x for x, _ in points)
    assert axes.get_xticklabels()[0].get_text() == "nothing"
    assert axes.get_xticks()[0] == left


def test_everything_is_written_beside_the_results(two: list[dict[str, Any]], tmp_path: Path):
    write(tmp_path, two)
    files, problem = write_board(tmp_path)
    assert [path.name for path in files] == ["leaderboard.html", "leaderboard.png", "leaderboard.svg", "tables.md"]
    assert problem == ""
    assert "data:image/png;base64," in files[0].read_text()
    assert write_board(tmp_path)[0] == files  # its own files are no results


def test_without_matplotlib_there_is_a_page_without_a_figure(
    two: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    write(tmp_path, two)
    monkeypatch.setattr(builtins, "__import__", without)
    files, problem = write_board(tmp_path)
    assert [path.name for path in files] == ["leaderboard.html", "tables.md"]
    assert "coterie[report]" in problem
    assert "data:image" not in files[0].read_text()


def test_a_result_of_another_schema_is_an_error_that_names_it(two: list[dict[str, Any]], tmp_path: Path):
    write(tmp_path, [*two, result("c/t") | {"schema": 9}])
    with pytest.raises(RunError, match=r"c/t/result\.json has schema 9"):
        read_results(tmp_path)


def test_a_folder_without_results_says_how_to_make_some(tmp_path: Path):
    with pytest.raises(RunError, match="has no results. 'coterie reproduce SUITE --write"):
        read_results(tmp_path / "nothing")
