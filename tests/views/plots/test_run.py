"""Pictures of runs: what is drawn is what the run has."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

import coterie
from coterie.errors import ConfigError, DataError, MissingExtra, UnknownName
from coterie.runs.reading import read_run
from coterie.views import plots
from coterie.views.plots.style import OKABE_ITO
from coterie.views.report.page import static
from tests.views.report.made import make_run, row_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = make_run(tmp_path, clients=12, clusters=3, rounds=6)
    told = np.stack([np.stack([np.eye(3) * 0.8 + 0.05] * 2)] * 2).astype(np.float32)
    pseudo = np.random.default_rng(0).integers(0, 256, (2, 3, 2, 4, 4, 1), dtype=np.uint8)
    np.savez(found / "artifacts" / "method.npz", told=told, pseudo=pseudo)
    return found


def texts(figure: Figure) -> str:
    found = [text.get_text() for text in figure.findobj(lambda item: hasattr(item, "get_text"))]
    return " | ".join(found)


def line(figure: Figure, label: str) -> tuple[list[float], list[float]]:
    found = next(item for item in figure.axes[0].lines if item.get_label() == label)
    return np.asarray(found.get_xdata()).tolist(), np.asarray(found.get_ydata()).tolist()


@pytest.mark.parametrize("name", list(plots.PICTURES))
@pytest.mark.parametrize("dark", [False, True])
def test_every_picture_is_drawn_light_and_dark(path: Path, name: str, dark: bool):
    figure = plots.PICTURES[name](path, dark=dark)
    theme = plots.DARK if dark else plots.LIGHT
    assert to_hex(figure.get_facecolor()) == theme.paper
    marks = [item for axes in figure.axes for item in (*axes.lines, *axes.collections, *axes.patches, *axes.images)]
    assert marks
    figure.canvas.draw()


def test_the_line_is_the_mean_and_the_band_the_spread(path: Path):
    run = read_run(path)
    figure = plots.accuracy(run)
    assert line(figure, "mean over clients") == (run.rounds.tolist(), run.curves["accuracy"].tolist())
    assert line(figure, "5 worst clients")[1] == run.curves["bottom5"].tolist()
    wide = figure.axes[0].collections[0].get_paths()[0].vertices
    assert wide[:, 1].min() == run.spread["accuracy"][:, 0].min()
    assert wide[:, 1].max() == run.spread["accuracy"][:, 4].max()


def test_the_flow_has_a_bar_for_each_cluster_and_a_band_for_each_way(path: Path):
    figure = plots.flow(path)
    bars = [patch for patch in figure.axes[0].patches if patch.get_gid() == "node"]
    bands = [patch for patch in figure.axes[0].patches if patch.get_gid() == "ribbon"]
    run = read_run(path)
    assert run.labels is not None
    assert len(bars) == sum(len(np.unique(row)) for row in run.labels)
    ways = [
        len({*zip(a.tolist(), b.tolist(), strict=True)}) for a, b in zip(run.labels[:-1], run.labels[1:], strict=True)
    ]
    assert len(bands) == sum(ways)


def test_points_of_the_map_have_the_colour_of_their_group(path: Path):
    run = read_run(path)
    figure = plots.model_map(run, by="group")
    for number, points in enumerate(figure.axes[0].collections):
        assert len(points.get_offsets()) == 4
        assert to_hex(points.get_facecolor()[0]) == OKABE_ITO[number].lower()
    assert "g0" in texts(figure)


def test_the_confusion_has_the_numbers(path: Path):
    figure = plots.confusion(path)
    assert figure.axes[0].images[0].get_array().tolist() == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["4", "4", "4"]


def test_the_stacks_add_up(path: Path):
    run = read_run(path)
    figure = plots.bytes_sent(run)
    tops = [poly.get_paths()[0].vertices[:, 1].max() for poly in figure.axes[0].collections]
    total = run.curves["down"] + run.curves["up"] + run.curves["start_bytes"]
    assert tops[-1] == pytest.approx(total[-1] / 1e6)


def test_runs_over_each_other(tmp_path: Path):
    paths = [
        make_run(tmp_path, f"{method}{seed}", algorithm=method, seed=seed, best=best + 0.01 * seed, rounds=4)
        for method, best in (("a", 0.8), ("b", 0.5))
        for seed in (0, 1)
    ]
    figure = plots.curves(paths, "f1")
    runs = [read_run(path) for path in paths]
    mean = (runs[0].curves["f1"] + runs[1].curves["f1"]) / 2
    assert line(figure, "a")[1] == pytest.approx(mean.tolist())
    assert len(figure.axes[0].collections) == 2  # a band for each
    by_bytes = plots.curves(paths, against="bytes")
    assert line(by_bytes, "b")[0] == pytest.approx([0.0035, 0.0065, 0.0095, 0.0125])


def test_a_picture_of_a_result_without_a_folder():
    result = coterie.run("fesem", "rotated-digits", rounds=2)
    assert line(plots.loss(result), "mean over clients")[1] == [row["loss"]["macro"] for row in result.rows]


def test_what_a_run_does_not_have_is_told(tmp_path: Path, path: Path):
    alone = make_run(tmp_path, "alone", clients=40, clusters=40, rounds=1)
    with pytest.raises(DataError, match="every client is a cluster of its own"):
        plots.cluster_sizes(alone)
    bare = make_run(tmp_path, "bare", finished=False)
    for name in ("rounds.jsonl", "labels.npy", "clients.npz", "artifacts/members.npz", "artifacts/sketches.npz"):
        (bare / name).unlink()
    for make in plots.PICTURES.values():
        if make is not plots.held_labels:  # the manifest is written before the first round
            with pytest.raises(DataError):
                make(bare)
    with pytest.raises(UnknownName, match="'tsn'"):
        plots.model_map(path, method="tsn")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="no score of a run 'acuracy'. Did you mean 'accuracy'"):
        plots.curves([path], "acuracy")
    with pytest.raises(ConfigError, match="at least one run"):
        plots.curves([])


def test_one_round_is_drawn_too(tmp_path: Path):
    path = make_run(tmp_path, rounds=1)
    for name in ("accuracy", "cluster-sizes", "bytes", "seconds", "flow", "churn", "accuracy-by-bytes"):
        plots.PICTURES[name](path).canvas.draw()


def test_names_with_dollars_and_marks_do_not_break_a_picture(tmp_path: Path):
    names = ["$x$", "a_b^c", "\\frac", "<b>", "x" * 80, "日本"]
    path = make_run(tmp_path, clients=6, clusters=2, names=names)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the font may not know every script
        for name in ("labels", "member-samples", "client-accuracy"):
            plots.PICTURES[name](path).canvas.draw()


def test_files_are_the_same_each_time(path: Path, tmp_path: Path):
    first = plots.save_all([path], tmp_path / "one")
    second = plots.save_all([path], tmp_path / "two")
    assert len(first) == len(second) == 2 * len(plots.PICTURES)
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))


def palettes() -> dict[str, list[str]]:
    """Of the pictures, and of the page, light and dark."""
    blocks = re.findall(r"--c0: [^}]*?--c7: #[0-9a-f]{6}", static("page.css"))
    found = {f"page {number}": re.findall(r"--c\d: (#[0-9a-f]{6})", block) for number, block in enumerate(blocks)}
    assert len(found) == 3
    assert all(len(colours) == 8 for colours in found.values())
    return found | {"pictures": list(OKABE_ITO)}


@pytest.mark.parametrize("blindness", ["none", "protan", "deutan"])
def test_colours_can_be_told_apart_by_colour_blind_people(blindness: str):
    """Seen as Vienot, Brettel and Mollon (1999) compute it for linear RGB."""
    seen_as = {
        "none": np.eye(3),
        "protan": np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]),
        "deutan": np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]),
    }[blindness]

    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    for name, colours in palettes().items():
        rgb = np.array([[linear(part) for part in to_rgb(colour)] for colour in colours])
        lightness = np.cbrt(np.clip(rgb @ seen_as.T, 0, 1))
        apart = np.linalg.norm(lightness[:, None] - lightness[None], axis=2)
        np.fill_diagonal(apart, np.inf)
        assert apart.min() > 0.1, (name, np.unravel_index(apart.argmin(), apart.shape))


def test_repairs_are_marked(tmp_path: Path):
    path = make_run(tmp_path, rounds=1)
    with (path / "rounds.jsonl").open("a") as lines:
        lines.write(json.dumps(row_of(2, 0.5, [4, 4, 4], repairs=[{"reason": "cluster 1 was empty"}])) + "\n")
    figure = plots.accuracy(path)
    assert [2] in [list(item.get_xdata()) for item in figure.axes[0].lines if item.get_marker() == "v"]


def test_without_matplotlib_the_extra_is_named(path: Path, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'coterie\[report\]'"):
        plots.accuracy(path)
