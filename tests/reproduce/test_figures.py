"""Figures: what is drawn from the runs of a tiny suite on digits is what the runs have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from coterie.reproduce import figures
from coterie.reproduce.outcome import draw, read_runs, result_of
from coterie.reproduce.suite import cases_of, find_suites, read_suite, settings_of
from coterie.runs.batch import run_cases
from coterie.runs.reading import read_run
from coterie.views.plots.style import LIGHT

TEXT = """
paper = "A paper (2020)"
title = "Figure 1: digits"
seeds = [0, 1]
metrics = ["accuracy", "ari"]
keep_models = true

[base]
run.dataset = "rotated-digits"
run.clients = 8
run.rounds = 3
work.epochs = 1
scenario.samples = 80
scenario.quantity = 4.0

[[columns]]
name = "K = 2"
work.lr = 0.05
algorithm.num_clusters = 2

[[columns]]
name = "K = 4"
algorithm.num_clusters = 4

[[rows]]
label = "FedAvg"
method = "fedavg"
published.accuracy = [80.0, nan]

[[rows]]
label = "FeSEM"
method = "fesem"

[[rows]]
label = "FeSEM, our start"
method = "fesem"
mode = "ours"

[[rows]]
label = "MD-ICFL"
method = "md_icfl"
mode = "ours"
columns = ["K = 4"]
algorithm.iterations = 5
algorithm.pseudo_samples = 4
algorithm.witness_rounds = 1
"""
FUNCTIONS = sorted({name.partition(":")[2] for suite in find_suites(["all"]) for name in suite.figures})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The result of the suite, and the folder of its runs."""
    root = tmp_path_factory.mktemp("figures")
    (root / "tiny.toml").write_text(TEXT)
    suite = read_suite(root / "tiny.toml", "tiny")
    cells = suite.chosen()
    spots = suite.spots(cells, suite.seeds)
    cases = cases_of(suite, spots, lambda case: 4, device="cpu")
    assert [outcome.problem for outcome in run_cases(cases, root)] == [None] * len(cases)

    def settings(row, column) -> dict[str, Any]:
        tables = settings_of(suite, row, column)
        return {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}

    found = read_runs(root, spots)
    return result_of(suite, cells, suite.seeds, found, command="coterie reproduce tiny.toml", settings=settings), root


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that were written, by the name of their file."""
    written: dict[str, Figure] = {}
    save = figures.save

    def record(figure: Figure, stem: Path, kinds: Any) -> list[Path]:
        written[stem.name] = figure
        return save(figure, stem, kinds)

    monkeypatch.setattr(figures, "save", record)
    return written


def lines(axes: Any) -> list[Any]:
    """The lines with points: those for the legend have none."""
    return [line for line in axes.lines if len(line.get_xdata())]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_figure_of_a_suite_is_a_small_file(name: str, made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    paths = getattr(figures, name)(result, runs, tmp_path)
    assert [path.stem for path in paths] == list(drawn)
    assert paths
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 200_000


@pytest.mark.parametrize("name", FUNCTIONS)
def test_without_runs_nothing_is_drawn(name: str, made: Any, tmp_path: Path):
    result, runs = made
    cells = [cell | {"runs": [], "ours": {}} for cell in result["cells"]]
    assert getattr(figures, name)(result | {"cells": cells}, runs, tmp_path) == []


def test_accuracy_by_round_has_a_line_for_every_row(made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    figures.accuracy_by_round(result, runs, tmp_path)
    first, second = drawn["accuracy-by-round"].axes
    assert [axes.get_title() for axes in (first, second)] == ["K = 2", "K = 4"]
    assert (len(lines(first)), len(lines(second))) == (3, 4)
    names = [text.get_text() for text in second.get_legend().get_texts()]
    assert names == ["FedAvg", "FeSEM", "FeSEM, our start", "MD-ICFL"]
    cell = result["cells"][0]
    mean = np.mean([read_run(runs / place).curves["accuracy_micro"] for place in cell["runs"]], axis=0)
    assert len(cell["runs"]) == 2
    np.testing.assert_allclose(lines(first)[0].get_ydata(), mean)
    assert lines(first)[0].get_xdata().tolist() == [1, 2, 3]


def test_the_published_one_of_two_rows_is_dashed_and_coterie_is_black(made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    figures.accuracy_by_clusters(result, runs, tmp_path)
    published, ours = lines(drawn["accuracy-by-round"].axes[0])
    assert (published.get_linestyle(), ours.get_linestyle()) == ("--", "-")
    assert published.get_color() == ours.get_color()
    cells = [cell | {"method": "coterie"} if cell["method"] == "fedavg" else cell for cell in result["cells"]]
    figures.accuracy_by_round(result | {"cells": cells}, runs, tmp_path)
    assert to_hex(lines(drawn["accuracy-by-round"].axes[0])[0].get_color()) == LIGHT.ink


def test_rounds_to_reach_counts_from_the_accuracy_of_fedavg(made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    figures.rounds_to_reach(result, runs, tmp_path)
    axes = drawn["rounds-to-reach"].axes[0]
    marks = {one.get_label(): one.get_offsets() for one in axes.collections}
    accuracy = lambda cell: np.mean([read_run(runs / p).curves["accuracy_micro"] for p in cell["runs"]], axis=0)  # noqa: E731
    cells = [cell for cell in result["cells"] if cell["column"] == "K = 2"]
    goal = accuracy(cells[0]).mean()  # three rounds: all of them are among the five best
    expected = {cell["row"]: np.flatnonzero(accuracy(cell) >= goal)[:1] + 1 for cell in cells}
    rows = [text.get_text() for text in axes.get_yticklabels()]
    found = {rows[int(place)]: [int(round)] for round, place in marks["as accurate"]}
    assert found == {row: value.tolist() for row, value in expected.items() if len(value)}
    assert len(found) + len(marks["not as accurate"]) == len(cells)
    assert len(marks["5 points less"]) >= len(found)


def test_accuracy_by_column_has_points_and_published_marks(made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    figures.accuracy_by_column(result, runs, tmp_path)
    accuracy, ari = drawn["accuracy-by-k"].axes
    assert (accuracy.get_xlabel(), accuracy.get_ylabel(), ari.get_ylabel()) == ("K", "accuracy, %", "ARI")
    by_row = {bar.get_label(): bar.lines[0] for bar in accuracy.containers}
    assert list(by_row) == ["FedAvg", "FeSEM", "FeSEM, our start", "MD-ICFL"]
    means = [cell["ours"]["accuracy"]["mean"] for cell in result["cells"] if cell["row"] == "FeSEM"]
    assert by_row["FeSEM"].get_xdata().tolist() == [2, 4]
    assert by_row["FeSEM"].get_ydata().tolist() == means
    (published,) = (one for one in accuracy.collections if one.get_gid() == "published")
    assert published.get_offsets().tolist() == [[2, 80]]


def test_bytes_of_300_rounds_follow_from_the_last_one(made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    figures.bytes_by_network(result, runs, tmp_path)
    axes = drawn["bytes-by-network"].axes[0]
    rows = [text.get_text() for text in axes.get_yticklabels()]
    widths = {rows[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in axes.patches}
    fedavg = result["cells"][0]
    assert widths["FedAvg"] == pytest.approx(100 * fedavg["bytes"]["mean"] / 1e9)  # three rounds alike, no start
    assert widths["FeSEM, our start"] > widths["FedAvg"]  # its start is sent once
    assert widths["FeSEM, our start"] < 1.5 * widths["FedAvg"]


def test_pseudo_samples_are_shown_by_true_group(made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    figures.pseudo_confusion(result, runs, tmp_path)
    (figure,) = drawn.values()
    panels = [axes for axes in figure.axes if axes.get_title()]
    (cell,) = (cell for cell in result["cells"] if cell["method"] == "md_icfl")
    groups = {group for place in cell["runs"] for group, _ in figures._witnesses(read_run(runs / place))}
    assert [axes.get_title().partition(":")[0] for axes in panels] == sorted(groups)
    for axes in panels:
        values = axes.images[0].get_array()
        np.testing.assert_allclose(values.sum(1), 1.0, atol=1e-5)
        assert axes.get_title().endswith(f"{np.diag(values).mean():.2f}")


def test_pictures_of_clusters_are_of_the_right_number_of_clusters(made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    figures.local_models(result, runs, tmp_path)
    assert list(drawn) == ["map-fesem", "map-fesem-our-start"]
    assert drawn["map-fesem"].texts[0].get_text() == "K = 4: local models of FeSEM, seed 0"
    (axes,) = drawn["map-fesem"].axes
    assert sum(len(one.get_offsets()) for one in axes.collections) == 8
    figures.member_samples(result, runs, tmp_path)
    assert drawn["members-fesem"].texts[0].get_text() == "K = 2: samples of members of FeSEM, seed 0"


def test_features_are_those_of_two_clients_by_every_row(made: Any, drawn: Any, tmp_path: Path):
    result, runs = made
    cells = [cell for cell in result["cells"] if cell["column"] == "K = 4"]
    figures.features(result | {"cells": cells}, runs, tmp_path)
    sizes = read_run(runs / cells[0]["runs"][0]).samples
    assert sizes is not None
    for name, size in (("features-most", sizes.max()), ("features-few", sizes[sizes >= 60].min())):
        panels = drawn[name].axes
        assert [axes.get_title().partition(":")[0] for axes in panels] == [cell["row"] for cell in cells]
        assert {sum(len(one.get_offsets()) for one in axes.collections) for axes in panels} == {size}


def test_a_suite_draws_its_figures(made: Any, tmp_path: Path):
    result, runs = made
    lines = 'figures = ["coterie.reproduce.figures:accuracy_by_round", "coterie.reproduce.figures:held_labels"]'
    (tmp_path / "tiny.toml").write_text(f"{lines}\n{TEXT}")
    paths = draw(read_suite(tmp_path / "tiny.toml", "tiny"), json.loads(json.dumps(result)), runs, tmp_path / "out")
    assert [path.name for path in paths] == ["accuracy-by-round.png", "labels-k-2.png", "labels-k-4.png"]
    assert all(path.is_file() for path in paths)
