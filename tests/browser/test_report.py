"""The page of `coterie report` in a real browser."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.main import main
from coterie.runs.reading import read_run
from coterie.views.report.page import write_report
from tests.views.report.made import make_run, row_of
from tests.views.report.test_page import EVIL, evil_run

from .conftest import Browser

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::ResourceWarning")]

CHARTS = ("accuracy", "f1", "loss", "sizes", "churn", "confusion", "flow", "map-cluster", "map-group", "clients")
MORE = ("decisions", "labels", "bytes", "against-bytes", "seconds", "members", "pseudo", "pseudo-map", "pseudo-cross")
TABLES = ("fairness", "repairs", "failures", "settings")
OVERLAPS = """
  const found = [];
  for (const svg of document.querySelectorAll('.chart svg.plot')) {
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 2 && high > 4) found.push([svg.getAttribute('aria-label'), a, b]);
    }));
  }
  return found;"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has something for every panel."""
    root = tmp_path_factory.mktemp("runs")
    path = make_run(root, "everything", rounds=8, clients=30, clusters=4, classes=6)
    with (path / "rounds.jsonl").open("a") as lines:
        decisions = [{"what": "cut", "clusters": [0, 1, 2, 3], "sizes": [8, 8, 7, 7], "z": 236.4, "q": 36.2}]
        repairs = [{"round": 9, "cluster": 1, "reason": "cluster 1 was empty: cluster 0 was split"}]
        lines.write(json.dumps(row_of(9, 0.8, [8, 8, 7, 7], repairs=repairs, decisions=decisions)) + "\n")
    failures = [{"round": 2, "client": "g0-0000", "step": "x:train", "reason": "did not answer"}]
    (path / "artifacts" / "failures.json").write_text(json.dumps(failures))
    rng = np.random.default_rng(0)
    told = rng.dirichlet(np.ones(6), (4, 4, 6)).astype(np.float32)
    pseudo = rng.integers(0, 256, (4, 6, 2, 5, 5, 1), dtype=np.uint8)
    np.savez(path / "artifacts" / "method.npz", told=told, pseudo=pseudo)
    return write_report([read_run(path)], path / "report.html")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_every_chart_draws_marks_and_nothing_complains(browser: Browser, run: Path, width: int, theme: str):
    browser.open(run.as_uri(), width, theme)
    browser.scroll_through()
    marks = browser.marks(".mark")
    assert set(marks) == {*CHARTS, *MORE, *TABLES}
    assert [name for name in (*CHARTS, *MORE) if not marks[name]] == []
    rows = browser.marks(".chart tbody tr, .chart pre")
    assert [name for name in TABLES if not rows[name]] == []
    assert browser.errors() == []
    assert browser.overflow() <= 0
    # What is drawn is on the screen, not beside it.
    beside = "s => s.getBoundingClientRect().right > innerWidth + 1"
    assert browser.js(f"return [...document.querySelectorAll('.chart svg.plot')].filter({beside}).length") == 0
    background = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (theme == "light")
    browser.keep(f"report-{width}-{theme}", width)


def test_the_line_has_a_point_for_every_round(browser: Browser, run: Path):
    browser.open(run.as_uri())
    assert browser.js("return document.querySelector('#accuracy path.line').dataset.points") == "9"
    assert browser.js("return document.querySelectorAll('#accuracy path.band').length") == 2
    assert browser.js("return document.querySelectorAll('#accuracy path.event').length") == 1


def test_letters_do_not_lie_over_each_other(browser: Browser, run: Path):
    """Labels of axes: no two texts of a chart may overlap by more than a hair."""
    for width in (360, 1440):
        browser.open(run.as_uri(), width)
        browser.scroll_through()
        assert browser.js(OVERLAPS) == [], width


def test_hover_and_arrow_keys_tell_the_numbers(browser: Browser, run: Path):
    browser.open(run.as_uri())
    said = """
      const svg = document.querySelector('#accuracy svg.plot'), box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 14, clientY: box.top + 60}));
      return document.getElementById('tip').textContent"""
    assert "round 9" in browser.js(said)
    assert "mean over clients: 80.00 %" in browser.js(said)
    pressed = """
      const svg = document.querySelector('#accuracy svg.plot'); svg.focus();
      svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}));
      return document.getElementById('tip').textContent"""
    assert "round 8" in browser.js(pressed)


