"""A new user's trial of "runs" and "taking models home": the command or line they try, and what comes of it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import coterie
from coterie import SGD, CoterieError, Federation, FeSEM
from coterie.methods.base import algorithms
from tests.cli.conftest import Command

SMALL = ("--clients", 8, "--epochs", 1, "--quiet")


def write(path: str, samples: int = 30, shift: float = 0.0) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(6 * samples, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    np.savez(path, x=x + np.float32(shift), y=y, user=np.repeat(np.arange(6), samples))


@pytest.fixture
def own(command: Command) -> Path:
    """A finished run over a file of one's own, started in another folder."""
    Path("work").mkdir()
    os.chdir("work")
    write("own.npz")
    assert command("run", "-d", "own.npz", "-a", "fesem", "-k", 2, "--rounds", 2, "--name", "a", "--quiet").code == 0
    os.chdir("..")
    return Path("work/runs/a")


# ---- resume ----


def test_twenty_more_rounds(command: Command):
    command("run", "-a", "fesem", "--rounds", 2, "--name", "short", *SMALL)
    command("run", "-a", "fesem", "--rounds", 4, "--name", "long", *SMALL)
    found = command("resume", "runs/short", "--rounds", 4, "--json").json
    long = command("show", "runs/long", "--json").json
    assert (found["rounds"], found["accuracy"], found["bytes"]) == (4, long["accuracy"], long["bytes"])
    assert found["notes"][-1].endswith("the result equals that of one run of 4 rounds")
    assert command("resume", "runs/short", "--rounds", 3).error.startswith(
        "runs/short has done 4 rounds; --rounds must"
    )


def test_a_run_ends_when_validation_gets_no_better(command: Command):
    work = ("--epochs", 5, "--patience", 2, "--rounds", 40, "--name", "a", *SMALL)
    found = command("run", "-a", "fedavg", *work, "--json").json
    assert found["stopped_early"]
    assert (found["rounds"], found["best_round"]) == (found["best_round"] + 2, found["rounds"] - 2)
    assert f"{found['best_round']} of {found['rounds']}, by validation" in command("show", "runs/a").out
    assert "patience" in command("run", "-a", "fedavg", "--patience", 0, *SMALL).error


def test_the_default_method_says_what_differs(command: Command):
    command("run", "--rounds", 2, "--name", "a", *SMALL)
    done = command("resume", "runs/a", "--rounds", 3)
    assert "may differ from that of one run of 3 rounds, because coterie finishes personal models" in done.err


@pytest.mark.parametrize("verb", ["compare", "sweep"])
def test_the_same_command_goes_on(command: Command, verb: str):
    more = ("-g", "work.lr=0.1,0.2") if verb == "sweep" else ("-a", "fesem")
    line = (verb, "-a", "fedavg", *more, "--rounds", 1, "--clients", 8, "--epochs", 1)
    command(*line)
    folder = Path(f"runs/{verb}-rotated-digits")
    (folder / "table.json").unlink()  # as if it had been stopped before its last run
    shutil.rmtree(sorted(folder.glob("*-s0"))[-1])
    done = command(*line)
    assert f"continuing {folder}" in done.err
    assert done.err.count("already there") == 1
    assert command(*line).err.count("already there") == 0  # a finished one is not touched
    assert Path(f"runs/{verb}-rotated-digits-2/table.json").exists()


# ---- data that is elsewhere ----


def test_a_run_is_opened_from_any_folder(command: Command, own: Path):
    assert command("resume", own, "--rounds", 3, "--quiet").code == 0
    assert coterie.open_run(own).summary["rounds"] == 3


def test_a_moved_file(command: Command, own: Path):
    Path("work/own.npz").rename("moved.npz")
    said = command("resume", own, "--rounds", 3).error
    assert said.endswith("work/own.npz; say where it is now with --data PATH (in Python data=...).")
    assert command("resume", own, "--rounds", 3, "--data", "moved.npz", "--quiet").code == 0
    assert coterie.open_run(own).summary["rounds"] == 3  # it remembers the place


def test_a_moved_project(command: Command, own: Path):
    Path("work").rename("elsewhere")
    assert command("resume", "elsewhere/runs/a", "--rounds", 3, "--quiet").code == 0


