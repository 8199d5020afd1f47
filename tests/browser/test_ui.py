"""The live pages of `coterie ui` in a real browser."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs pip install 'coterie[ui]'")

from coterie.runs.folder import RunFolder
from tests.views.report.made import append_round, make_run
from tests.views.ui.test_app import serving

from .conftest import Browser

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for name, best in (("alpha", 0.5), ("beta", 0.9)):
        make_run(folder, name, algorithm=name, best=best, rounds=4)
    (make_run(folder, "broken") / "summary.json").write_text("{")
    return folder


@pytest.fixture
def address(root: Path) -> Iterator[str]:
    with serving(root) as (host, port):
        yield f"http://{host}:{port}"


@pytest.mark.parametrize("width", [360, 1440])
def test_the_list_sorts_filters_and_leads_on(browser: Browser, address: str, width: int):
    browser.open(address, width, "dark" if width == 360 else "light")
    browser.wait("document.querySelectorAll('.runs tbody tr').length === 3")
    rows = "[...document.querySelectorAll('.runs tbody tr')].map(r => r.cells[1].innerText.split('\\n')[0])"
    assert browser.js(f"return {rows}") == ["alpha", "beta", "broken"]
    assert "broken/summary.json is damaged" in browser.js("return document.querySelector('.runs').textContent")
    assert browser.js("return document.getElementById('compare').disabled") is True
    browser.click(".runs th button", "accuracy")
    assert browser.js(f"return {rows}") == ["beta", "alpha", "broken"]
    time.sleep(2)  # the next answer of the server must not undo the order
    assert browser.js(f"return {rows}") == ["beta", "alpha", "broken"]
    browser.change("input[type=search]", "alp", "input")
    assert browser.js(f"return {rows}") == ["alpha"]
    browser.change("input[type=search]", "", "input")
    assert browser.overflow() <= 0
    browser.keep(f"list-{width}", width)
    browser.js("document.querySelectorAll('.runs input[type=checkbox]').forEach(box => box.click())")
    assert browser.js("return document.getElementById('compare').textContent") == "compare 2 runs"
    browser.js("document.getElementById('compare').click()")
    browser.wait("document.querySelector('table.paper')")
    assert browser.js("return document.querySelectorAll('#overlay path.line').length") == 2
    assert browser.errors() == []


@pytest.mark.parametrize("width", [360, 1440])
def test_a_running_runs_curve_grows_without_reload(browser: Browser, address: str, root: Path, width: int):
    path = make_run(root, "live", rounds=2, planned=12, finished=False)
    with RunFolder.open(path).held():
        browser.open(f"{address}/run/live", width)
        points = "Number(document.querySelector('#accuracy path.line').dataset.points)"
        browser.wait("document.querySelector('#accuracy path.line')")
        browser.js("window.stillHere = true; document.querySelector('#accuracy details').open = true")
        assert browser.js(f"return {points}") == 2
        assert browser.js("return document.querySelector('.badge').textContent") == "running"
        for number in (3, 4, 5):
            append_round(path, number, 0.1 * number)
            browser.wait(f"{points} === {number}", 6)
        browser.wait("document.querySelectorAll('#accuracy details tbody tr').length === 5")
        assert "round 5 of 12" in browser.js("return document.querySelector('.head').textContent")
        assert browser.js("return window.stillHere") is True
    browser.wait("document.querySelector('.badge').textContent === 'stopped'", 6)
    assert browser.overflow() <= 0
    assert browser.errors() == []


def test_a_real_run_is_watched_from_beginning_to_end(browser: Browser, address: str, root: Path):
    command = [sys.executable, "-m", "coterie", "run", "-a", "ifca", "--clients", "60", "--rounds", "120"]
    process = subprocess.Popen(
        [*command, "--out", str(root), "--name", "real", "--quiet", "--json"], stdout=subprocess.DEVNULL
    )
    try:
        browser.open(address)
        browser.wait("[...document.querySelectorAll('.runs a')].some(a => a.textContent === 'real')", 60)
        browser.click(".runs a", "real")
        browser.wait("document.querySelector('#accuracy path.line')", 30)
        browser.js("window.stillHere = true")
        seen = set()
        until = time.monotonic() + 90
        while browser.js("return document.querySelector('.badge').textContent") != "finished":
            assert time.monotonic() < until
            seen.add(browser.js("return document.querySelector('#accuracy path.line').dataset.points"))
            time.sleep(0.2)
        assert len(seen) > 1
        browser.wait("document.querySelector('#accuracy path.line').dataset.points === '120'")
        assert browser.js("return window.stillHere") is True
        browser.scroll_through()
        browser.wait("document.querySelector('#map-cluster .point')")
        browser.click("#map-cluster .controls button", "t-SNE")
        browser.wait("document.querySelector('#map-cluster svg.plot').getAttribute('aria-label').includes('t-SNE')", 20)
        assert browser.errors() == []
        browser.keep("live-1440-finished", 1440)
    finally:
        process.wait(60)


def test_a_server_that_goes_away_is_told_and_found_again(browser: Browser, root: Path):
    with serving(root) as (host, port):
        browser.open(f"http://{host}:{port}/run/alpha")
        browser.wait("document.querySelector('#accuracy path.line')")
    browser.wait("document.getElementById('status').textContent.includes('does not respond')", 10)


def test_a_run_that_becomes_damaged_is_told(browser: Browser, address: str, root: Path):
    browser.open(f"{address}/run/alpha")
    browser.wait("document.querySelector('#accuracy path.line')")
    (root / "alpha" / "summary.json").write_text("{")
    browser.wait("document.getElementById('status').textContent.includes('summary.json is damaged')", 6)
