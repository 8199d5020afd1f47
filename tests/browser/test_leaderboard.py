"""The leaderboard in a browser: it is sorted by a click, and restricted to a paper; the console is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.reproduce.leaderboard import write_board
from tests.reproduce.test_leaderboard import cell, result, write

from .conftest import Browser

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::ResourceWarning")]

ROWS = "[...document.querySelectorAll('.board tbody tr')].filter((row) => !row.hidden)"
NAMES = f"return {ROWS}.map((row) => row.cells[0].firstChild.textContent.trim())"
SEEN = f"return {ROWS}.map((row) => [...row.cells].filter((cell) => !cell.hidden).map((cell) => cell.textContent))"


def test_it_sorts_and_filters(browser: Browser, tmp_path: Path):
    one = result("a/t", cell("fedavg", 80.0), cell("ifca", 90.0, sent=250.0), cell("<b>evil</b>", 70.0))
    two = result("b/t", cell("fedavg", 60.0), cell("ifca", 50.0, sent=200.0), cell("fesem", 55.0, sent=100.0))
    write(tmp_path, [one, two])
    (page, *_), _ = write_board(tmp_path)
    browser.open(page.as_uri(), width=700)
    assert browser.js(NAMES) == ["fedavg", "fesem", "ifca", "<b>evil</b>"]  # regrets 5, 5, 5 by name, 20
    assert browser.js("return document.getElementById('count').textContent") == "4 methods, 2 cells"
    browser.click(".board th button", "a/tall")
    assert browser.js(NAMES) == ["ifca", "fedavg", "<b>evil</b>", "fesem"]  # the one without a number is last
    browser.click(".board th button", "a/tall")
    assert browser.js(NAMES) == ["<b>evil</b>", "fedavg", "ifca", "fesem"]
    browser.change("#paper", "Paper of b")
    browser.click(".board th button", "mean regret")
    assert browser.js(NAMES) == ["fedavg", "fesem", "ifca"]
    assert browser.js(SEEN)[2] == ["ifca as published", "1", "10.00", "3.0", "2.00", "50.00"]
    browser.change("#paper", "")
    assert browser.js(NAMES) == ["fedavg", "fesem", "ifca", "<b>evil</b>"]
    assert browser.overflow() <= 0  # the table scrolls, not the page
    assert browser.errors() == []
    browser.keep("leaderboard", 700)