@pytest.mark.parametrize(
    ("samples", "shift", "sentence"),
    [
        (29, 0.0, "client '0' has 5 test samples, not 6, and 5 more such differences."),
        (30, 1.0, "sizes and labels are the same, but values of samples differ."),
    ],
)
def test_a_changed_file(command: Command, own: Path, samples: int, shift: float, sentence: str):
    write("work/own.npz", samples, shift)
    said = command("resume", own, "--rounds", 3).error
    assert "work/own.npz has changed since the run in work/runs/a began:" in said
    assert sentence in said
    assert command("show", own, "--json").json["rounds"] == 2  # the run is as it was


def test_data_for_a_run_without_a_file(command: Command, small_run: Path):
    said = command("resume", small_run, "--rounds", 3, "--data", "x.npz").error
    assert said.endswith("was trained on the dataset rotated-digits, not on a file; leave --data out.")


# ---- names ----


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", ""])
def test_names_that_lead_elsewhere_are_refused(command: Command, name: str):
    for verb in ("run", "compare"):
        said = command(verb, "--name", name, "--rounds", 1, *SMALL).error
        assert said.startswith("--name must be the name of a folder, without slashes; --out says where. Got ")
    assert not Path("runs").exists()


def test_a_report_of_everything_there(command: Command, small_run: Path):
    Path("runs/junk").mkdir(parents=True)
    Path("runs/notes.txt").touch()
    shutil.copytree(small_run, "runs/x")
    done = command("report", "runs/junk", "runs/notes.txt", "runs/x", "-o", "page.html", "--no-tsne")
    assert done.code == 0
    assert "skipped: runs/junk is not a run folder and contains none." in done.err
    assert "skipped: runs/notes.txt is a file." in done.err
    assert command("report", "runs/junk", "runs/notes.txt").error.startswith("None of the 2 paths is a run folder;")


# ---- from Python ----


