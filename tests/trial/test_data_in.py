"""A new user's trial of "data in": what people have, the command or line they try, and what comes of it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import coterie
from coterie import SGD, CoterieError, Federation
from coterie.methods.base import algorithms
from tests.cli.conftest import Command

WORK = SGD(lr=0.5, batch_size=16)
QUICK = ("--rounds", 3, "-a", "fedavg", "--json")


def patients(users: int = 6, samples: int = 40, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Hospitals whose patients are sorted by outcome, as tables often are."""
    random = np.random.default_rng(seed)
    found = {}
    for number in range(users):
        y = np.arange(samples) // (samples // 2)
        found[f"h{number}"] = (random.normal(size=(samples, 3)) + 3 * y[:, None] * [1, 0, 0], y)
    return found


def accuracy(federation: Federation) -> float:
    """Of FedAvg after a few rounds."""
    value: float = coterie.run("fedavg", federation, "mclr", rounds=10, work=WORK).summary["accuracy"]["macro"]
    return value


# ---- Federation.from_clients ----

FORMS: dict[str, Any] = {
    "numpy": lambda x, y: (x, y),
    "tensors": lambda x, y: (torch.from_numpy(x), torch.from_numpy(y)),
    "TensorDataset": lambda x, y: TensorDataset(torch.from_numpy(x), torch.from_numpy(y)),
    "DataLoader": lambda x, y: DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 8, shuffle=True),
    "DataFrame": lambda x, y: pandas.DataFrame(x, columns=list("abc")).assign(label=y),
    "splits": lambda x, y: {"train": (x[::2], y[::2]), "test": (x[1::2], y[1::2])},
    "words": lambda x, y: (x, np.array(["well", "ill"])[y]),
    "one-hot": lambda x, y: (x, np.eye(2)[y]),
}


@pytest.mark.parametrize("form", FORMS)
def test_sorted_data_in_any_form_is_learned(form: str):
    federation = Federation.from_clients({i: FORMS[form](*data) for i, data in enumerate(patients().values())})
    assert federation.names == ("0", "1", "2", "3", "4", "5")
    assert accuracy(federation) > 0.85  # with the last fifth as tests it was .30: one class only


def test_a_table_of_all_hospitals():
    tables = [
        pandas.DataFrame(100 * x, columns=list("abc")).assign(hospital=name, outcome=y)
        for name, (x, y) in patients().items()
    ]
    by_hospital = {name: rows.drop(columns="hospital") for name, rows in pandas.concat(tables).groupby("hospital")}
    assert accuracy(Federation.from_clients(by_hospital, label="outcome", standardize=True)) > 0.85


def test_bytes_are_scaled_as_in_a_file(command: Command):
    x, y = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8), np.arange(40) % 2
    np.savez("own.npz", x=x, y=y, user=np.repeat(["a", "b"], 20))
    assert command("data", "check", "own.npz", "--json").json["inputs"] == "uint8 pixels: x / 127.5 - 1"
    federation = Federation.from_clients({"a": (x[:20], y[:20]), "b": (x[20:], y[20:])}, test=0.0, valid=0.0)
    expected = torch.from_numpy(x[:20, None]).float() / 127.5 - 1
    torch.testing.assert_close(federation.samples(0)[0], expected)


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ({"a": "patients.csv"}, "The data of client 'a' must be (x, y) of arrays or tensors, a torch Dataset"),
        ([(np.ones((4, 2)), np.zeros(4))], "Clients must be a dict of name -> data, or a Flower FederatedDataset"),
        ({"a": pandas.DataFrame({"x": [1.0]})}, "Client 'a' has no column 'label' (it has x); name the labels with"),
    ],
)
def test_what_is_not_understood_is_said(clients: Any, sentence: str):
    with pytest.raises(CoterieError) as caught:
        Federation.from_clients(clients)
    assert str(caught.value).startswith(sentence)


# ---- files ----


def write_csv(path: str, label: str = "label", user: str = "user", scale: float = 1.0) -> None:
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "dose", "level", label, user])
        for name, (x, y) in patients().items():
            rows.writerows([*(scale * one), ("well", "ill")[int(label)], name] for one, label in zip(x, y, strict=True))


