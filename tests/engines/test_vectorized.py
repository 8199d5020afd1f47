"""The stacked kernel: BatchNorm, dropout, networks that cannot be stacked, chunks from memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from coterie.client.work import SGD
from coterie.data.federation import Federation
from coterie.engines import make_engine
from coterie.errors import DataError, ModelError
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from tests.helpers import assert_same, finished, ragged_federation, setup_of


def with_norm_and_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.4),
        nn.Linear(8, 3),
    )


class OverText(nn.Module):
    """A layer over sequences of 16 tokens, made from the numbers of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.over(self.table((4 * x.flatten(1)).long() % 9)))


class Recurrent(OverText):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, 2, batch_first=True, dropout=0.3)

    def over(self, h):
        return self.layer(h)[0][:, -1]


class Attending(OverText):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)

    def over(self, h):
        return self.layer(h).mean(1)


class ByValue(nn.Module):
    """Control flow that depends on values: vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x):
        out = self.layer(x.flatten(1))
        return out if out.sum() > 0 else 2 * out


class OwnRandomness(ByValue):
    """Functional dropout draws from torch's own generator."""

    def forward(self, x):
        return self.layer(nn.functional.dropout(x.flatten(1), 0.5, self.training))


class MixesSamples(ByValue):
    """Subtracts the batch mean: padded rows would leak in, and nothing raises."""

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x - x.mean(0, keepdim=True))


@pytest.mark.parametrize(
    "work", [SGD(lr=0.1, epochs=2, batch_size=5, momentum=0.9), SGD(lr=0.1, steps=3, batch_size="full")]
)
@pytest.mark.parametrize("chunk", [2, 9])
def test_batch_norm_and_dropout_equal_the_loop(work, chunk):
    """Ragged clients: some last batches are partial, and some hold a single sample."""
    federation = ragged_federation(samples=14)
    assert (federation.train.sizes % 5 == 1).any()
    made = []
    for engine, settings in (("loop", {}), ("vectorized", {"chunk": chunk, "plan": "stacked"})):
        setup = setup_of(
            Local(),
            federation,
            model=with_norm_and_dropout,
            model_settings={},
            engine=engine,
            work=work,
            engine_settings={"precision": "float64", **settings},
        )
        made.append(finished(setup))
    assert made[1].engine.describe()["plan"] == "stacked"
    assert_same(made[0].engine.memory_tensors(), made[1].engine.memory_tensors(), exact=False, tolerance=1e-9)
    buffers = made[0].engine.memory_tensors()["value.model"][:, -24:]
    assert not torch.equal(buffers[0], buffers[1])  # statistics are trained and differ between clients


@pytest.mark.parametrize("network", [Recurrent, Attending])
def test_layers_over_sequences_equal_the_loop(network):
    made = []
    for engine, settings in (("loop", {}), ("vectorized", {"plan": "stacked"})):
        setup = setup_of(
            Local(),
            model=network,
            model_settings={},
            engine=engine,
            work=SGD(lr=0.5, epochs=2, batch_size=5, momentum=0.9),
            engine_settings={"precision": "float64", **settings},
        )
        made.append(finished(setup))
    assert made[1].engine.describe()["plan"] == "stacked"
    assert not [note for note in made[1].engine.notes if "cannot be stacked" in note]
    assert_same(made[0].engine.memory_tensors(), made[1].engine.memory_tensors(), exact=False, tolerance=1e-9)
    models = made[0].engine.memory_tensors()["value.model"]
    assert float((models - made[0].engine.initial()).abs().max()) > 0.1  # they have learned something


class Tokens(nn.Module):
    """Another network behind an embedding, which takes nothing but integers."""

    def __init__(self, over: type[OverText]) -> None:
        super().__init__()
        self.inner = over()

    def forward(self, tokens):
        assert not tokens.is_floating_point()
        return self.inner.head(self.inner.over(self.inner.table(tokens)))


@pytest.mark.parametrize("over", [Recurrent, Attending])
def test_token_ids_stay_integers_and_equal_the_loop(over):
    generator = torch.Generator().manual_seed(0)
    clients = {
        f"c{i}": (torch.randint(0, 9, (12 + 5 * i, 6), generator=generator), torch.arange(12 + 5 * i) % 3)
        for i in range(3)
    }
    federation = Federation.from_clients(clients)
    made = []
    for engine, settings in (("loop", {}), ("vectorized", {"plan": "stacked"})):
        setup = setup_of(
            Local(),
            federation,
            model=lambda: Tokens(over),
            model_settings={},
            engine=engine,
            engine_settings={"precision": "float64", **settings},
        )
        made.append(finished(setup))
    assert made[1].engine.data.rendered()[0].dtype == torch.int64
    assert_same(made[0].engine.memory_tensors(), made[1].engine.memory_tensors(), exact=False, tolerance=1e-9)


