"""`coterie data show`: the numbers of a federation, its pictures, and one page."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.cli.output import file_stem
from coterie.runs.experiment import merge, resolve

from .conftest import Command

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def show(command: Command) -> Command:
    """`coterie data show ARGUMENTS...`."""
    return lambda *arguments: command("data", "show", *arguments)


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """Three users: 10 of class 0; 5 and 5; 8, 1 and 1. Two groups."""
    y = np.repeat([0, 0, 1, 0, 1, 2], [10, 5, 5, 8, 1, 1])
    user = np.repeat(["ann", "bob", "cy"], 10)
    x = np.random.default_rng(0).integers(0, 256, (30, 4, 4), dtype=np.uint8)
    path = tmp_path / "own data.npz"
    np.savez(path, x=x, y=y, user=user, group=np.repeat([0, 1, 1], 10))
    return path


class Page(HTMLParser):
    """The tags, the addresses and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def test_json_has_the_numbers_of_rotated_digits(show: Command):
    done = show("rotated-digits", "--clients", 8, "--json")
    assert (done.code, done.err) == (0, "")
    found = done.json
    federation = resolve(merge({"run": {"clients": 8}})).federation()
    assert found["dataset"] == "rotated-digits"
    assert found["scenario"] == "rotated"
    assert found["clients"] == 8 == len(found["per_client"])
    assert found["classes"] == 10
    assert found["input_shape"] == [1, 8, 8]
    assert found["samples"]["train"] == int(federation.train.sizes.sum())
    assert found["samples"]["valid"] == int(federation.valid.sizes.sum())
    assert found["samples"]["test"] == 4 * 360  # a test set for each rotation, shared by its clients
    assert [group["name"] for group in found["groups"]] == ["r000", "r090", "r180", "r270"]
    assert [group["clients"] for group in found["groups"]] == [2, 2, 2, 2]
    own = [client["train"] + client["valid"] for client in found["per_client"]]
    assert found["samples_per_client"] == {"min": min(own), "median": float(np.median(own)), "max": max(own)}
    assert [sum(client["labels"]) for client in found["per_client"]] == own
    assert [client["group"] for client in found["per_client"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert 7 <= found["label_skew"] <= 8
    assert found["digest"] == federation.digest()


def test_json_has_the_numbers_of_a_file(show: Command, own_file: Path):
    found = show(own_file, "--set", "scenario.test=0.1", "--set", "scenario.valid=0", "--json").json
    by_name = {client["name"]: client for client in found["per_client"]}
    assert found["clients"] == 3
    assert found["classes"] == 3
    assert found["samples"] == {"train": 27, "valid": 0, "test": 3}
    assert found["samples_per_client"] == {"min": 9, "median": 9.0, "max": 9}
    assert [(group["clients"], group["samples"]) for group in found["groups"]] == [(1, 9), (2, 18)]
    assert by_name["ann"]["labels"] == [9, 0, 0]
    assert sum(by_name["cy"]["labels"]) == 9
    assert by_name["ann"] | {"labels": None} == {
        "name": "ann", "group": 0, "train": 9, "valid": 0, "test": 1, "labels": None
    }  # fmt: skip
    # ann has one class; bob's 9 are 5 and 4; cy has 7 or 8 of class 0.
    cy = 1 if by_name["cy"]["labels"][0] == 8 else 2
    assert found["label_skew"] == pytest.approx((1 + 2 + cy) / 3)


def test_the_test_samples_are_shown(show: Command):
    found = show("rotated-digits", "--clients", 8, "--json").json
    assert found["tests_per_client"] == {"min": 360, "median": 360.0, "max": 360}
    assert found["test_sets"] == 4
    found = show("rotated-digits", "--clients", 8, "--set", "scenario.tests=like", "--json").json
    # 1,437 training samples for two clients: 719 or 718, and a quarter of them for testing.
    assert found["tests_per_client"] == {"min": 180, "median": 180.0, "max": 180}
    assert found["test_sets"] == 8
    assert "4 test sets, shared by clients" in show("rotated-digits", "--clients", 8).out
    own = show("rotated-digits", "--clients", 8, "--set", "scenario.tests=own").out
    assert "each client has its own test set" in own


def test_the_pictures_and_the_page_are_written_where_they_are_said_to_be(show: Command, own_file: Path):
    found = show(own_file, "--json").json
    assert found["files"] == {
        "labels": "data-own-data/labels.png",
        "samples": "data-own-data/samples.png",
        "page": "data-own-data/index.html",
    }
    assert Path(found["files"]["labels"]).read_bytes().startswith(PNG)
    assert Path(found["files"]["samples"]).read_bytes().startswith(PNG)
    other = show("rotated-digits", "--clients", 4, "-o", "deep/down", "--json").json
    assert sorted(path.name for path in Path("deep/down").iterdir()) == ["index.html", "labels.png", "samples.png"]
    assert other["files"]["page"] == "deep/down/index.html"


def test_the_page_needs_no_network_and_has_both_themes(show: Command):
    show("rotated-digits", "--clients", 8, "--quiet")
    text = Path("data-rotated-digits/index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "://" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert page.tags.count("img") == 2
    assert page.tags.count("source") == 2
    for address in page.addresses:
        head, _, data = address.partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(PNG)
    light = base64.b64encode(Path("data-rotated-digits/labels.png").read_bytes()).decode()
    assert f'<img src="data:image/png;base64,{light}"' in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    for word in ("clients", "label skew", "r000", "r270-001"):
        assert word in page.words


def test_names_are_text_on_the_page(show: Command, tmp_path: Path):
    path = tmp_path / "bad.npz"
    users = np.repeat(["<script>alert(1)</script>", "[bold]&amp"], 10)
    np.savez(path, x=np.ones((20, 3), dtype=np.float32), y=np.arange(20) % 2, user=users)
    done = show(path)
    assert done.code == 0
    page = Page(Path("data-bad/index.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert {"<script>alert(1)</script>", "[bold]&amp"} <= set(page.words)


def test_the_table_says_it_in_words(show: Command):
    done = show("rotated-digits", "--clients", 8)
    rows = dict(re.findall(r"^│ (.+?) +│ (.+?) +│$", done.out, re.MULTILINE))
    assert done.code == 0
    assert rows["clients"] == "8"
    assert rows["classes"] == "10"
    assert rows["true groups"].startswith("4: r000 (2 clients), r090 (2 clients)")
    assert rows["samples"].endswith("test 1,440")
    assert rows["label skew"].endswith("classes hold 80 % of a client's samples, on average")
    assert rows["page"] == "data-rotated-digits/index.html"
    assert done.err == "reading rotated-digits\n"
    assert show("rotated-digits", "--clients", 8, "--quiet").err == ""


def test_the_same_again_gives_the_same_bytes_and_another_seed_other_data(show: Command):
    one = show("rotated-digits", "--clients", 4, "--seed", 1, "-o", "one", "--json").json
    two = show("rotated-digits", "--clients", 4, "--seed", 1, "-o", "two", "--json").json
    three = show("rotated-digits", "--clients", 4, "--seed", 2, "-o", "two", "--json").json
    assert one["digest"] == two["digest"] != three["digest"]
    again = show("rotated-digits", "--clients", 4, "--seed", 1, "-o", "two", "--json").json
    assert again == two
    for name in ("labels.png", "samples.png", "index.html"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()


def test_fewer_clients_than_any_clustered_method_takes(show: Command):
    found = show("rotated-digits", "--scenario", "iid", "--clients", 1, "--json").json
    assert found["clients"] == 1
    assert found["groups"] is None
    assert found["per_client"][0]["group"] is None


def test_features_have_no_sample_pictures_and_targets_no_labels(show: Command, tmp_path: Path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "table.npz", x=rng.random((40, 3)), y=np.arange(40) % 4)
    found = show("table.npz", "--clients", 2, "--json").json
    assert found["files"]["samples"] is None
    assert found["files"]["labels"] == "data-table/labels.png"
    np.savez(tmp_path / "prices.npz", x=rng.random((40, 3)), y=rng.random(40))
    done = show("prices.npz", "--clients", 2, "--json")
    found = done.json
    assert (found["classes"], found["label_skew"], found["files"]["labels"]) == (None, None, None)
    assert found["per_client"][0]["labels"] is None
    assert [path.name for path in Path("data-prices").iterdir()] == ["index.html"]
    assert "none: targets are numbers" in show("prices.npz", "--clients", 2).out


WRONG: list[tuple[tuple[Any, ...], str]] = [
    (("rotated-digit",), "There is no dataset 'rotated-digit'. Did you mean 'rotated-digits'?"),
    (("missing.npz",), "There is no file missing.npz;"),
    (("rotated-digits", "--scenario", "rotatd"), "There is no scenario 'rotatd'. Did you mean 'rotated'?"),
    (("rotated-digits", "--clients", "many"), "--clients must be an int >= 1 and <= 10,000,000. Got 'many' instead."),
    (("rotated-digits", "--clients", 0), "--clients must be an int >= 1 and <= 10,000,000. Got '0' instead."),
    (("rotated-digits", "--seed", "x"), "--seed must be an int >= 0. Got 'x' instead."),
    (("rotated-digits", "--set", "scenario.grups=2"), "Did you mean 'groups'?"),
    (("rotated-digits", "--set", "scenario.groups=0"), "groups of Rotated must be an int >= 1"),
    (
        ("rotated-digits", "--set", "work.lr=1"),
        "--set takes fields of scenario or dataset here.",
    ),
    (("rotated-digits", "--set", "groups"), "--set takes TABLE.FIELD=VALUE"),
    (("rotated-digits", "-o", "taken"), "taken is a file; name a folder to write to with -o."),
    ((), "Missing argument 'NAME'."),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_input_is_one_sentence_and_nothing_is_written(show: Command, arguments: tuple[Any, ...], said: str):
    Path("taken").write_text("")
    assert said in show(*arguments, "--quiet").error
    assert [path.name for path in Path().iterdir()] == ["taken"]


def test_the_folder_of_a_name_is_a_plain_name():
    assert file_stem("a/b c.npz") == "b-c"
    assert file_stem("femnist") == "femnist"
    assert file_stem("/x/...npz") == "own"


# ---- check ----


def test_check_prints_the_same_numbers_and_writes_nothing(command: Command, show: Command, own_file: Path):
    found = command("data", "check", own_file, "--json").json
    assert sorted(own_file.parent.iterdir()) == [own_file]
    assert found["inputs"] == "uint8 pixels: x / 127.5 - 1"
    assert "│ uint8 pixels: x / 127.5 - 1 " in command("data", "check", own_file).out
    shown = show(own_file, "--json").json
    shown.pop("files")
    assert found == shown
