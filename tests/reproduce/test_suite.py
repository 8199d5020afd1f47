"""Suites: what a file says, what a shipped one asks for, and its published numbers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.data.fetch import stored_sources
from coterie.errors import ConfigError, UnknownName
from coterie.reproduce.outcome import measure
from coterie.reproduce.suite import FOLDER, Suite, cases_of, find_suites, read_suite, settings_of, suite_names

EVERY = {suite.name: suite for suite in find_suites(["all"])}
TABLES = [name for name in EVERY if "/figures" not in name]
FIGURES = {"labels", "alpha", "bytes", "indicators", "active-writers-mnist", "features-mnist", "features-cifar10"}
EXPECTED = {f"md_icfl/table{n}" for n in range(1, 7)}
EXPECTED |= {f"feddsmic/table{n}-{d}" for n in (2, 3) for d in ("mnist", "emnist", "femnist", "cifar10", "cifar100")}
EXPECTED |= {"fesem/table2-writers-mnist", "fesem/table2-femnist", "fesem/table3-celeba200", "fesem/table3-fedceleba"}
EXPECTED |= {"md_icfl/figures", *(f"feddsmic/figures-{name}" for name in FIGURES)}
EXPECTED |= {"corn/mnist", "flux/mnist", "flux/cifar10", "ifca/rotated-mnist", "cfl/rotated"}


def no_count(case: object) -> int:
    raise AssertionError("no groups to count here")


def test_every_table_and_figure_is_there_and_part_of_the_package():
    assert set(suite_names()) >= EXPECTED
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["coterie"]
    for path in FOLDER.rglob("*.toml"):
        assert any(path.relative_to(FOLDER.parents[1]).match(pattern) for pattern in patterns)


@pytest.mark.parametrize("name", EVERY)
def test_a_shipped_suite_asks_for_settings_that_exist(name: str):
    suite = EVERY[name]
    spots = suite.spots(suite.chosen(), suite.seeds[:1])
    spots = [spot for spot in spots if spot.part in (None, *suite.parts[:1])]
    cases = cases_of(suite, spots, lambda case: 3)
    assert [case.place for case in cases] == [spot.place for spot in spots]
    assert len({repr(case.tables) for case in cases}) == len(cases)  # equal settings would be run once
    assert all(measure(metric).label for metric in suite.metrics)
    assert suite.metrics or suite.figures
    assert set(suite.data) <= {source.stem for source in stored_sources()}


@pytest.mark.parametrize("name", TABLES)
def test_the_last_row_of_a_table_is_coterie_which_is_not_told_k(name: str):
    suite = EVERY[name]
    assert suite.rows[-1].label == "coterie"
    assert not any(suite.rows[-1].published.values())
    assert "num_clusters" not in settings_of(suite, suite.rows[-1], suite.columns[-1])["algorithm"]


@pytest.mark.parametrize("name", TABLES)
def test_methods_with_a_start_have_a_row_as_published_and_one_of_ours(name: str):
    suite = EVERY[name]
    modes: dict[str, set[bool]] = {}
    stand_in = not any(any(row.published.values()) for row in suite.rows)  # of tables that have the published numbers
    for row in suite.rows:
        column = next(column for column in suite.columns if column.name in row.columns)
        if row.method not in (None, "coterie"):
            algorithm = settings_of(suite, row, column)["algorithm"]
            is_published = stand_in or any(row.published.values())  # other rows in the paper's mode are experiments
            if ("init" in algorithm and is_published) or row.label.endswith("our start"):
                assert ("init" in algorithm) == (algorithm.get("guard") is False)
                modes.setdefault(row.method, set()).add("init" in algorithm)
    if name != "cfl/rotated":  # there IFCA is only a row of ours
        assert all(found == {True, False} for found in modes.values())


def fesem(*numbers: float) -> dict[str, float]:
    return dict(zip(("accuracy_micro", "f1_micro", "accuracy", "f1"), numbers, strict=True))


# Typed from the papers, beside the files.
PUBLISHED = [
    ("md_icfl/table1", "MD-ICFL-2", "MobileNetV2", {"accuracy": 76.32, "ari": 0.94}),
    ("md_icfl/table2", "FedFomo", "ResNet18", {"accuracy": 61.89}),
    ("md_icfl/table3", "IFCA", "MobileNetV2", {"accuracy": 58.46, "ari": 0.0}),
    ("md_icfl/table4", "IFCA", "R = 1", {"accuracy": 97.17, "ari": 0.76}),
    ("md_icfl/table4", "Local", "R = 1", {"accuracy": 93.69}),
    ("md_icfl/table5", "ClusteredFL", "R = 0.5", {"accuracy": 73.29}),
    ("md_icfl/table6", "MD-ICFL-2", "K = 5", {"accuracy": 97.27}),
    ("feddsmic/table2-mnist", "FedDSMIC", "alpha = 0.05", {"best5": 94.2, "bottom5": 79.0}),
    ("feddsmic/table2-emnist", "Local", "alpha = 0.5", {"best5": 78.6, "bottom5": 31.2}),
    ("feddsmic/table2-femnist", "FedSEM", "r = 1", {"best5": 84.1, "bottom5": 56.0}),
    ("feddsmic/table2-cifar10", "PerFedAvg", "tau = 10", {"best5": 73.4, "bottom5": 53.4}),
    ("feddsmic/table2-cifar100", "FedProx", "E = 6", {"best5": 36.6, "bottom5": 10.5}),
    ("feddsmic/table3-cifar10", "FedDSMIC", "tau = 20", {"unseen": 57.74}),
    ("fesem/table2-femnist", "FeSEM-MA(3)", "FEMNIST", fesem(90.4, 71.4, 87.0, 64.3)),
    ("fesem/table3-celeba200", "FedAvg", "200 people of CelebA", fesem(86.9, 78.0, 86.1, 54.2)),
    ("corn/mnist", "srfca", "erosion-between", {"accuracy": 80.37, "ari": 0.33}),
    ("flux/mnist", "FedDrift", "level 8", {"accuracy": 89.56}),
    ("flux/cifar10", "APFL", "level 1", {"accuracy": 42.71}),
    ("ifca/rotated-mnist", "IFCA", "m = 2400, n = 100", {"accuracy": 95.05}),
]


@pytest.mark.parametrize(("name", "label", "column", "numbers"), PUBLISHED)
def test_published_numbers(name: str, label: str, column: str, numbers: dict[str, float]):
    (row,) = (row for row in EVERY[name].rows if row.label == label)
    assert row.published[column] == numbers


def test_settings_of_the_papers():
    def experiment(name: str, row: str, column: str):
        suite = EVERY[name]
        (case,) = cases_of(suite, suite.spots(suite.chosen([row], [column]), suite.seeds[:1]), no_count)
        return case.experiment

    table4 = experiment("md_icfl/table4", "MD-ICFL-1", "R = 0.5")
    assert (table4.clients, table4.schedule.rounds, table4.schedule.participation) == (48, 30, 0.5)
    assert (table4.work.lr, table4.work.epochs, table4.work.batch_size, table4.model) == (0.1, 2, 50, "lenet")
    assert (table4.algorithm.init, table4.algorithm.guard, table4.algorithm.rule) == ("paper", False, "plain")
    unseen = experiment("feddsmic/table3-cifar100", "FedDSMIC", "E = 3")
    assert (unseen.schedule.unseen, unseen.clients, unseen.work.epochs, unseen.work.steps) == (0.2, 125, 3, None)
    assert (unseen.algorithm.temperature, unseen.algorithm.label_bias) == (1.0, "kept")
    assert experiment("feddsmic/table2-mnist", "FedAvg", "alpha = 1").scenario.common.reserve == 10  # as for FedDS
    corn = experiment("corn/mnist", "cornflqs 1-10-10", "swap-none")
    assert (corn.schedule.rounds, corn.algorithm.clusterings, corn.algorithm.prox) == (19, 10, 0.1)


def test_parts_and_true_groups_of_a_seed():
    suite = EVERY["flux/cifar10"]
    spots = suite.spots(suite.chosen(["FLUX-prior"], ["level 3"]), [43])
    cases = cases_of(suite, spots, lambda case: 77)
    assert [spot.place for spot in spots] == [f"level-3/flux-prior-{part}-s43" for part in ("px", "py", "pyx", "pxy")]
    assert [case.experiment.algorithm.prior for case in cases] == [4, 77, 5, 9]
    with pytest.raises(ConfigError, match="true groups of seeds 42, 43, 44, 45, 46 only"):
        cases_of(suite, suite.spots(suite.chosen(["IFCA"], ["level 3"]), [7]), no_count)


def test_runs_go_seed_by_seed(tiny: Suite):
    places = [spot.place for spot in tiny.spots(tiny.chosen(), [1, 0])]
    assert places == [
        *("all/global-s1", "all/ifca-s1", "half/global-s1", "half/coterie-s1"),
        *("all/global-s0", "all/ifca-s0", "half/global-s0", "half/coterie-s0"),
    ]
    assert [case.place for case in cases_of(tiny, tiny.spots(tiny.chosen(), [1, 0]), no_count)] == places


def test_rows_and_columns_are_chosen_by_label_or_key(tiny: Suite):
    assert [(row.label, column.name) for row, column in tiny.chosen(["Global", "magic"], ["half"])] == [
        ("Global", "half"),
        ("Magic", "half"),
    ]
    with pytest.raises(UnknownName, match="no row of tiny named 'globl'. Did you mean 'global'"):
        tiny.chosen(["globl"])


def test_a_method_is_told_the_true_number_of_groups_and_coterie_is_not(tiny: Suite):
    cases = {case.place: case for case in cases_of(tiny, tiny.spots(tiny.chosen(), [0, 1]), no_count)}
    assert cases["all/ifca-s0"].experiment.algorithm.num_clusters == 4
    assert cases["all/ifca-s1"].experiment.algorithm.num_clusters == 3
    assert cases["half/coterie-s0"].experiment.algorithm.num_clusters == "auto"


def test_scale_multiplies_what_the_suite_names(tiny: Suite):
    (case, *_) = cases_of(tiny, tiny.spots(tiny.chosen(["Global"]), [0]), no_count, scale=0.5)
    assert case.experiment.schedule.rounds == 2
    assert case.experiment.clients == 8  # fewer would be no federation
    (least, *_) = cases_of(tiny, tiny.spots(tiny.chosen(["Global"]), [0]), no_count, scale=0.01)
    assert least.experiment.schedule.rounds == 1


def test_names_of_suites(toml: Path):
    assert [suite.name for suite in find_suites(["feddsmic/table2"])] == [
        f"feddsmic/table2-{data}"
        for data in ("mnist", "mnist-plain", "cifar10", "cifar100", "cifar10-lenet", "emnist", "femnist")
    ]
    assert [suite.name for suite in find_suites(["feddsmic/table2-mnist"])] == ["feddsmic/table2-mnist"]
    assert [suite.name for suite in find_suites(["flux", "md_icfl/table4", str(toml)])] == [
        *("md_icfl/table4", "flux/mnist", "flux/cifar10", "tiny")
    ]
    assert {suite.name for suite in find_suites(["all"])} == set(suite_names())
    assert [suite.name for suite in find_suites(["fesem/figures"])] == [  # all of them show runs of a table
        *("fesem/table2-writers-mnist", "fesem/table3-celeba200", "fesem/table2-femnist", "fesem/table3-fedceleba")
    ]
    assert all("/figures-" in suite.name for suite in find_suites(["feddsmic/figures"]))
    with pytest.raises(UnknownName, match="Did you mean 'md_icfl/table4'"):
        find_suites(["md_icfl/tabel4"])
    with pytest.raises(UnknownName, match="There is no suite 'corn/figures'"):
        find_suites(["corn/figures"])


def change(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


WRONG = {
    "unknown field": (change("seeds =", "seds ="), "There is no field 'seds'. Did you mean 'seeds'"),
    "unknown table": (change("work.epochs", "wrk.epochs"), "There is no table or field 'wrk'"),
    "no title": (change('title = "Table 1: digits"', ""), "it has no 'title'"),
    "too few numbers": (change("[80.0, 70.0]", "[80.0]"), "row Global has 2 columns, but 1 published numbers"),
    "other metric": (change("published.ari", "published.f1"), "no metric of row IFCA named 'f1'"),
    "other column": (change('columns = ["all"]', 'columns = ["al"]'), "no column of row IFCA named 'al'"),
    "same rows": (change('"IFCA"', '"Global"'), "its rows need names that differ"),
    "mode": (change('"ours"', '"mine"'), "There is no mode 'mine'"),
    "groups": (change("[4, 3]", "[4]"), "groups of column all must have a number for each seed"),
    "mean": (change('["all", "half"]', '["whole"]'), "There is no column 'whole'"),
    "name": (change('"all"\ngroups', '"../all"\ngroups'), "a name of letters"),
    "not TOML": (change("[base]", "[base"), "cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_sentence(toml: Path, case: str):
    edit, sentence = WRONG[case]
    text = toml.read_text()
    assert edit(text) != text
    toml.write_text(edit(text))
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_suite(toml, "tiny")


def test_a_setting_that_does_not_exist_names_suite_and_row(toml: Path):
    toml.write_text(toml.read_text().replace('method = "fedavg"', 'method = "fedavg"\nalgorithm.mu = 1'))
    suite = read_suite(toml, "tiny")
    with pytest.raises(ConfigError, match="tiny, Global: There is no field of algorithm.* 'mu'"):
        cases_of(suite, suite.spots(suite.chosen(), [0]), no_count)