def test_numbers_maps_and_the_theme_can_be_chosen(browser: Browser, run: Path):
    browser.open(run.as_uri())
    browser.scroll_through()
    assert browser.js("document.querySelector('#loss details').open = true; return 1") == 1
    browser.wait("document.querySelectorAll('#loss details tbody tr').length === 9")
    before = browser.js("return document.querySelector('#map-cluster .point').getAttribute('d')")
    browser.click("#map-cluster .controls button", "t-SNE")
    browser.wait(f"document.querySelector('#map-cluster .point').getAttribute('d') !== {json.dumps(before)}")
    assert "t-SNE" in browser.js("return document.querySelector('#map-group svg.plot').getAttribute('aria-label')")
    browser.js("document.getElementById('theme').click()")
    assert browser.js("return document.documentElement.dataset.theme") == "dark"
    assert browser.js("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    browser.js("document.getElementById('theme').click(); localStorage.clear()")
    assert browser.errors() == []


def test_several_runs_are_sorted_ticked_off_and_looked_at(browser: Browser, tmp_path: Path):
    scores = {"alpha": 0.5, "beta": 0.9, "gamma": 0.7}
    runs = [
        read_run(make_run(tmp_path, f"{name}-{seed}", algorithm=name, seed=seed, best=best, rounds=4))
        for name, best in scores.items()
        for seed in (0, 1)
    ]
    page = write_report(runs, tmp_path / "page.html", tsne=False)
    methods = "[...document.querySelectorAll('table.paper tbody td:first-child')].map(td => td.textContent)"
    head = "[...document.querySelectorAll('table.paper th button')].find(b => b.textContent === 'accuracy %')"
    for width in (360, 1440):
        browser.open(page.as_uri(), width)
        browser.wait("document.querySelector('table.paper')")
        assert browser.js(f"return {methods}") == ["alpha", "beta", "gamma"]
        browser.js(f"{head}.click()")
        assert browser.js(f"return {methods}") == ["beta", "gamma", "alpha"]
        browser.js(f"{head}.click()")
        assert browser.js(f"return {methods}") == ["alpha", "gamma", "beta"]
        assert browser.js(f"return {head}.closest('th').getAttribute('aria-sort')") == "ascending"
        winners = (
            "[...document.querySelectorAll('table.paper td.best')].map(td => td.closest('tr').cells[0].textContent)"
        )
        best = browser.js(f"return {winners}")
        assert "beta" in best
        assert float(browser.js("return getComputedStyle(document.querySelector('td.best')).fontWeight")) >= 600
        assert "n = 2" in browser.js("return document.querySelector('table.paper tbody').textContent")
        lines = "document.querySelectorAll('#overlay path.line').length"
        assert browser.js(f"return {lines}") == 3
        browser.js("document.querySelector('#overlay .legend button').click()")
        assert browser.js(f"return {lines}") == 2
        browser.js("document.querySelector('#overlay .legend button').click()")
        browser.js("document.querySelector('#overlay input[type=checkbox]').click()")
        assert browser.js(f"return {lines}") == 6
        browser.change("#overlay select", "loss", "change")
        assert "loss" in browser.js("return document.querySelector('#overlay svg.plot').getAttribute('aria-label')")
        browser.js("document.querySelectorAll('.tabs button')[3].click()")
        browser.wait("document.querySelector('.run h2').textContent.includes('beta')")
        assert browser.overflow() <= 0
        assert browser.errors() == []
        browser.scroll_through()
        browser.keep(f"compare-{width}-light", width)


def test_names_of_users_stay_text(browser: Browser, tmp_path: Path):
    page = write_report([read_run(evil_run(tmp_path))], tmp_path / "page.html", tsne=False)
    browser.open(page.as_uri())
    browser.scroll_through()
    browser.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
    browser.wait("document.querySelectorAll('#clients details tbody tr').length === 5")
    assert browser.js("return document.querySelectorAll('img[src=x], main script, main b > b').length") == 0
    assert EVIL[0] in browser.js("return document.querySelector('#clients details').textContent")
    assert browser.errors() == []


def test_ten_runs_of_a_thousand_clients_open_at_once(browser: Browser, tmp_path: Path):
    """10 runs x 300 rounds x 1,000 clients: under 15 MB, open (all charts on the screen drawn) in under 3 s."""
    runs = [
        read_run(
            make_run(
                tmp_path,
                f"run-{i}",
                algorithm=("fesem", "ifca")[i % 2],
                seed=i // 2,
                rounds=300,
                clients=1000,
                clusters=8,
                classes=10,
                best=0.7 + 0.02 * (i % 2),
            )
        )
        for i in range(10)
    ]
    page = write_report(runs, tmp_path / "page.html")
    size = page.stat().st_size
    browser.open("about:blank")
    began = time.perf_counter()
    browser.driver.get(page.as_uri())
    browser.wait("document.querySelector('#overlay path.line') && document.querySelector('#table td')")
    took = time.perf_counter() - began
    print(f"\n{size / 1e6:.2f} MB, open in {took:.2f} s")
    assert size < 15e6
    assert took < 3
    began = time.perf_counter()
    browser.scroll_through()
    browser.js("document.querySelectorAll('.tabs button')[7].click()")
    browser.wait("document.querySelector('.run h2').textContent.includes('seed 3')", 3)
    assert browser.errors() == []
    browser.keep("large-1440-light", 1440)


@pytest.mark.parametrize("width", [360, 1440])
def test_the_page_of_data_show(browser: Browser, tmp_path: Path, width: int):
    with pytest.raises(SystemExit) as stopped:
        main(["data", "show", "rotated-digits", "-o", str(tmp_path / "shown"), "--quiet"])
    assert stopped.value.code == 0
    browser.open((tmp_path / "shown" / "index.html").as_uri(), width, "dark" if width == 360 else "light")
    browser.js("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.overflow() <= 0
    assert browser.errors() == []
    assert browser.js("return [...document.images].every(i => i.complete && i.naturalWidth > 100)")
    browser.js("document.querySelectorAll('details').forEach(d => { d.open = false })")
    browser.keep(f"data-show-{width}", width)


def test_runs_with_and_without_numbers_for_a_panel(browser: Browser, tmp_path: Path):
    runs = [read_run(make_run(tmp_path, name, clients=n)) for name, n in (("small", 12), ("large", 200))]
    browser.open(write_report(runs, tmp_path / "page.html", tsne=False).as_uri())
    browser.scroll_through()
    browser.js("document.querySelector('#labels details').open = true")
    browser.click(".tabs button", "large")  # a heat map has no table
    browser.wait("document.querySelector('#labels details').hidden")
    browser.click(".tabs button", "small")
    browser.wait("document.querySelectorAll('#labels details tbody tr').length === 12")
    assert browser.errors() == []


def cut(number: int, clusters: list[int], sizes: list[int], **more: float) -> dict[str, Any]:
    return {"round": number, "what": "cut", "clusters": clusters, "sizes": sizes, "z": 236.4, "q": 36.2, **more}


def moved(number: int, *clients: str) -> dict[str, Any]:
    moves = [{"client": client, "from_cluster": 0, "to_cluster": 1} for client in clients]
    return {"round": number, "what": "move", "clusters": [], "moves": moves, "loss_rose": len(moves)}


REFUSED = {"round": 3, "what": "refused", "clusters": [0], "sizes": [25, 15], "z": 6.32, "q": 1.51}
DECIDED: dict[int, list[dict[str, Any]]] = {  # by the number of clusters at the end
    1: [REFUSED],
    4: [cut(4, [0, 1, 2, 3], [10, 10, 10, 10]), REFUSED | {"round": 10}, moved(12, "a", "b", "c"), moved(13, "d")],
    8: [
        cut(4, [0, 1, 2], [20, 12, 8]),
        REFUSED | {"what": "proposed", "round": 4, "clusters": [1]},
        cut(5, [1, 3], [7, 5], t=3.14),
        cut(10, [0, 4, 5], [10, 6, 4]),
        cut(22, [4, 6, 7], [3, 2, 1]),
        moved(23, "a", "b", "c"),
        {"round": 23, "what": "removed", "clusters": [2]},
        cut(46, [4, 7], [3, 1]),
    ],
    20: [cut(4, list(range(20)), [2] * 20)],
}


@pytest.mark.parametrize("clusters", DECIDED)
def test_decisions_are_a_tree_and_a_table(browser: Browser, tmp_path: Path, clusters: int):
    path = make_run(tmp_path, algorithm="coterie", rounds=3, clients=40, clusters=clusters)
    with (path / "rounds.jsonl").open("a") as lines:
        for number, decision in enumerate(DECIDED[clusters], 4):
            row = row_of(number, 0.8, [40 // clusters] * clusters, decisions=[decision])
            lines.write(json.dumps(row) + "\n")
    page = write_report([read_run(path)], tmp_path / "page.html", tsne=False)
    cuts = [one for one in DECIDED[clusters] if one["what"] == "cut"]
    for width, theme in ((360, "light"), (1440, "dark"), (1440, "light")):
        browser.open(page.as_uri(), width, theme)
        browser.scroll_through()
        texts = browser.js("return [...document.querySelectorAll('#decisions svg text')].map(t => t.textContent)")
        leaves = [f"cluster {k}: {40 // clusters} clients" for k in range(clusters)]
        assert sorted(text for text in texts if text.startswith("cluster")) == sorted(leaves)
        assert sum("z = 236" in text for text in texts) == len(cuts)
        assert ("all 40 clients" in texts, "no cut" in texts) == (True, not cuts)
        assert len(browser.js("return [...document.querySelectorAll('#decisions tbody tr')]")) == len(DECIDED[clusters])
        assert browser.js(OVERLAPS) == []
        right = "e => e.getBoundingClientRect().right"
        inside = f"const right = {right}, svg = document.querySelector('#decisions svg');"
        assert browser.js(f"{inside} return [...svg.querySelectorAll('text')].every(t => right(t) <= right(svg))")
        assert browser.overflow() <= 0
        assert browser.errors() == []
        browser.js("document.querySelector('#decisions').scrollIntoView()")
        browser.keep(f"decisions-{clusters}-{width}-{theme}", width)
