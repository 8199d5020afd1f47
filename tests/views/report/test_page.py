"""The page: one file, nothing of the network, nobody's markup."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import os
import re
from pathlib import Path

import pytest

from coterie.errors import StorageError
from coterie.runs.reading import read_run
from coterie.views.report.page import report_html, static, write_report

from .made import make_run

EVIL = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "a'b\"c", "\u2028line", "\ud800half"]


class Page(html.parser.HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def evil_run(root: Path) -> Path:
    path = make_run(root, clients=5, clusters=2, names=[name.replace("\ud800", "?") for name in EVIL])
    config = (path / "config.toml").read_text().replace('"made"', json.dumps("<b>data</b>"))
    (path / "config.toml").write_text(config)
    failures = [{"round": 1, "client": EVIL[0], "step": "<i>", "reason": EVIL[1]}]
    (path / "artifacts" / "failures.json").write_text(json.dumps(failures))
    summary = json.loads((path / "summary.json").read_text()) | {"notes": EVIL}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_what_users_call_things_never_becomes_markup(tmp_path: Path):
    text = report_html([read_run(evil_run(tmp_path))], tsne=False)
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 3  # the data and our own two
    assert "img" not in tags
    assert "b" not in tags
    assert json.loads(page.scripts[0])["runs"][0]["clients"]["name"][0] == EVIL[0]
    assert page.scripts[1:] == [static("charts.js"), static("report.js")]
    text.encode("utf-8")  # half a pair of surrogates is no UTF-8, and is not in it


def test_the_policy_lets_only_our_own_scripts_run(tmp_path: Path):
    text = report_html([read_run(make_run(tmp_path))], tsne=False)
    page = Page(text)
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style is not None
    for part in (*page.scripts[1:], style.group(1)):
        assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in allowed
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_asks_nothing_of_the_network(tmp_path: Path):
    text = report_html([read_run(make_run(tmp_path))], tsne=False)
    for tag, attributes in Page(text).elements:
        for name in ("src", "href", "action", "data"):
            assert not attributes.get(name), (tag, attributes)
    code = static("charts.js") + static("report.js") + static("page.css")
    for word in (
        "http://",
        "https://",
        "import(",
        "fetch(",
        "XMLHttpRequest",
        "innerHTML",
        "insertAdjacentHTML",
        "eval(",
    ):
        found = code.replace("http://www.w3.org/2000/svg", "")
        assert word not in found, word


def test_the_page_is_the_same_each_time(tmp_path: Path):
    run = read_run(make_run(tmp_path))
    assert report_html([run]) == report_html([run])


def test_without_script_there_are_numbers(tmp_path: Path):
    text = report_html([read_run(make_run(tmp_path, rounds=2))], tsne=False)
    inside = re.search(r"<noscript>(.*?)</noscript>", text, re.DOTALL)
    assert inside is not None
    assert "accuracy" in inside.group(1)


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = read_run(make_run(tmp_path))
    target = tmp_path / "out" / "page.html"
    assert write_report([run], target, tsne=False) == target
    before = target.read_text()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        write_report([run], target, tsne=False)
    monkeypatch.undo()
    assert target.read_text() == before
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]
