"""The page of a result: published numbers, ours and their difference."""

from __future__ import annotations

from coterie.reproduce.outcome import result_of
from coterie.reproduce.page import Table, page
from coterie.reproduce.suite import Suite

from .test_outcome import found, result, summary


def test_the_page_shows_published_ours_and_difference(tiny: Suite):
    text = page(result(tiny, {"all/global-s0": summary(0.81), "all/global-s1": summary(0.83)}))
    assert text.startswith("# A paper (2020). Table 1: digits\n")
    assert "| Global | 80.00 → 82.00 ±1.41 (+2.00) | 70.00 → - | 75.00 → - |" in text
    assert "| Magic | 99.00 → - | 98.00 → - | 98.50 → - |" in text
    assert "- Digits in place of faces." in text
    assert "| Global | all | fedavg, paper | 4 | 40 B | 1.5 |" in text
    assert "`coterie reproduce tiny`" in text
    assert "## ARI" not in text  # nothing published, nothing measured


def test_a_single_column_is_one_table_of_metrics(tiny: Suite):
    cells, runs = tiny.chosen(columns=["all"]), found({"all/global-s0": summary(0.81, 0.5)})
    text = page(result_of(tiny, cells, [0], runs, command=""))
    assert "## all\n\n|  | accuracy, % | ARI |" in text
    assert "| Global | 80.00 → 81.00 (+1.00) | 0.50 |" in text
    assert "| Magic | 99.00 → - | - |" in text


def test_columns_are_in_the_order_of_the_longest_row():
    texts = {("IFCA", "half"): "1", ("IFCA", "all"): "2", ("Magic", "half"): "3", ("Magic", "most"): "4"}
    assert Table("", texts | {("Magic", "all"): "5", ("Magic", "none"): "-"}).columns == ["half", "most", "all"]


def test_a_suite_without_metrics_tells_how_many_seeds_it_has(tiny: Suite):
    places = {"all/global-s0": summary(0.8), "all/global-s1": summary(0.8)}
    got = result(tiny, places)
    got |= {"metrics": {}, "cells": [cell | {"ours": {}} for cell in got["cells"]]}
    assert "Seeds: 0, 1; at most 2 of them finished in a cell" in page(got)