def write_pictures(root: str, *, users: bool) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(40):
        folder = Path(root, f"u{number % 4}" if users else "", ("cat", "dog")[number // 4 % 2])
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((6, 6), 200 * (number // 4 % 2) + number, np.uint8)).save(folder / f"{number}.png")


@pytest.mark.parametrize(
    ("path", "settings", "clients"),
    [
        ("own.csv", (), 6),
        ("other.csv", ("--set", "dataset.label=outcome", "--set", "dataset.user=hospital"), 6),
        ("arrays", (), 6),
        ("arrays/x.npy", (), 6),
        ("pictures", ("--clients", 4), 4),
        ("albums", (), 4),
    ],
)
def test_files_of_every_kind(command: Command, path: str, settings: tuple[object, ...], clients: int):
    write_csv("own.csv")
    write_csv("other.csv", "outcome", "hospital")
    write_pictures("pictures", users=False)
    write_pictures("albums", users=True)
    Path("arrays").mkdir()
    data = patients()
    np.save("arrays/x.npy", np.concatenate([x for x, _ in data.values()]))
    np.save("arrays/y.npy", np.concatenate([y for _, y in data.values()]))
    np.save("arrays/user.npy", np.repeat(list(data), 40))
    done = command("run", "--dataset", path, *settings, *QUICK)
    assert done.code == 0, done.err
    assert (done.json["clients"], done.json["accuracy"]["macro"] > 0.7) == (clients, True)
    assert command("data", "check", path, *settings).code == 0


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("none.csv", "There is no file none.csv; check the path."),
        (
            "own.txt",
            "own.txt is no data that coterie reads; it reads .npy files (x.npy and y.npy), .npz files (arrays x ",
        ),
        ("other.csv", "other.csv has no column 'label' (it has age, dose, level, outcome, hospital); name the labels "),
        (
            "empty",
            "empty has no images; put them into class/ or user/class/ folders, or add a csv with file and label.",
        ),
    ],
)
def test_files_that_cannot_be_read_are_said(command: Command, path: str, sentence: str):
    write_csv("other.csv", "outcome", "hospital")
    Path("own.txt").touch()
    Path("empty").mkdir()
    assert command("run", "--dataset", path, *QUICK).error.startswith(sentence)


# ---- kinds of values ----


@pytest.mark.parametrize("plan", ["auto", "stacked", "loop"])
def test_soft_labels_do_not_crash(plan: str):
    soft = {name: (x, np.stack([0.9 - 0.8 * y, 0.1 + 0.8 * y], axis=1)) for name, (x, y) in patients().items()}
    result = coterie.run("fedavg", Federation.from_clients(soft), "mlp", rounds=5, engine_settings={"plan": plan})
    assert result.summary["accuracy"] is None
    assert result.summary["loss"]["macro"] < 0.55  # guessing has .69, the best model .33


class Bag(nn.Module):
    """The mean of embedded tokens; an embedding takes nothing but integers."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, num_outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(tokens).mean(1))
        return out


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_token_ids_stay_integers(command: Command, engine: str):
    random = np.random.default_rng(0)
    y = np.arange(160) % 2
    x = random.integers(0, 10, (160, 6)) + 10 * (y[:, None] * (random.random((160, 6)) < 0.7))
    federation = Federation.from_clients({i: (x[i::4], y[i::4]) for i in range(4)})
    assert federation.samples(0)[0].dtype == torch.int64
    result = coterie.run("fedavg", federation, Bag, rounds=20, work=SGD(lr=2.0, batch_size=16), engine=engine)
    assert result.summary["accuracy"]["macro"] > 0.85
    np.savez("tokens.npz", x=x, y=y)
    assert command("data", "check", "tokens.npz", "--json").json["inputs"] == "integers, not scaled"


def numbers() -> Federation:
    """Two kinds of clients with opposite slopes."""
    random = np.random.default_rng(0)
    clients = {}
    for number in range(8):
        x = random.normal(size=(40, 3))
        clients[f"c{number}"] = (x, (1 if number % 2 else -1) * x[:, 0] + 0.1 * random.normal(size=40))
    return Federation.from_clients(clients, name="numbers")


@pytest.mark.parametrize("method", sorted(algorithms()))
def test_regression_with_every_method(method: str):
    work = SGD(lr=0.02, batch_size=16)

    def run() -> coterie.Result:
        return coterie.run(method, numbers(), "mlp", loss="mse", rounds=3, work=work)

    if not algorithms()[method].needs_classes:
        summary = run().summary
        assert summary["loss"]["macro"] < 1.3  # guessing has 1
        assert summary["r2"]["macro"] > -0.5
        return
    with pytest.raises(CoterieError) as caught:
        run()
    assert str(caught.value).startswith(f"{method} works by classes, and the targets of numbers are numbers;")


def write_numbers(path: str) -> None:
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "c", "label", "user"])
        data = numbers()
        for i, name in enumerate(data.names):
            for split in ("train", "valid", "test"):
                pairs = zip(*data.samples(i, split), strict=True)  # type: ignore[arg-type]
                rows.writerows([*x.tolist(), float(y), name] for x, y in pairs)


def test_regression_on_the_command_line(command: Command):
    write_numbers("own.csv")
    common = ("--dataset", "own.csv", "--lr", 0.02)
    said = command("run", *common, "--rounds", 2).error
    assert said.startswith("The targets of own are numbers, and cross-entropy learns classes. Use --loss mse")
    table = command("compare", *common, "--loss", "mse", "--rounds", 3, "-a", "fedavg", "-a", "local", "--quiet").out
    assert [word in table for word in ("loss", "R2", "accuracy", "F1")] == [True, True, False, False]
    choice = command("choose-k", *common, "--loss", "mse", "--to", 3, "--json").json
    assert choice["recommended"] == 2
    assert [row["accuracy"] for row in choice["table"]] == [None] * 3
    assert choice["table"][1]["r2"] > 0.5 > choice["table"][0]["r2"]  # two kinds of clients
    told = command("choose-k", *common, "--loss", "mse", "--to", 2, "--quiet").out
    assert all(word in told for word in ("held-out loss", "held-out R2", "loss saved over K = 2", "(R2 0.", "of loss"))
    assert "accuracy" not in told
    grid = ("--grid", "work.lr=0.01,0.02", "--unseen", 0.2, "--rounds", 2, "-a", "fedavg", "--quiet", "--name", "s")
    table = command("sweep", "--dataset", "own.csv", "--loss", "mse", *grid).out
    assert all(word in table for word in ("loss", "R2", "unseen loss"))
    assert "accuracy" not in table + Path("runs/s/table.md").read_text()


def test_regression_in_situations(command: Command):
    write_numbers("own.csv")
    Path("own.toml").write_text("[all]\nrun.participation = 1.0\n[some]\nrun.participation = 0.5\n")
    run = ("--dataset", "own.csv", "--lr", 0.02, "--loss", "mse", "--rounds", 4, "-a", "fedavg", "-a", "fesem", "-k", 2)
    found = command("compare", "--scenarios", "own.toml", *run, "--name", "c", "--json").json
    best = {row["labels"]["situation"]: row for row in found["rows"] if row["labels"]["method"] == "fesem"}
    for row in found["rows"]:  # the regret is the loss above the lowest one
        lowest = best[row["labels"]["situation"]]["loss"]["macro"]["mean"]
        assert row["regret"] == pytest.approx(row["loss"]["macro"]["mean"] - lowest, abs=1e-9)
    page = Path("runs/c/table.md").read_text()
    heads = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert heads[:3] == ["loss", "regret: loss above the lowest", "R2"]
    assert "accuracy" not in page
    bold = [line for line in page.splitlines() if "**" in line]
    assert bold
    assert all(line.startswith("| fesem") for line in bold)
    assert command("report", "runs/c", "--no-tsne").code == 0
    assert '"key":"loss","title":"loss"' in Path("runs/c/report.html").read_text()


def test_columns_are_left_out_by_their_names(command: Command):
    write_csv("own.csv")
    for words in ("[age, dose]", '["age", "dose"]'):
        assert command("data", "check", "own.csv", "--set", f"dataset.ignore={words}", "--json").json[
            "input_shape"
        ] == [1]


def test_the_split_is_called_official_only_where_the_file_has_one(command: Command):
    write_csv("own.csv")
    assert command("data", "check", "own.csv", "--json").json["settings"]["split"] == "own"
    np.savez("own.npz", x=np.ones((8, 3)), y=np.arange(8) % 2, user=np.repeat([0, 1], 4), split=["train", "test"] * 4)
    assert command("data", "check", "own.npz", "--json").json["settings"]["split"] == "official"


# ---- names of groups, and validation samples ----


def write_regions(path: str) -> None:
    """Hospitals of two regions, whose names are words."""
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "dose", "level", "label", "user", "group"])
        for number, (name, (x, y)) in enumerate(patients().items()):
            region = ("north", "south")[number % 2]
            rows.writerows([*one, int(label), name, region] for one, label in zip(x, y, strict=True))


def test_groups_are_called_what_the_file_calls_them(command: Command):
    write_regions("own.csv")
    assert "2: north (3 clients), south (3 clients)" in command("data", "check", "own.csv").out
    run = ("run", "-d", "own.csv", "-a", "fesem", "-k", 2, "--rounds", 2, "--quiet", "--name", "a")
    assert command(*run).code == 0
    shown = command("show", "runs/a", "--json").json["cluster_groups"]
    assert sum(sum(cluster.values()) for cluster in shown) == 6
    assert {name for cluster in shown for name in cluster} == {"north", "south"}
    told = ", ".join(f"{name} {count}" for name, count in shown[0].items())
    assert f"0: {told}" in command("show", "runs/a").out
    assert command("report", "runs/a", "--no-tsne").code == 0
    assert '"groups":["north","south"]' in Path("runs/a/report.html").read_text()
    rows = command("onboard", "runs/a", "-d", "own.csv", "--json").json["clients"]
    assert [row["group_name"] for row in rows] == ["north", "south"] * 3
    federation = Federation.from_clients(patients(2), groups={"h0": "north", "h1": "south"})
    assert federation.group_names() == {0: "north", 1: "south"}
    frame = coterie.run("fedavg", federation, "mclr", rounds=1, work=WORK).frame("clients")
    assert frame["group_name"].tolist() == ["north", "south"]


def test_an_npz_file_may_say_which_samples_are_for_validation(command: Command):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    words = np.array(["train", "train", "valid", "test", "test"] * 8)
    np.savez("own.npz", x=x, y=y, user=np.repeat(["a", "b"], 20), split=words)
    assert command("data", "check", "own.npz", "--json").json["samples"] == {"train": 16, "valid": 8, "test": 16}
    np.savez("own.npz", x=x, y=y, split=np.where(words == "valid", "dev", words))
    done = command("data", "check", "own.npz")
    assert done.code == 2
    assert done.error == "own.npz has 'dev' in its column of splits; write train, valid or test."


# ---- scaling ----


def test_large_features_are_noticed_and_scaled_on_request(command: Command):
    write_csv("own.csv", scale=1e4)
    plain = command("run", "--dataset", "own.csv", *QUICK, "--name", "plain")
    assert plain.code == 0
    assert plain.json["inputs"] == "float32 numbers, not scaled"
    assert plain.json["notes"][0].startswith("features are not scaled and have values around 2")
    scaled = command(
        "run", "--dataset", "own.csv", "--set", "dataset.standardize=true", *QUICK, "--name", "scaled"
    ).json
    assert (scaled["notes"], scaled["diverged"]) == ([], None)
    assert scaled["accuracy"]["macro"] > 0.85
    command("export", "runs/scaled", "--cluster", 0, "-o", "model.safetensors")
    with safe_open("model.safetensors", "pt") as file:
        facts = file.metadata()
    assert facts["inputs"] == "float32 numbers: (x - mean) / deviation, by feature over the training samples"
    assert len(facts["mean"].split(",")) == 3
    assert facts["classes"] == '["ill", "well"]'


def test_a_run_that_diverges_says_so_and_what_to_do(command: Command):
    write_numbers("own.csv")
    done = command("run", "--dataset", "own.csv", "--loss", "mse", "--lr", 30, "--rounds", 3, "-a", "fedavg", "--quiet")
    assert done.code == 0
    line = next(line for line in done.out.splitlines() if "diverged" in line)
    assert "training diverged: in the last round no client had a usable model; use a smaller --lr, or scale" in line


# ---- privacy of a run folder ----


def test_pictures_of_own_data_stay_out_of_the_run_folder(command: Command):
    write_pictures("albums", users=True)

    def has_pictures(name: str, *arguments: object) -> bool:
        assert command("run", *arguments, "-a", "fedavg", "--rounds", 1, "--name", name, "--quiet").code == 0
        return Path("runs", name, "artifacts", "members.npz").exists()

    assert not has_pictures("own", "--dataset", "albums")
    assert has_pictures("asked", "--dataset", "albums", "--keep-pictures")
    assert has_pictures("public", "--dataset", "rotated-digits", "--clients", 8)
    assert not has_pictures("refused", "--dataset", "rotated-digits", "--clients", 8, "--no-keep-pictures")
    x, y = torch.zeros(20, 1, 6, 6), torch.arange(20) % 2
    result = coterie.run("fedavg", Federation.from_clients({"a": (x, y), "b": (x, y)}), rounds=1, out="runs")
    assert result.path is not None
    assert not (result.path / "artifacts" / "members.npz").exists()
