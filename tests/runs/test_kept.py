"""What a run folder keeps of its network and its models, and what is done about damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import coterie
from coterie.errors import RunError
from coterie.runs.kept import NETWORK, PERSONAL
from coterie.runs.opening import open_models


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    coterie.run("fedper", rounds=1, clients=8, epochs=1, out=out, name="a")
    return out / "a"


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "a"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("shape", "x"), ("dtype", "complex64"), ("num_classes", None), ("tensors", [1]), ("mean", "a"), ("outputs", [])],
)
def test_a_damaged_description_is_one_sentence(path: Path, key: str, value: object):
    file = path / NETWORK
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(RunError, match="model.json is damaged"):
        open_models(path, with_network=False)


def test_a_tensor_that_is_none_is_refused(path: Path):
    file = path / NETWORK
    facts = json.loads(file.read_text())
    for wrong in ({"dtype": "Tensor"}, {"shape": [-1]}, {"shape": [1 << 40]}, {"name": ""}):
        broken = [facts["tensors"]["tensors"][0] | wrong, *facts["tensors"]["tensors"][1:]]
        file.write_text(json.dumps(facts | {"tensors": facts["tensors"] | {"tensors": broken}}))
        with pytest.raises(RunError, match="damaged|does not fit the run"):
            open_models(path, with_network=False)


def test_damaged_personal_models_are_one_sentence(path: Path):
    file = path / PERSONAL
    tensors = load_file(file)
    names = {"names": json.dumps(["r000-000"])}
    for wrong in (
        {"refs": tensors["refs"] + 1000},
        {"starts": torch.zeros(2, dtype=torch.int64)},
        {"bias": torch.ones(1)},
    ):
        save_file(tensors | wrong, file, names)
        with pytest.raises(RunError, match="personal.safetensors is damaged"):
            open_models(path).personal_model("r000-000")
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(RunError, match="personal.safetensors is damaged"):
        open_models(path).personal_model("r000-000")


def test_a_folder_of_an_earlier_version_is_opened_with_its_data(path: Path):
    (path / NETWORK).unlink()
    assert open_models(path).has_data
    with pytest.raises(RunError, match="does not say what its network is"):
        coterie.open_run(path, data=False)


def test_alike_models_are_kept_once(tmp_path: Path):
    coterie.run("fedem", rounds=1, clients=8, epochs=1, out=tmp_path, name="a", set={"algorithm.num_clusters": 3})
    tensors = load_file(tmp_path / "a" / PERSONAL)
    assert (len(tensors["models"]), len(tensors["refs"])) == (3, 24)


def test_clients_are_asked_after_the_summary_was_made(tmp_path: Path):
    settings = {"rounds": 1, "clients": 8, "epochs": 1, "out": tmp_path}
    kept = coterie.run("perfedavg", name="a", **settings)
    none = coterie.run("perfedavg", name="b", set={"run.keep_models": 0}, **settings)
    assert kept.summary["bytes"] == none.summary["bytes"]
    assert [(tmp_path / name / PERSONAL).exists() for name in "ab"] == [True, False]