class Watch:
    """Somebody else's callback."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def on_round(self, row: dict[str, Any]) -> None:
        self.rounds.append(row["round"])


def digits(method: str = "fesem", **settings: Any) -> coterie.Result:
    return coterie.run(method, "rotated-digits", **{"rounds": 1, "clients": 8, "epochs": 1} | settings)


def test_any_observers():
    watch, rows = Watch(), list[dict[str, Any]]()
    digits(rounds=2, observer=[watch, rows.append])
    assert (watch.rounds, len(rows)) == ([1, 2], 2)
    with pytest.raises(CoterieError, match="An observer is an Observer, an object with on_round"):
        digits(observer=3)


@pytest.mark.parametrize(
    "settings",
    [
        {"scenario": "iid"},
        {"clusters": 2},
        {"clusters": "auto"},
        {"lr": 0.5, "optimizer": "adam", "batch_size": 5},
        {"participation": 0.5, "unseen": 0.2, "device": "cpu"},
        {"set": {"algorithm.prox": 0.1}},
        {"set": ["algorithm.prox=0.1"]},
    ],
    ids=str,
)
def test_every_flag_is_an_argument(settings: dict[str, Any]):
    assert digits(**settings).summary["rounds"] == 1


def test_wrong_arguments_are_one_sentence():
    with pytest.raises(CoterieError, match="There is no argument named 'cluster'. Did you mean 'clusters'"):
        digits(cluster=3)
    with pytest.raises(CoterieError, match="num_clusters belongs to FeSEM"):
        coterie.run(FeSEM(), clusters=3)
    with pytest.raises(CoterieError, match="lr belongs to SGD"):
        coterie.run("fedavg", work=SGD(), lr=0.3)
    with pytest.raises(CoterieError, match="resume=True needs the folder of the runs"):
        digits(resume=True)
    with pytest.raises(CoterieError, match="scenario is for named datasets and files; the federation two has its"):
        coterie.run("fedavg", two(), scenario="iid")


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]):
    digits(progress=True)
    assert "round 1/1" in capsys.readouterr().err


def two() -> Federation:
    random = torch.Generator().manual_seed(0)
    clients = {i: (torch.randn(20, 4, generator=random), torch.arange(20) % 2) for i in range(4)}
    return Federation.from_clients(clients, name="two")


def test_resume_and_extend_from_python(tmp_path: Path):
    first = digits(rounds=2, out=tmp_path, name="a", resume=True)
    again = digits(rounds=2, out=tmp_path, name="a", resume=True)
    assert torch.equal(first.centers, again.centers)
    longer = digits(rounds=3, out=tmp_path, name="a", resume=True)
    assert torch.equal(longer.centers, digits(rounds=3).centers)
    with pytest.raises(
        CoterieError, match="has other settings: work.lr is 0.2 there and 0.7 here. Choose another name"
    ):
        digits(rounds=3, out=tmp_path, name="a", resume=True, lr=0.7)


def test_own_objects_are_given_again(tmp_path: Path):
    def net() -> nn.Module:
        return nn.Linear(4, 2)

    data = two()
    result = coterie.run(FeSEM(num_clusters=2), data, net, rounds=2, out=tmp_path, name="own")
    with pytest.raises(
        CoterieError, match=r"with its own data and model; give it again there: coterie.run\(..., data="
    ):
        coterie.open_run(tmp_path / "own")
    opened = coterie.open_run(tmp_path / "own", data=data, model=net)
    assert torch.equal(opened.centers, result.centers)
    weights = coterie.open_run(tmp_path / "own", data=False).cluster_state_dict(1)  # the folder is enough for weights
    assert torch.equal(weights["weight"], result.cluster_state_dict(1)["weight"])
    longer = coterie.run(FeSEM(num_clusters=2), data, net, rounds=3, out=tmp_path, name="own", resume=True)
    assert longer.summary["rounds"] == 3


def test_compare_sweep_and_choose_k(tmp_path: Path):
    table = coterie.compare(["fedavg", FeSEM(num_clusters=2)], two(), seeds=2, rounds=1, out=tmp_path)
    assert [row["algorithm"] for row in table.rows] == ["fedavg", "fesem"]
    assert [run["seed"] for run in table.runs] == [0, 0, 1, 1]
    assert len(table.frame()) == 2
    grid = coterie.sweep({"algorithm.num_clusters": [2, 3]}, ["fesem"], clients=8, rounds=1, epochs=1, out=tmp_path)
    assert [row["labels"]["num_clusters"] for row in grid.rows] == ["2", "3"]
    assert coterie.choose_k("rotated-digits", clients=16, last=5).recommended == 4


def test_every_method_is_at_the_top_level():
    for method in algorithms().values():
        assert getattr(coterie, method.__name__) is method


@pytest.mark.parametrize("method", ["fesem", "coterie"])
def test_a_result_can_be_pickled(method: str):
    result = digits(method, rounds=2, unseen=0.2)
    copy = pickle.loads(pickle.dumps(result))
    x = torch.randn(5, 1, 8, 8)
    for client in (*result.clusters, *[row["name"] for row in result.unseen.rows()]):  # type: ignore[union-attr]
        torch.testing.assert_close(copy.personal_model(client)(x), result.personal_model(client)(x))
    assert (copy.summary, copy.rows, copy.clusters) == (result.summary, result.rows, result.clusters)


def test_what_happens_is_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="coterie"):
        digits()
    told = [(record.name, record.getMessage().partition(":")[0]) for record in caplog.records]
    assert ("coterie.data", "rotated-digits") in told
    assert ("coterie.runs", "round 1") in told
    assert ("coterie.runs", "rotated-digits-fesem-s0") in told


# ---- taking models home ----


def facts(path: Path | str) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        found: dict[str, str] = file.metadata()
        return found


def test_export_needs_neither_data_nor_place(command: Command, own: Path):
    opened = coterie.open_run(own)
    shutil.move(own, "a")
    shutil.rmtree("work")
    for which in (("--cluster", 1), ("--client", "3")):
        done = command("export", "a", *which, "-o", "m.safetensors")
        assert done.code == 0, done.err
        told = facts("m.safetensors")
        assert told["inputs"] == "float32 numbers, not scaled"
        assert (told["network"], json.loads(told["network_settings"]), told["outputs"]) == ("mlp", {}, "2")
        assert (told["round"], told["data_digest"]) == ("2", opened.summary["digest"])
    assert (told["client"], int(told["cluster"])) == ("3", opened.clusters["3"])
    assert command("export", "a", "--all", "--json").json["clients"] == {
        name: f"cluster-{label}.safetensors" for name, label in opened.clusters.items()
    }


@pytest.mark.parametrize("method", ["coterie", "fedper", "local", "perfedavg", "fedem"])
def test_personal_models_are_in_the_folder(method: str, tmp_path: Path):
    result = digits(method, rounds=2, out=tmp_path, name="a", unseen=0.2)
    home = coterie.open_run(tmp_path / "a", data=False)
    x = torch.randn(5, 1, 8, 8)
    for client in (*result.clusters, *[row["name"] for row in result.unseen.rows()]):  # type: ignore[union-attr]
        torch.testing.assert_close(home.personal_model(client)(x), result.personal_model(client)(x))


def test_models_that_are_not_kept_are_made_again(command: Command):
    command("run", "-a", "fedper", "--rounds", 1, "--name", "a", "--set", "run.keep_models=0", *SMALL)
    assert not Path("runs/a/artifacts/personal.safetensors").exists()
    assert command("export", "runs/a", "--client", "r000-000").code == 0  # the data is at hand
    with pytest.raises(CoterieError, match="start it with --set run.keep_models=MB"):
        coterie.open_run("runs/a", data=False).personal_model("r000-000")


@pytest.mark.parametrize("form", ["safetensors", "torch.export", "onnx"])
def test_each_format_computes_the_same(command: Command, form: str, small_run: Path):
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="needs pip install 'coterie[onnx]'")
        runtime = pytest.importorskip("onnxruntime")
    done = command("export", small_run, "--cluster", 0, "--format", form, "-o", "model.pt2")
    assert done.code == 0, done.err
    result = coterie.open_run(small_run)
    x = torch.randn(7, 1, 8, 8)
    expected = result.model(cluster=0)(x)
    if form == "safetensors":
        module = result.personal_model(0)
        with safe_open("model.pt2", framework="pt") as file:
            module.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        got = module(x)
    elif form == "torch.export":
        files = {"coterie.json": ""}
        got = torch.export.load("model.pt2", extra_files=files).module()(x)
        assert json.loads(files["coterie.json"])["inputs"] == "uint8 pixels: x / 8 - 1"
    else:
        session = runtime.InferenceSession("model.pt2")
        got = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
        assert session.get_modelmeta().custom_metadata_map["network"] == "mlp"
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_formats_that_are_not_there(command: Command, small_run: Path, monkeypatch: pytest.MonkeyPatch):
    said = command("export", small_run, "--cluster", 0, "--format", "onxx").error
    assert said.startswith("There is no format 'onxx'. Did you mean 'onnx'?")
    monkeypatch.setattr("coterie.runs.saving.find_spec", lambda name: None)
    said = command("export", small_run, "--cluster", 0, "--format", "onnx").error
    assert said == "Export to ONNX requires an optional dependency: pip install 'coterie[onnx]'."


NETWORK = """
from torch import nn