def test_a_token_that_the_embedding_does_not_have():
    x = torch.zeros(20, 6, dtype=torch.int64)
    x[-1, 2] = 9
    federation = Federation.from_clients({"a": (x, torch.arange(20) % 3)})
    with pytest.raises(
        ModelError, match="Tokens cannot take the integer 9 in a sample; its embedding may be too small"
    ):
        finished(setup_of(FedAvg(), federation, model=lambda: Tokens(Recurrent), model_settings={}))


def test_integers_are_floats_to_a_network_without_an_embedding():
    x, y = torch.randint(0, 9, (30, 4), generator=torch.Generator().manual_seed(0)), torch.arange(30) % 2
    found = [
        finished(setup_of(FedAvg(), Federation.from_clients({"a": (inputs, y), "b": (inputs, y)}))).state.centers
        for inputs in (x, x.float())
    ]
    assert torch.equal(*found)


def test_soft_labels_are_not_read_as_classes():
    generator = torch.Generator().manual_seed(0)
    clients = {
        f"c{i}": (torch.randn(20, 4, generator=generator), torch.rand(20, 3, generator=generator).softmax(1))
        for i in range(3)
    }
    federation = Federation.from_clients(clients)
    loop, fast = (finished(setup_of(Local(), federation, engine=engine)) for engine in ("loop", "vectorized"))
    assert fast.engine.describe()["plan"] in ("stacked", "loop")  # the hand-written plans are for classes
    assert_same(loop.engine.memory_tensors(), fast.engine.memory_tensors(), exact=False, tolerance=1e-9)
    assert loop.summary()["accuracy"] is None
    assert loop.summary()["loss"]["macro"] > 0


def test_numbers_under_cross_entropy_name_the_loss_that_takes_them():
    numbers = Federation.from_clients({"a": (torch.ones(8, 2), torch.arange(8.0))}, name="prices")
    with pytest.raises(
        ModelError, match="targets of prices are numbers, and cross-entropy learns classes. Use --loss mse"
    ):
        finished(setup_of(FedAvg(), numbers))


def test_labels_outside_their_range_never_reach_a_kernel():
    federation = ragged_federation()
    bad = replace(federation, y=federation.y + 1)
    with pytest.raises(DataError, match="labels must be 0 ... 2, for 3 classes. Got 3 instead"):
        finished(setup_of(FedAvg(), bad))


def test_batch_norm_statistics_are_averaged_and_counters_are_not():
    setup = setup_of(FedAvg(), model=with_norm_and_dropout, model_settings={})
    trainer = finished(setup)
    names = [slot.name for slot in setup.task().layout.buffers]
    assert names == ["1.running_mean", "1.running_var", "6.running_mean", "6.running_var"]
    initial = trainer.engine.initial()
    moved = trainer.state.centers[0] - initial
    assert bool((moved[-24:].abs() > 0).all())


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (ByValue, "one at a time"),
        (OwnRandomness, "its own random numbers"),
        (MixesSamples, "differ from plain ones"),
    ],
)
def test_what_cannot_be_stacked_falls_back_and_says_so(network, reason):
    made = []
    for engine in ("loop", "vectorized"):
        setup = setup_of(FedAvg(), model=network, model_settings={}, engine=engine)
        made.append(finished(setup))
    assert made[1].engine.describe()["plan"] == "loop"
    [note] = [note for note in made[1].engine.notes if "cannot be stacked" in note]
    assert reason in note
    assert_same(made[0].state.tensors(), made[1].state.tensors())


def test_chunk_follows_memory():
    def chunk(memory: int, clients: int = 60) -> int:
        setup = setup_of(
            FedAvg(),
            ragged_federation(clients, shape=(1, 28, 28)),
            model="lenet",
            model_settings={},
            engine_settings={"memory": memory},
        )
        return make_engine("vectorized", setup.task(), setup.federation(), "cpu", setup.engine_settings).describe()[
            "chunk"
        ]

    assert chunk(1) == 1
    small, large = chunk(32), chunk(64)
    assert 1 < small < large < 60
    assert large == pytest.approx(2 * small, abs=2)
    assert chunk(4096) == 60


def test_regression_with_mse():
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for i in range(4):
        x = torch.randn(30 + i, 3, generator=generator)
        clients[f"c{i}"] = (x, x @ torch.tensor([1.0, -2.0, 0.5]))
    setup = setup_of(
        FedAvg(),
        Federation.from_clients(clients),
        model="mclr",
        model_settings={},
        loss="mse",
        work=SGD(lr=0.1, epochs=10),
    )
    trainer = finished(setup)
    assert trainer.summary()["accuracy"] is None
    assert trainer.summary()["loss"]["macro"] < 1e-3
    assert torch.allclose(trainer.state.centers[0, :3], torch.tensor([1.0, -2.0, 0.5]).double(), atol=0.02)
