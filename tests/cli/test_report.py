"""`coterie report`: the page and the pictures."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coterie.runs.experiment import resolve
from coterie.runs.reading import read_run
from coterie.runs.settings import merge, read_tables
from coterie.views.report.payload import run_payload
from tests.views.report.made import make_run

from .conftest import TINY, Command


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text()
    start = text.index('id="data">') + len('id="data">')
    found: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])
    return found


def test_the_page_of_a_run_lies_in_its_folder(command: Command):
    assert command("run", *TINY, "--name", "a", "--quiet").code == 0
    done = command("report", "runs/a", "--no-tsne")
    assert done.code == 0
    assert done.out.startswith("runs/a/report.html (0.")
    runs = data_of(Path("runs/a/report.html"))["runs"]
    assert isinstance(runs, list)
    assert runs[0]["name"] == "a"
    assert runs[0]["done"] == 2


def test_a_page_of_a_whole_comparison(command: Command):
    assert command("compare", "-a", "fedavg", "-a", "fesem", *TINY, "--seeds", 2, "--name", "c", "--quiet").code == 0
    done = command("report", "runs/c", "--no-tsne", "--json")
    assert done.json == {"page": "runs/c/report.html", "runs": 4, "damaged": [], "skipped": [], "pictures": []}
    found = data_of(Path("runs/c/report.html"))["compare"]
    assert isinstance(found, dict)
    assert [(row["label"], row["seeds"]) for row in found["rows"]] == [("fedavg", [0, 1]), ("fesem", [0, 1])]
    written = json.loads(Path("runs/c/table.json").read_text())
    for row, other in zip(found["rows"], written, strict=True):
        mean, deviation, _ = row["cells"][0]
        assert mean == pytest.approx(100 * other["accuracy"]["macro"]["mean"], abs=1e-4)
        assert deviation == pytest.approx(100 * other["accuracy"]["macro"]["std"], abs=1e-4)


def test_every_picture_is_written_as_png_and_svg(command: Command, tmp_path: Path):
    make_run(tmp_path, "a")
    done = command("report", "a", "-o", "page.html", "--png", "pictures", "--no-tsne", "--json").json
    assert done["page"] == "page.html"
    names = {Path(path).stem for path in done["pictures"]}
    assert names >= {"accuracy", "f1", "loss", "cluster-sizes", "churn", "flow", "map", "map-by-group", "confusion"}
    assert names >= {"client-accuracy", "labels", "member-samples", "bytes", "accuracy-by-bytes", "seconds"}
    assert not any("tsne" in name for name in names)
    for path in map(Path, done["pictures"]):
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert min(image.size) > 100
        else:
            assert path.read_text().startswith("<?xml")
    assert len(done["pictures"]) == 2 * len(names)


def test_only_some_pictures(command: Command, tmp_path: Path):
    for name in ("a", "b"):
        make_run(tmp_path / "x", name, algorithm=name, rounds=2)
    words = ("report", "x", "--no-tsne", "--quiet", "--png", "p")
    assert command(*words, "--only", "flow", "--only", "compare-f1").code == 0
    assert sorted(str(path.relative_to("p")) for path in Path("p").rglob("*.png")) == [
        "a/flow.png",
        "b/flow.png",
        "compare-f1.png",
    ]
    assert command(*words, "--only", "bytes_sent").code == 0  # the function of the picture `bytes`
    assert Path("p/a/bytes.png").exists()
    assert "There is no picture 'flo'. Did you mean 'flow'?" in command(*words, "--only", "flo").error
    assert "give a folder for them with --png DIR" in command("report", "x", "--only", "flow").error


def test_pictures_are_counted_once_and_missing_ones_are_named(command: Command, tmp_path: Path):
    make_run(tmp_path, "a", rounds=2)
    done = command("report", "a", "--no-tsne", "--png", "p", "--only", "flow", "--only", "pseudo-samples")
    assert "drawing 2 plots\nnot drawn, as the data is not there: pseudo-samples\n" in done.err
    assert ", 1 run) and 1 picture (PNG and SVG) in p\n" in done.out
    assert sorted(path.name for path in Path("p").iterdir()) == ["flow.png", "flow.svg"]


def test_several_runs_have_folders_and_curves_over_each_other(command: Command, tmp_path: Path):
    for name in ("a", "b"):
        make_run(tmp_path / "x", name, algorithm=name, rounds=2)
    make_run(tmp_path / "y", "a", algorithm="z", rounds=2)
    some = [word for name in ("loss", "compare-accuracy", "compare-accuracy-by-bytes") for word in ("--only", name)]
    done = command("report", "x", "y/a", "-o", "all.html", "--png", "p", "--no-tsne", "--quiet", *some)
    assert done.code == 0
    assert done.err == ""
    assert Path("p/compare-accuracy.png").exists()
    assert Path("p/compare-accuracy-by-bytes.svg").exists()
    assert {path.name for path in Path("p").iterdir() if path.is_dir()} == {"a", "b", "a-2"}


def test_a_damaged_run_among_others_is_left_out_and_told(command: Command, tmp_path: Path):
    make_run(tmp_path / "x", "good")
    (make_run(tmp_path / "x", "bad") / "summary.json").write_text("{")
    done = command("report", "x", "-o", "page.html", "--no-tsne")
    assert done.code == 0
    assert "skipped: x/bad/summary.json is damaged" in done.err
    told = command("report", "x", "-o", "page.html", "--no-tsne", "--json").json
    assert told["runs"] == 1
    assert told["damaged"][0]["path"] == "x/bad"
    assert "summary.json is damaged" in command("report", "x/bad").error


def test_wrong_input_is_one_sentence(command: Command, tmp_path: Path):
    assert command("report", "nowhere").error == "There is no folder nowhere."
    Path("file").write_text("")
    assert command("report", "file").error == "file is a file; name a run folder."
    Path("empty").mkdir()
    assert command("report", "empty").error == "empty is not a run folder and contains none."
    make_run(tmp_path, "a")
    Path("blocked").write_text("")
    assert "cannot be written" in command("report", "a", "-o", "blocked/page.html", "--no-tsne").error
    assert "cannot be written" in command("report", "a", "--no-tsne", "--png", "blocked/pictures").error
    (make_run(tmp_path / "x", "bad") / "config.toml").write_text("schema = 99\n[run]\n")
    (make_run(tmp_path / "x", "worse") / "config.toml").write_text("[")
    assert command("report", "x").error.startswith(
        "None of the 2 folders could be read; the first: x/bad has schema 99"
    )


def test_a_folder_as_target_gets_the_page(command: Command, tmp_path: Path):
    make_run(tmp_path, "a")
    Path("out").mkdir()
    assert command("report", "a", "-o", "out", "--no-tsne").out.startswith("out/report.html")


def test_the_command_on_the_page_repeats_the_run(command: Command):
    assert command("run", *TINY, "--clusters", 2, "--name", "a", "--seed", 5, "--quiet").code == 0
    words = run_payload(read_run(Path("runs/a")), tsne=False)["command"].split()
    assert words[:2] == ["coterie", "run"]
    assert command(*words[1:], "--quiet").code == 0
    one, other = (read_run(Path("runs") / name) for name in ("a", "a-again"))
    assert one.curves["accuracy"].tolist() == other.curves["accuracy"].tolist()
    assert one.config == other.config
    written = tomllib.loads(Path("runs/a/config.toml").read_text())
    assert resolve(merge(read_tables(Path("runs/a/config.toml")))).tables() | {"schema": 1} == written


def test_a_comparison_over_situations_has_a_heat_map(command: Command):
    Path("own.toml").write_text("[two]\nalgorithm.num_clusters = 2\n[four]\nalgorithm.num_clusters = 4\n")
    base = ("compare", "--scenarios", "own.toml", "-a", "fedavg", "-a", "fesem", *TINY, "--set", "engine.plan=layers")
    assert command(*base, "--name", "c", "--quiet").code == 0
    assert command("report", "runs/c", "--no-tsne", "--json").json["runs"] == 3  # fedavg runs once
    found = data_of(Path("runs/c/report.html"))
    heat = found["compare"]["heat"]
    assert (heat["names"], heat["methods"]) == (["two", "four"], ["fedavg", "fesem"])
    written = {tuple(row["labels"].values()): row for row in json.loads(Path("runs/c/table.json").read_text())}
    for name, cells in zip(heat["names"], heat["cells"], strict=True):
        for method, cell in zip(heat["methods"], cells, strict=True):
            assert cell["accuracy"][0] == pytest.approx(written[name, method]["accuracy"]["macro"]["mean"], abs=1e-5)
    assert [run["name"] for run in found["runs"]] == ["two/fedavg-s0", "two/fesem-s0", "four/fesem-s0"]
    assert command("report", "runs/c/two", "--no-tsne", "--json").json["runs"] == 2
