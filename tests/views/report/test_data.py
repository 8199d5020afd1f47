"""Reading run folders: whole ones, growing ones, and whatever else may lie there."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coterie
from coterie.errors import RunError
from coterie.runs import files
from coterie.runs.folder import RunFolder
from coterie.runs.reading import as_run, find_runs, read_run
from coterie.views.report.payload import run_payload

from .made import append_round, make_run, row_of


def test_a_whole_run_is_read_as_it_was_written(tmp_path: Path):
    run = read_run(make_run(tmp_path, rounds=4, clients=9, clusters=3, best=0.6))
    assert (run.state, run.done, run.planned, run.problems) == ("finished", 4, 4, [])
    assert run.title == "fesem on made, seed 0"
    assert run.rounds.tolist() == [1, 2, 3, 4]
    rows = [json.loads(line) for line in (tmp_path / "a" / "rounds.jsonl").read_text().splitlines()]
    assert run.curves["accuracy"].tolist() == [row["accuracy"]["macro"] for row in rows]
    assert run.spread["loss"].tolist() == [row["spread"]["loss"] for row in rows]
    assert run.curves["up"].tolist() == [2000, 4000, 6000, 8000]
    assert run.labels is not None
    assert run.labels.shape == (5, 9)
    assert run.clusters is not None
    assert run.clusters.tolist() == [0, 1, 2] * 3
    assert run.group_names() == ["g0", "g1", "g2"]
    assert run.counts is not None
    assert run.counts.sum(1).tolist() == [50] * 9
    assert run.sketches is not None
    assert run.members["picture"].shape == (24, 6, 6, 1)


def test_a_run_from_python_needs_no_folder():
    result = coterie.run("fesem", "rotated-digits", rounds=2, seed=1)
    run = as_run(result)
    assert run.path is None
    assert run.state == "finished"
    assert run.curves["accuracy"].tolist() == [row["accuracy"]["macro"] for row in result.rows]
    assert run.names == list(result.federation.names)
    assert run.clusters is not None
    assert run.clusters.tolist() == result.labels.tolist()
    assert run.sketches is not None
    assert run.members
    assert "run the program again" in run_payload(run, tsne=False)["command"]


def test_a_folder_and_its_result_tell_the_same(tmp_path: Path):
    result = coterie.run("fesem", "rotated-digits", rounds=2, out=tmp_path, name="x")
    from_folder = as_run(RunFolder.open(tmp_path / "x"))
    assert as_run(result).path == from_folder.path == tmp_path / "x"
    assert as_run(str(tmp_path / "x")).curves["loss"].tolist() == [row["loss"]["macro"] for row in result.rows]


def test_what_is_no_run_is_refused():
    with pytest.raises(RunError, match="A run is a path to its folder or a Result. Got int instead."):
        as_run(3)


# ---- growing ----


def test_a_run_that_goes_on_is_readable_at_every_byte(tmp_path: Path):
    path = make_run(tmp_path, rounds=2, planned=9, finished=False)
    line = (json.dumps(row_of(3, 0.5, [4, 4, 4])) + "\n").encode()
    before = (path / "rounds.jsonl").read_bytes()
    for cut in range(len(line)):
        (path / "rounds.jsonl").write_bytes(before + line[:cut])
        assert read_run(path).done == 2
    (path / "rounds.jsonl").write_bytes(before + line)
    assert read_run(path).done == 3
    append_round(path, 4)
    assert read_run(path).done == 4
    assert read_run(path).planned == 9


def test_running_stopped_finished(tmp_path: Path):
    path = make_run(tmp_path, rounds=2, planned=6, finished=False)
    assert read_run(path).state == "stopped"
    assert read_run(path).seconds_left is None
    folder = RunFolder.open(path)
    with folder.held():
        run = read_run(path)
        assert run.state == "running"
        assert run.seconds_left == pytest.approx(4 * 0.35)
    assert read_run(path).state == "stopped"


def test_a_killed_run_does_not_count_as_running(tmp_path: Path):
    path = make_run(tmp_path, finished=False)
    gone = os.fork()
    if gone == 0:
        RunFolder.open(path).lock()
        os._exit(0)  # without letting go, as a killed process
    os.waitpid(gone, 0)
    assert json.loads((path / ".lock").read_text())["pid"] == gone
    assert read_run(path).state == "stopped"


def test_of_a_run_on_another_machine_its_files_tell(tmp_path: Path):
    path = make_run(tmp_path, finished=False)
    (path / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "born": "1"}))
    assert read_run(path).state == "running"
    for file in path.iterdir():
        os.utime(file, (0, 0))
    assert read_run(path).state == "stopped"


def test_before_the_first_round_there_is_little_and_nothing_breaks(tmp_path: Path):
    path = make_run(tmp_path, finished=False)
    for name in ("rounds.jsonl", "labels.npy", "clients.npz", "artifacts/sketches.npz", "artifacts/members.npz"):
        (path / name).unlink()
    run = read_run(path)
    assert run.done == 0
    assert len(run.names) == 12  # of the manifest
    payload = run_payload(run)
    assert payload["flow"] is payload["map"] is payload["sizes"] is None


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path):
    path = make_run(tmp_path, rounds=1)
    row = row_of(2, 0.5, [4, 4, 4], loss={"micro": float("nan"), "macro": float("inf")})
    with (path / "rounds.jsonl").open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    run = read_run(path)
    assert np.isnan(run.curves["loss"][1])
    assert json.dumps(run_payload(run, tsne=False), allow_nan=False)


# ---- damaged ----

DAMAGES: dict[str, tuple[str, bytes | None, str]] = {
    "no config": ("config.toml", None, "is not a run folder: it has no config.toml"),
    "config cut": ("config.toml", b"schema = 1\n[run", "config.toml is damaged"),
    "config of bytes": ("config.toml", b"\xff\xfe\x00", "config.toml is damaged"),
    "config without schema": ("config.toml", b"[run]\n", "has no schema number"),
    "config of words": ("config.toml", b"schema = 'one'\n", "has no schema number"),
    "config of tomorrow": ("config.toml", b"schema = 99\n[run]\n", "has schema 99"),
    "config without run": ("config.toml", b"schema = 1\n", "has no table \\[run\\]"),
    "rows of text": ("rounds.jsonl", b"hello\n", "damaged in line 1"),
    "rows of numbers": ("rounds.jsonl", b"3\n", "line 1: it has no round number"),
    "round of text": ("rounds.jsonl", b'{"round": "1"}\n', "has no round number"),
    "round zero": ("rounds.jsonl", b'{"round": 0}\n', "has no round number"),
    "round true": ("rounds.jsonl", b'{"round": true}\n', "has no round number"),
    "rounds backwards": ("rounds.jsonl", b'{"round": 2}\n{"round": 1}\n', "line 2: round 1 comes after round 2"),
    "score of text": ("rounds.jsonl", b'{"round": 1, "accuracy": {"macro": "high"}}\n', "accuracy.macro is 'high'"),
    "score flat": ("rounds.jsonl", b'{"round": 1, "accuracy": 0.5}\n', "accuracy.macro is '0.5'"),
    "spread short": ("rounds.jsonl", b'{"round": 1, "spread": {"accuracy": [1]}}\n', "spread is"),
    "spread text": ("rounds.jsonl", b'{"round": 1, "spread": "wide"}\n', "line 1"),
    "sizes of text": ("rounds.jsonl", b'{"round": 1, "cluster_sizes": ["a"]}\n', "cluster_sizes is"),
    "sizes negative": ("rounds.jsonl", b'{"round": 1, "cluster_sizes": [-1]}\n', "cluster_sizes is"),
    "clusters of text": ("rounds.jsonl", b'{"round": 1, "decisions": [{"clusters": ["a"]}]}\n', "clusters is"),
    "evidence of text": ("rounds.jsonl", b'{"round": 1, "decisions": [{"z": "clear"}]}\n', "z is 'clear'"),
    "move to text": (
        "rounds.jsonl",
        b'{"round": 1, "decisions": [{"moves": [{"to_cluster": "b"}]}]}\n',
        "to_cluster is",
    ),
    "nobody moved": ("rounds.jsonl", b'{"round": 1, "decisions": [{"what": "move"}]}\n', "moves is"),
    "summary cut": ("summary.json", b'{"rounds": 3', "summary.json is damaged"),
    "summary a list": ("summary.json", b"[]", "summary.json is damaged: it is not an object"),
    "summary empty": ("summary.json", b"{}", "it has no number of rounds"),
    "environment cut": ("environment.json", b"{", "environment.json is damaged"),
    "deep": ("summary.json", b"[" * 100_000, "summary.json is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_in_one_sentence(tmp_path: Path, damage: str):
    name, content, expected = DAMAGES[damage]
    path = make_run(tmp_path)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)
    with pytest.raises(RunError, match=expected) as told:
        read_run(path)
    assert "\n" not in str(told.value)


def archive(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "gone"),
    [
        ("labels.npy", b"no array", "labels"),
        ("labels.npy", pickle.dumps([1, 2]), "labels"),
        ("artifacts/sketches.npz", b"PK\x03\x04", "sketches"),
        ("artifacts/manifest.json", b"{", "counts"),
    ],
)
def test_what_only_pictures_need_may_be_damaged(tmp_path: Path, name: str, content: bytes, gone: str):
    path = make_run(tmp_path)
    (path / name).write_bytes(content)
    run = read_run(path)
    assert getattr(run, gone) is None
    assert [name in problem for problem in run.problems] == [True]
    assert run_payload(run, tsne=False)["problems"] == run.problems


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("artifacts/sketches.npz", {"sketch": np.zeros((3, 4)), "round": np.ones(3)}),
        ("artifacts/sketches.npz", {"sketch": np.zeros(12), "round": np.ones(12)}),
        ("artifacts/members.npz", {"picture": np.zeros((2, 4), dtype=np.uint8)}),
        ("artifacts/members.npz", {"picture": np.zeros((1, 2, 2, 1), np.uint8), "client": np.array([99])}),
        ("artifacts/method.npz", {"told": np.zeros((2, 3, 4, 4))}),
        ("artifacts/method.npz", {"told": np.array(["a"])}),
        ("clients.npz", {"name": np.array([["a", "b"]])}),
        ("clients.npz", {"name": np.array(["a"]), "accuracy": np.array(["x"]), "group": np.array(["y"])}),
    ],
)
def test_arrays_that_do_not_fit_together_are_left_out(tmp_path: Path, name: str, arrays: dict[str, Any]):
    path = make_run(tmp_path)
    (path / name).write_bytes(archive(**arrays))
    run = read_run(path)
    assert json.dumps(run_payload(run, tsne=False), allow_nan=False)


def test_nothing_is_unpickled(tmp_path: Path):
    class Trap:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "sprung").touch, ())

    path = make_run(tmp_path)
    with zipfile.ZipFile(path / "clients.npz", "w") as out:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.array([Trap()], dtype=object), allow_pickle=True)
        out.writestr("name.npy", buffer.getvalue())
    run = read_run(path)
    assert len(run.problems) >= 1
    assert not (tmp_path / "sprung").exists()


def test_a_pipe_is_not_waited_for_and_a_folder_is_no_file(tmp_path: Path):
    path = make_run(tmp_path)
    (path / "rounds.jsonl").unlink()
    os.mkfifo(path / "rounds.jsonl")
    with pytest.raises(RunError, match="rounds.jsonl is not a regular file"):
        read_run(path)
    (path / "rounds.jsonl").unlink()
    (path / "rounds.jsonl").mkdir()
    with pytest.raises(RunError, match="rounds.jsonl"):
        read_run(path)


def test_links_that_lead_out_are_not_followed(tmp_path: Path):
    root = tmp_path / "runs"
    path = make_run(root)
    secret = tmp_path / "secret.json"
    secret.write_text('{"rounds": 1, "password": "x"}')
    (path / "summary.json").unlink()
    (path / "summary.json").symlink_to(secret)
    with pytest.raises(RunError, match=r"summary\.json is a link"):
        read_run(path)


def test_files_beyond_sense_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_run(tmp_path)
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 20)
    (path / "artifacts" / "sketches.npz").write_bytes(b"")
    with zipfile.ZipFile(path / "artifacts" / "sketches.npz", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("sketch.npy", bytes(4 << 20))
    assert "unpacks to 4 MB" in read_run(path).problems[0]
    with (path / "rounds.jsonl").open("ab") as lines:
        lines.truncate(2 << 20)
    with pytest.raises(RunError, match="has 2 MB; the limit is 1 MB"):
        read_run(path)


def assert_run_or_sentence(path: Path) -> None:
    """Reading and drawing either works, or says one sentence."""
    told = ""
    try:
        json.dumps(run_payload(read_run(path), tsne=False), allow_nan=False)
    except RunError as error:
        told = str(error)
    assert "\n" not in told


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(row_of(1, 0.5, [1]))), value=values)
def test_any_value_in_a_row_gives_a_run_or_one_sentence(tmp_path: Path, key: str, value: Any):
    path = tmp_path / "a"
    if not path.exists():
        make_run(tmp_path, rounds=1)
    (path / "rounds.jsonl").write_text(json.dumps(row_of(1, 0.5, [4, 4, 4]) | {key: value}) + "\n")
    assert_run_or_sentence(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(
        [
            "summary.json",
            "environment.json",
            "artifacts/failures.json",
            "artifacts/manifest.json",
            "artifacts/unseen.json",
            "artifacts/choose-k.json",
        ]
    ),
    value=values,
)
def test_any_json_in_a_file_gives_a_run_or_one_sentence(tmp_path: Path, name: str, value: Any):
    path = tmp_path / "b"
    if path.exists():
        for old in ("summary.json", "artifacts/unseen.json", "artifacts/choose-k.json"):
            (path / old).unlink(missing_ok=True)
    else:
        make_run(tmp_path, "b", rounds=1)
    (path / name).write_text(json.dumps(value))
    assert_run_or_sentence(path)


# ---- finding ----


def test_runs_are_found_inside_folders_of_runs(tmp_path: Path):
    make_run(tmp_path, "b")
    make_run(tmp_path / "compare-x", "a-s0")
    make_run(tmp_path / "deep" / "er" / "still" / "more", "z")
    (tmp_path / ".hidden").mkdir()
    make_run(tmp_path / ".hidden", "c")
    (tmp_path / "just a folder").mkdir()
    (tmp_path / "file").write_text("")
    make_run(tmp_path / "b" / "artifacts", "inner")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "summary.json").write_text("{")
    (tmp_path / "elsewhere").symlink_to("/etc")
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "c").symlink_to(tmp_path / "b")
    assert [name for name, _ in find_runs(tmp_path)] == ["b", "broken", "c", "compare-x/a-s0"]
    assert [name for name, _ in find_runs(tmp_path / "b")] == ["b"]


def test_names_of_groups_are_numbers_where_names_do_not_tell(tmp_path: Path):
    run = read_run(make_run(tmp_path, clients=4, clusters=2, names=["anna", "bert", "carl", "dora"]))
    assert run.group_names() == ["group 0", "group 1"]


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        (["north", "south"], ["north", "south"]),
        (["north"], ["group 0", "group 1"]),  # too few
        (["north", 3], ["group 0", "group 1"]),
        ("ns", ["group 0", "group 1"]),
        (None, ["group 0", "group 1"]),  # of an earlier version
    ],
)
def test_names_of_groups_are_those_of_the_data(tmp_path: Path, named: object, shown: list[str]):
    path = make_run(tmp_path, clients=4, clusters=2, names=["anna", "bert", "carl", "dora"])
    manifest = json.loads((path / "artifacts" / "manifest.json").read_text())
    (path / "artifacts" / "manifest.json").write_text(json.dumps(manifest | {"group_names": named}))
    assert read_run(path).group_names() == shown