def small(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))

def deep(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, outputs))
"""


def test_a_network_of_ones_own(command: Command):
    Path("my_nets.py").write_text(NETWORK)
    command("run", "-a", "fedavg", "--model", "my_nets:small", "--rounds", 1, "--name", "a", *SMALL)
    Path("my_nets.py").rename("gone.py")
    assert command("export", "runs/a", "--cluster", 0, "-o", "m.safetensors").code == 0  # weights need no code
    assert facts("m.safetensors")["network"] == "my_nets:small"
    Path("gone.py").rename("my_nets.py")
    said = command("export", "runs/a", "--cluster", 0, "--format", "torch.export").error
    assert "run.model = 'my_nets:small'. Say --trust (in Python trust=True) if you know" in said
    done = command("export", "runs/a", "--cluster", 0, "--format", "torch.export", "--model", "my_nets:small")
    assert done.code == 0, done.err


def test_another_network_than_the_runs_is_named(command: Command):
    Path("my_nets.py").write_text(NETWORK)
    for model in ("mlp", "my_nets:deep"):
        command("run", "-a", "fedavg", "--model", model, "--rounds", 1, "--name", model[:3], *SMALL)
        program = ("export", f"runs/{model[:3]}", "--cluster", 0, "--format", "torch.export", "--model")
        said = command(*program, "my_nets:small").error
        assert said.startswith(f"runs/{model[:3]} was trained with {model}, not with my_nets:small; ")


def test_new_clients_do_not_need_the_data_of_the_run(command: Command, own: Path):
    Path("work/own.npz").unlink()
    write("new.npz")
    rows = command("onboard", own, "-d", "new.npz", "--json").json["clients"]
    assert [row["name"] for row in rows] == list("012345")
