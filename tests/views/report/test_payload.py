"""What the page gets: all of it, small, and plain."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coterie.runs.reading import read_run
from coterie.views.report.payload import MOST_ROUNDS, page_payload, png_uri, run_payload, tsne_payload

from .made import make_run, row_of


def picture(uri: str) -> np.ndarray[Any, Any]:
    head, _, content = uri.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


@pytest.mark.parametrize("channels", [1, 3])
def test_png_files_are_read_back_by_another_library(channels: int):
    image = np.random.default_rng(0).integers(0, 256, (5, 9, channels), dtype=np.uint8)
    assert (picture(png_uri(image)) == (image[..., 0] if channels == 1 else image)).all()


def test_every_part_of_a_run_is_there(tmp_path: Path):
    payload = run_payload(read_run(make_run(tmp_path)))
    parts = ("curves", "spread", "sizes", "flow", "map", "clients", "confusion", "fairness", "labels", "members")
    assert all(payload[part] for part in parts)
    assert payload["map"]["tsne"] is not None
    assert payload["groups"] == ["g0", "g1", "g2"]


def test_the_confusion_counts_clients(tmp_path: Path):
    payload = run_payload(read_run(make_run(tmp_path, clients=12, clusters=3)), tsne=False)
    assert payload["confusion"] == {"clusters": [0, 1, 2], "counts": [[4, 0, 0], [0, 4, 0], [0, 0, 4]]}


def test_fairness_by_hand(tmp_path: Path):
    path = make_run(tmp_path, clients=6, clusters=2)
    with np.load(path / "clients.npz") as found:
        arrays = {name: found[name] for name in found.files}
    arrays["accuracy"] = np.array([[0.9, 0.1, 0.5, 0.7, 0.3, 0.2]])
    arrays["samples"] = np.array([[10, 10, 10, 10, 10, 0]])  # the last one has no test samples
    np.savez(path / "clients.npz", **arrays)
    found = run_payload(read_run(path), tsne=False)["fairness"]
    assert found["worst"] == [1, 4, 2, 3, 0]
    assert found["mean"] == 0.5
    assert found["parts"] == [["5 worst clients", 0.5], ["worst tenth", 0.1]]
    assert found["jain"] == round(2.5**2 / (5 * (0.81 + 0.01 + 0.25 + 0.49 + 0.09)), 5)
    assert found["deviation"] == round(float(np.std([0.9, 0.1, 0.5, 0.7, 0.3])), 5)


def test_long_curves_are_thinned_and_the_last_round_stays(tmp_path: Path):
    payload = run_payload(read_run(make_run(tmp_path, rounds=1000)), tsne=False)
    rounds = payload["curves"]["round"]
    assert len(rounds) == MOST_ROUNDS
    assert (rounds[0], rounds[-1]) == (1, 1000)
    assert all(len(values) == MOST_ROUNDS for values in payload["curves"].values())


def test_many_clients_are_a_heat_map_whose_columns_are_shares(tmp_path: Path):
    payload = run_payload(read_run(make_run(tmp_path, clients=500, classes=5)), tsne=False)["labels"]
    assert payload["kind"] == "heat"
    table = np.array(payload["shares"])
    assert table.shape == (5, 240)
    np.testing.assert_allclose(table.sum(0), 1, atol=0.01)
    assert sorted(payload["group"]) == payload["group"]


def test_classes_are_called_by_their_names(tmp_path: Path):
    path = make_run(tmp_path, clients=4, classes=3)
    file = path / "artifacts" / "manifest.json"
    manifest = json.loads(file.read_text())
    for names, shown in ((["a", "b", "c"], ["a", "b", "c"]), (["a", "b"], [0, 1, 2]), (3, [0, 1, 2])):
        file.write_text(json.dumps(manifest | {"class_names": names}))
        assert run_payload(read_run(path), tsne=False)["labels"]["classes"] == shown


def test_bubbles_are_the_counts_in_order_of_group(tmp_path: Path):
    run = read_run(make_run(tmp_path, clients=6, clusters=2))
    payload = run_payload(run, tsne=False)["labels"]
    assert payload["clients"] == [0, 2, 4, 1, 3, 5]
    assert run.counts is not None
    assert payload["counts"] == run.counts[[0, 2, 4, 1, 3, 5]].tolist()


def test_members_are_strips_of_their_pictures(tmp_path: Path):
    run = read_run(make_run(tmp_path, clients=12))
    payload = run_payload(run, tsne=False)["members"]
    assert [group["cluster"] for group in payload] == [0, 1, 2]
    first = payload[0]["members"][0]
    assert first["labels"] == [0, 1, 2]
    strip = picture(first["strip"])
    pictures = run.members["picture"][run.members["client"] == first["client"]]
    assert (strip[:, :6] == pictures[0, ..., 0]).all()
    assert (strip[:, 7:13] == pictures[1, ..., 0]).all()


def test_pseudo_samples_and_maps(tmp_path: Path):
    path = make_run(tmp_path)
    told = np.full((2, 2, 3, 3), 0.1, dtype=np.float32)
    pseudo = np.random.default_rng(0).integers(0, 256, (2, 3, 2, 4, 4, 1), dtype=np.uint8)
    np.savez(path / "artifacts" / "method.npz", told=told, pseudo=pseudo)
    payload = run_payload(read_run(path), tsne=False)["pseudo"]
    assert payload["clusters"] == [0, 1]
    assert payload["witness"] is None
    image = picture(payload["strips"][1])
    assert (image[:4, :4] == pseudo[1, 0, 0, ..., 0]).all()
    assert (image[:4, 5:9] == pseudo[1, 1, 0, ..., 0]).all()  # a column a class
    assert (image[5:9, :4] == pseudo[1, 0, 1, ..., 0]).all()  # below it, the next picture of the class


def test_repairs_and_failures_are_told(tmp_path: Path):
    path = make_run(tmp_path, rounds=1)
    with (path / "rounds.jsonl").open("a") as lines:
        row = row_of(2, 0.5, [4, 4, 4], repairs=[{"round": 2, "cluster": 1, "reason": "cluster 1 was empty"}])
        lines.write(json.dumps(row) + "\n")
    failures = [{"round": 1, "client": "x", "step": "m:train", "reason": "late"}] * 300
    (path / "artifacts" / "failures.json").write_text(json.dumps(failures))
    payload = run_payload(read_run(path), tsne=False)
    assert payload["repairs"] == [{"round": 2, "reason": "cluster 1 was empty"}]
    assert payload["failures"]["total"] == 300
    assert payload["failures"]["reasons"] == [("late", 300)]
    assert len(payload["failures"]["rows"]) == 200
    assert payload["failures"]["rows"][0] == [1, "x", "train", "late"]


def test_decisions_are_told(tmp_path: Path):
    path = make_run(tmp_path, rounds=1, clients=12)
    cut = {
        "what": "cut",
        "clusters": [0, 1, 2],
        "sizes": [5, 3, 2],
        "z": 236.456,
        "q": 1e9,
        "signed_at": "common model",
    }
    refused = {"what": "refused", "clusters": [1], "sizes": [2, 1], "z": 3.0, "q": 0.25, "t": -0.5}
    moves = [{"client": f"c{i}", "from_cluster": 0, "to_cluster": 2} for i in range(10)]
    move = {"what": "move", "clusters": [], "moves": moves, "loss_rose": 10}
    with (path / "rounds.jsonl").open("a") as lines:
        for number, found in ((4, [cut]), (5, [refused, move]), (6, [refused])):
            lines.write(json.dumps(row_of(number, 0.5, [6, 4, 2], decisions=found)) + "\n")
    payload = run_payload(read_run(path), tsne=False)["decisions"]
    assert payload["kinds"] == "3 kinds found."
    assert payload["about"].count(":") == 3
    named = [f"c{i} (0 → 2)" for i in range(8)]
    assert payload["rows"] == [
        [4, "cut", "0, 1, 2", "5, 3, 2", 236.46, 1e9, None, None],
        [5, "refused", "1", "2, 1", 3, 0.25, -0.5, None],
        [5, "move", None, None, None, None, None, ", ".join(named) + " and 2 more"],
    ]
    assert payload["hidden"] == 1
    assert payload["moves"] == ["Round 5: c0 and 9 more moved, after their loss rose."]
    assert [leaf["size"] for leaf in payload["tree"]["parts"]] == [6, 4, 2]


def test_of_very_many_decisions_refusals_are_left_out(tmp_path: Path):
    path = make_run(tmp_path, rounds=1)
    refused = [{"what": "refused", "clusters": [0], "sizes": [2, 1], "z": float(i)} for i in range(500)]
    cut = {"what": "cut", "clusters": [0, 1, 2], "sizes": [1, 1, 1]}
    with (path / "rounds.jsonl").open("a") as lines:
        lines.write(json.dumps(row_of(2, 0.5, [4, 4, 4], decisions=[*refused, cut])) + "\n")
    payload = run_payload(read_run(path), tsne=False)["decisions"]
    assert [row[1] for row in payload["rows"]] == ["cut"]
    assert payload["hidden"] == 500


def test_without_decisions_there_is_no_panel(tmp_path: Path):
    assert run_payload(read_run(make_run(tmp_path)), tsne=False)["decisions"] is None


def test_clients_that_are_all_alone_have_no_cluster_pictures(tmp_path: Path):
    path = make_run(tmp_path, clients=40, clusters=40, rounds=2)
    payload = run_payload(read_run(path), tsne=False)
    assert payload["sizes"] is payload["flow"] is payload["confusion"] is None
    assert ["clusters", "40", "one per client"] in payload["headline"]


def test_several_runs_bring_a_table_and_one_does_not(tmp_path: Path):
    runs = [read_run(make_run(tmp_path, name, algorithm=name, best=best)) for name, best in (("a", 0.9), ("b", 0.4))]
    assert page_payload(runs[:1], tsne=False)["compare"] is None
    table = page_payload(runs, tsne=False)["compare"]
    assert [row["label"] for row in table["rows"]] == ["a", "b"]
    keys = [column[0] for column in table["columns"]]
    assert table["rows"][0]["cells"][keys.index("accuracy")][2] is True
    assert table["rows"][1]["cells"][keys.index("accuracy")][2] is False


def test_a_thousand_clients_and_three_hundred_rounds_are_small(tmp_path: Path):
    run = read_run(make_run(tmp_path, rounds=300, clients=1000, clusters=8, classes=10))
    assert len(json.dumps(run_payload(run, tsne=False), separators=(",", ":"))) < 400_000


def test_without_models_there_is_no_map(tmp_path: Path):
    path = make_run(tmp_path)
    (path / "artifacts" / "sketches.npz").unlink()
    run = read_run(path)
    assert run_payload(run)["map"] is None
    assert tsne_payload(run) is None


def test_movement_tells_the_rounds_in_which_labels_changed(tmp_path: Path):
    path = make_run(tmp_path, rounds=4)
    file = path / "summary.json"
    summary = json.loads(file.read_text())
    assert run_payload(read_run(path), tsne=False)["movement"] is None  # a run of an older version
    more = {"start_ari": 0.123456, "ari": None, "moved_since_start": 3, "label_changes": [2, 0, 0, 1]}
    file.write_text(json.dumps(summary | more))
    assert run_payload(read_run(path), tsne=False)["movement"] == {
        "start": 0.1235,
        "end": None,
        "moved": 3.0,
        "changes": [[1, 2], [4, 1]],
    }
    no_start = {"start_ari": None, "moved_since_start": None}
    file.write_text(json.dumps(summary | more | no_start))
    found = run_payload(read_run(path), tsne=False)["movement"]
    assert (found["moved"], found["changes"]) == (None, [[1, 2], [4, 1]])
    file.write_text(json.dumps(summary | no_start | {"label_changes": [0, 0, 0, 0]}))
    assert run_payload(read_run(path), tsne=False)["movement"] is None
