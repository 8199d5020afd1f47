"""Coterie from Python: what a result can do, and that a run that cannot begin leaves nothing behind."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import coterie
from coterie import SGD, FedAvg, FeSEM, Local
from coterie.api import Result
from coterie.data import dataset
from coterie.data.federation import Federation
from coterie.errors import ConfigError, CoterieError, Interrupted, MissingExtra, ModelError, RunError, UnknownName
from coterie.runs.execution import execute
from coterie.runs.experiment import Experiment, find_loss, merge, resolve
from coterie.runs.folder import RunFolder

WORK = SGD(lr=0.2, epochs=1, batch_size=20)


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are tiny here: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits() -> Federation:
    return resolve(merge({"run": {"clients": 8}})).federation()


@pytest.fixture(scope="module")
def result(digits: Federation) -> Result:
    return coterie.run(FeSEM(num_clusters=4), digits, "mclr", rounds=2, work=WORK)


# ---- Result ----


def test_the_result_in_five_lines(result: Result, digits: Federation):
    assert result.path is None
    assert result.labels.shape == (8,)
    assert result.centers.shape == (4, 650)
    assert result.clusters == dict(zip(digits.names, result.labels.tolist(), strict=True))
    assert result.summary["ari"] == 1.0
    assert len(result.rows) == result.summary["rounds"] == 2
    assert repr(result) == f"<Result of fesem on digits: accuracy {result.summary['accuracy']['macro']:.4f}>"


def test_a_personal_model_scores_what_the_run_says(result: Result, digits: Federation):
    scores = result.frame("clients").set_index("name")["accuracy"]
    for number, name in enumerate(digits.names):
        x, y = digits.samples(number, "test")
        with torch.no_grad():
            right = (result.personal_model(name)(x).argmax(1) == y).double().mean()
        assert float(right) == pytest.approx(scores[name])


def test_personal_models_are_copies_in_eval_mode(result: Result):
    first, second = result.personal_model(0), result.personal_model("r000-000")
    assert not first.training
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0
    assert result.personal_model(0).state_dict()["1.weight"].equal(second.state_dict()["1.weight"])


def test_clients_that_keep_their_own_model_get_that_one(digits: Federation):
    own = coterie.run(Local(), digits, "mclr", rounds=1, work=WORK)
    scores = own.frame("clients")["accuracy"]
    weights = []
    for number in (0, 5):
        x, y = digits.samples(number, "test")
        model = own.personal_model(number)
        with torch.no_grad():
            assert float((model(x).argmax(1) == y).double().mean()) == pytest.approx(scores[number])
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert not weights[0].equal(weights[1])


@pytest.mark.parametrize("who", ["nobody", 8, -1, 1.5])
def test_a_client_that_is_not_there_is_one_sentence(result: Result, who: Any):
    with pytest.raises(ConfigError, match=r"There is no client .*\. Clients are r000-000 \.\.\. r270-001\."):
        result.personal_model(who)


def test_newcomers_join_the_cluster_of_their_kind(result: Result):
    others = resolve(merge({"run": {"clients": 12, "seed": 9}})).federation()
    labels = result.assign(others)
    assert labels.shape == (12,)
    of_group = {group: result.clusters[f"r{90 * group:03d}-000"] for group in range(4)}
    assert labels.tolist() == [of_group[group] for group in others.groups.tolist()]
    assert len(set(of_group.values())) == 4


def test_frames_of_rounds_and_clients(result: Result):
    rounds, clients = result.frame(), result.frame("clients")
    assert rounds["accuracy.macro"].tolist() == [row["accuracy"]["macro"] for row in result.rows]
    assert clients["cluster"].tolist() == result.labels.tolist()
    assert clients["accuracy"].mean() == pytest.approx(result.summary["accuracy"]["macro"])
    with pytest.raises(ConfigError, match=r"takes 'rounds' or 'clients'\. Got 'servers' instead"):
        result.frame("servers")


def test_without_pandas_the_extra_is_named(result: Result, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'coterie\[report\]'"):
        result.frame()


# ---- run ----


def test_equal_calls_give_equal_results_and_seeds_differ(digits: Federation, result: Result):
    again = coterie.run(FeSEM(num_clusters=4), digits, "mclr", rounds=2, work=WORK)
    assert again.centers.equal(result.centers)
    assert not coterie.run(FeSEM(), digits, "mclr", rounds=2, work=WORK, seed=1).centers.equal(result.centers)


def test_a_named_dataset_brings_its_model_and_work():
    run = coterie.run("fedavg", "rotated-digits", rounds=1)
    assert run.summary["model"] == "mlp"
    assert run.summary["clients"] == 40
    assert run.personal_model(0)[1].out_features == 64
    other = coterie.run("fedavg", "rotated-digits", model="mclr", rounds=1)
    assert other.summary["model"] == "mclr"


def test_a_named_dataset_brings_its_rounds(monkeypatch: pytest.MonkeyPatch):
    preset = replace(dataset.find_preset("rotated-digits"), run={"rounds": 2})
    monkeypatch.setitem(dataset._PRESETS, "rotated-digits", preset)
    assert coterie.run("fedavg", "rotated-digits", "mclr").summary["rounds"] == 2
    assert coterie.run("fedavg", "rotated-digits", "mclr", rounds=1).summary["rounds"] == 1


def test_a_factory_a_loss_and_an_observer_of_ones_own(digits: Federation):
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def squared(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs - nn.functional.one_hot(y, 10)).square().mean(1)

    seen: list[int] = []
    run = coterie.run(
        FedAvg(), digits, network, rounds=2, work=WORK, loss=squared, observer=lambda row: seen.append(row["round"])
    )
    assert seen == [1, 2]
    assert run.summary["model"] == "network"
    assert run.rows[1]["loss"]["macro"] < run.rows[0]["loss"]["macro"]


def test_numbers_instead_of_classes():
    random = torch.Generator().manual_seed(0)
    data = {}
    for i in range(4):
        x = torch.randn(30, 3, generator=random)
        data[f"c{i}"] = (x, (x @ torch.tensor([1.0, -2.0, 0.5])) * (1 if i % 2 else -1))
    run = coterie.run(FeSEM(num_clusters=2), Federation.from_clients(data), "mclr", loss="mse", rounds=8)
    assert run.summary["accuracy"] is None
    assert run.summary["f1"] is None
    assert run.summary["loss"]["macro"] < 0.1
    assert run.summary["cluster_sizes"] == [2, 2]
    assert run.summary["r2"]["macro"] > 0.95
    assert repr(run).startswith("<Result of fesem on own: loss 0.")


def test_with_out_there_is_a_folder(digits: Federation, tmp_path: Path):
    run = coterie.run("fedavg", digits, "mclr", rounds=1, work=WORK, out=tmp_path, name="mine")
    assert run.path == tmp_path / "mine"
    assert json.loads((tmp_path / "mine" / "summary.json").read_text()) == json.loads(json.dumps(run.summary))
    assert run.summary["path"] == str(tmp_path / "mine")
    head = RunFolder.open(tmp_path / "mine").config()["run"]
    assert head["from_python"] == ["data"]
    assert (head["algorithm"], head["model"], head["rounds"]) == ("fedavg", "mclr", 1)
    with pytest.raises(RunError, match="exists"):
        coterie.run("fedavg", digits, "mclr", rounds=1, out=tmp_path, name="mine")


def test_the_environment_is_written(digits: Federation, tmp_path: Path):
    run = coterie.run("fedavg", digits, "mclr", rounds=1, work=WORK, out=tmp_path, name="mine")
    found = json.loads((tmp_path / "mine" / "environment.json").read_text())
    assert found["coterie"] == coterie.__version__
    assert found["torch"] == torch.__version__
    assert found["digest"] == run.summary["digest"] == digits.digest()
    assert found["plan"] == run.summary["plan"]
    assert found["plan"].keys() >= {"engine", "device", "precision", "memory", "chunk", "plan"}


def too_few_outputs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def cannot_be_made() -> nn.Module:
    raise RuntimeError("no weights today")


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"algorithm": "fesm"}, UnknownName, "Did you mean 'fesem'"),
        ({"algorithm": FeSEM(num_clusters=9)}, ConfigError, r"at most the number of clients, 8\. Got 9"),
        ({"algorithm": FeSEM(num_clusters=0)}, ConfigError, r"int >= 1\. Got 0"),
        ({"model": "mlpp"}, UnknownName, "Did you mean 'mlp'"),
        ({"model": "lenet"}, ModelError, r"at least 12x12; samples have shape \(1, 8, 8\)"),
        ({"model": too_few_outputs}, ModelError, r"3 outputs, but digits has labels up to 9: it needs 10 outputs"),
        ({"model": lambda: nn.Linear(3, 10)}, ModelError, r"cannot take samples of shape \(1, 8, 8\)"),
        ({"model": lambda: 3}, ModelError, r"must return a torch.nn.Module. Got int"),
        ({"loss": "crossentropy"}, UnknownName, "Did you mean 'cross_entropy'"),
        ({"loss": "nowhere:loss"}, ConfigError, "cannot be imported"),
        ({"loss": lambda outputs, y: outputs.sum()}, ModelError, "one number for each sample"),
        ({"engine": "lop"}, ConfigError, "engine of RunSettings must be 'loop'"),
        ({"device": "gpu"}, ConfigError, r"must be 'auto', 'cpu' or 'cuda'\. Got 'gpu'"),
        ({"engine_settings": {"chunk": 0}}, ConfigError, r"chunk .* Got 0"),
        ({"engine_settings": {"chnk": 1}}, UnknownName, "Did you mean 'chunk'"),
        ({"work": SGD(lr=-1.0)}, ConfigError, r"lr of SGD must be a number > 0\. Got -1\.0"),
        ({"work": SGD(lr=float("nan"))}, ConfigError, "Got nan"),
        ({"rounds": 0}, ConfigError, r"rounds .* Got 0"),
        ({"participation": 0.0}, ConfigError, r"participation .* Got 0\.0"),
        ({"seed": -1}, ConfigError, r"seed .* Got -1"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_no_folder(
    digits: Federation, tmp_path: Path, change: dict[str, Any], kind: type[CoterieError], said: str
):
    values: dict[str, Any] = {"algorithm": FedAvg(), "data": digits, "model": "mclr", "rounds": 1, "work": WORK}
    with pytest.raises(kind, match=said) as caught:
        coterie.run(**values | change, out=tmp_path / "runs")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("runs/*"))


def test_an_own_network_that_raises_leaves_no_folder_either(digits: Federation, tmp_path: Path):
    with pytest.raises((ModelError, RuntimeError), match="no weights today"):
        coterie.run("fedavg", digits, cannot_be_made, rounds=1, out=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- going on ----


def setup(digits: Federation, **changes: Any) -> Experiment:
    tables = merge({"run": {"clients": 8, "rounds": 3, "model": "mclr", "checkpoint_every": 0}, "work": {"epochs": 1}})
    made = resolve(tables).loaded()
    return Experiment(**{**vars(made), **changes})


def stopped(what: Experiment, root: Path) -> RunFolder:
    folder = RunFolder.create(root, "a", "a", what.tables())
    with pytest.raises(Interrupted):
        execute(what, folder, should_stop=lambda: True)
    return RunFolder.open(root / "a")


def test_resuming_reuses_what_the_engine_chose(digits: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = setup(digits, engine_settings={"chunk": 3, "precision": "float64"})
    folder = stopped(chosen, tmp_path)
    result = execute(setup(digits), folder)
    assert (result.summary["plan"]["chunk"], result.summary["plan"]["precision"]) == (3, "float64")
    assert result.centers.dtype == torch.float64


def test_data_that_has_changed_is_refused_and_the_run_is_kept(digits: Federation, tmp_path: Path):
    folder = stopped(setup(digits), tmp_path)
    before = sorted(str(p) for p in folder.path.rglob("*"))
    other = setup(digits, data=digits.select(list(range(7))))
    with pytest.raises(RunError, match="has changed since the run in .* began: client 'r270-001' is missing"):
        execute(other, folder)
    assert sorted(str(p) for p in folder.path.rglob("*")) == before
    assert execute(setup(digits), folder).summary["rounds"] == 3


@pytest.mark.parametrize(
    ("dataset", "algorithm", "name"),
    [
        ("rotated-digits", "fesem", "rotated-digits-fesem-s0"),
        ("some/where/own.npz", "pack.mod:Cls", "own-pack.mod-Cls-s0"),
    ],
)
def test_default_names_are_file_names(digits: Federation, dataset: str, algorithm: str, name: str):
    assert setup(digits, dataset=dataset, algorithm_name=algorithm).default_name == name


def test_losses_are_found_by_name_or_place():
    found = find_loss("torch.nn.functional:l1_loss")
    assert found is torch.nn.functional.l1_loss
    assert find_loss(found) is found
    assert find_loss("mse")(torch.zeros(2, 1), torch.tensor([1.0, 2.0])).tolist() == [1.0, 4.0]
