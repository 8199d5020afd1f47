"""A run in a notebook."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import coterie
from coterie.runs.reading import read_run
from coterie.views.report.notebook import run_html

from .made import make_run


def test_it_is_well_formed_and_shows_the_numbers():
    result = coterie.run("fesem", "rotated-digits", rounds=3)
    text = result._repr_html_()
    tree = ElementTree.fromstring(text)
    words = "".join(tree.itertext())
    assert f"{100 * result.summary['accuracy']['macro']:.2f} %" in words
    line = tree.find(".//polyline")
    assert line is not None
    assert len(line.attrib["points"].split()) == 3
    assert tree.find(".//polygon") is not None


def test_names_are_escaped_and_one_round_has_no_curve(tmp_path: Path):
    text = run_html(read_run(make_run(tmp_path, "<b>x", dataset="<script>", rounds=1)))
    tree = ElementTree.fromstring(text)
    assert "<script>" in "".join(tree.itertext())
    assert tree.find(".//script") is None
    assert tree.find(".//polyline") is None
