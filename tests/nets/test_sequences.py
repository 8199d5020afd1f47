"""Recurrent layers and attention: by plain operations as by torch's kernels, alone as in a stack."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from coterie.client.batches import Batch
from coterie.engines.kernels.plain import PlainKernel
from coterie.engines.kernels.stacked import StackedKernel
from coterie.nets.flat import Network, cross_entropy

CPU = torch.device("cpu")
TIME, ROWS, WIDTH = 6, 5, 4


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Wrapped(nn.Module):
    """One layer, called with what the test gives it; all it returns side by side, one row."""

    def __init__(self, layer, *given, **named):
        super().__init__()
        self.layer, self._given, self._named = layer, given, named

    def forward(self, x):
        found = self.layer(x, *self._given, **self._named)
        return torch.cat([part.flatten() for part in flat(found)]).unsqueeze(0)


def flat(found):
    return [] if found is None else [found] if isinstance(found, torch.Tensor) else [t for f in found for t in flat(f)]


def assert_unrolled_is_fused(module, x):
    """Outputs and all gradients of the plain operations against torch's own layer."""
    module = module.double().train()
    module.zero_grad()
    network = Network(module, torch.float64, CPU)
    params = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = module(one), network(params, other, train=True)
    weights = drawn(*expected.shape, seed=1)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
    assert torch.allclose(other.grad, one.grad, rtol=1e-11, atol=1e-13)
    for name, p in module.named_parameters():
        assert torch.allclose(params[name].grad, p.grad, rtol=1e-11, atol=1e-13), name


RECURRENT = {
    "lstm": lambda: nn.LSTM(WIDTH, 3),
    "lstm, two layers, both ways": lambda: nn.LSTM(WIDTH, 3, 2, bidirectional=True),
    "lstm without bias, projected": lambda: nn.LSTM(WIDTH, 5, 2, bias=False, proj_size=2),
    "gru": lambda: nn.GRU(WIDTH, 3, 2, bidirectional=True),
    "gru without bias": lambda: nn.GRU(WIDTH, 3, bias=False),
    "rnn": lambda: nn.RNN(WIDTH, 3, 2),
    "rnn with relu": lambda: nn.RNN(WIDTH, 3, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_recurrent_layer_in_steps_is_the_fused_one(make, batch_first, has_state):
    torch.manual_seed(0)
    layer = make()
    layer.batch_first = batch_first
    given = []
    if has_state:
        rows = layer.num_layers * (1 + layer.bidirectional)
        h = drawn(rows, ROWS, layer.proj_size or layer.hidden_size, seed=2)
        given = [(h, drawn(rows, ROWS, layer.hidden_size, seed=3)) if layer.mode == "LSTM" else h]
    x = drawn(ROWS, TIME, WIDTH) if batch_first else drawn(TIME, ROWS, WIDTH)
    assert_unrolled_is_fused(Wrapped(layer, *given), x)


@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
def test_a_single_sequence_needs_no_batch(make):
    torch.manual_seed(0)
    assert_unrolled_is_fused(Wrapped(make()), drawn(TIME, WIDTH))


FORBIDDEN = torch.ones(TIME, TIME).triu(1).bool()
PADDING = torch.zeros(ROWS, TIME).index_fill(1, torch.tensor([5]), 1).bool()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "named",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": FORBIDDEN},
        {"attn_mask": drawn(TIME, TIME, seed=4), "key_padding_mask": torch.where(PADDING, -1.0, 0.0).double()},
        {"attn_mask": FORBIDDEN, "is_causal": True, "need_weights": False},
        {"attn_mask": drawn(ROWS * 2, TIME, TIME, seed=5), "need_weights": False},
        {"key_padding_mask": PADDING},
    ],
)
def test_attention_in_plain_operations_is_the_fused_one(batch_first, named):
    torch.manual_seed(0)
    x = drawn(ROWS, TIME, WIDTH) if batch_first else drawn(TIME, ROWS, WIDTH)
    layer = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
    nn.init.normal_(layer.in_proj_bias)
    assert_unrolled_is_fused(Wrapped(layer, x.clone(), x.clone() * 2, **named), x)


@pytest.mark.parametrize("bias", [False, True])
def test_attention_to_keys_and_values_of_other_widths_and_without_a_batch(bias):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, 2, kdim=3, vdim=7, bias=bias)
    assert_unrolled_is_fused(Wrapped(layer, drawn(8, ROWS, 3), drawn(8, ROWS, 7)), drawn(TIME, ROWS, WIDTH))
    assert_unrolled_is_fused(Wrapped(layer, drawn(8, 3), drawn(8, 7)), drawn(TIME, WIDTH))


# ---- stacks ----


class Text(nn.Module):
    """Embedding, a layer over the sequence, a linear layer on its mean."""

    def __init__(self, layer, width=WIDTH, after=lambda found: found[0]):
        super().__init__()
        self.table, self.layer, self.head, self._after = nn.Embedding(9, WIDTH), layer, nn.Linear(width, 3), after

    def forward(self, x):
        h = self.table(x.long())
        attends = isinstance(self.layer, nn.MultiheadAttention)
        return self.head(self._after(self.layer(h, h, h) if attends else self.layer(h)).mean(1))


class Functional(Text):
    def forward(self, x):
        h = self.table(x.long()).unsqueeze(1)
        return self.head(functional.scaled_dot_product_attention(h, h, h, is_causal=True).squeeze(1).mean(1))


def encoder(dropout):
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout, batch_first=True)


NETWORKS = {
    "lstm": lambda: Text(nn.LSTM(WIDTH, 3, batch_first=True), 3),
    "lstm with dropout": lambda: Text(nn.LSTM(WIDTH, 3, 3, batch_first=True, dropout=0.4, bidirectional=True), 6),
    "gru with dropout": lambda: Text(nn.GRU(WIDTH, 3, 2, batch_first=True, dropout=0.4), 3),
    "rnn with dropout": lambda: Text(nn.RNN(WIDTH, 3, 2, batch_first=True, dropout=0.4), 3),
    "attention": lambda: Text(nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "attention with dropout": lambda: Text(nn.MultiheadAttention(WIDTH, 2, dropout=0.4, batch_first=True)),
    "functional attention": lambda: Functional(None),
    "encoder": lambda: Text(encoder(0.0), after=lambda found: found),
    "encoder with dropout": lambda: Text(encoder(0.4), after=lambda found: found),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_a_stack_is_its_models_one_by_one(make):
    """Also in a partial batch: what a row draws does not depend on the number of rows."""
    torch.manual_seed(0)
    network = Network(make(), torch.float64, CPU)
    x = torch.randint(0, 9, (3, ROWS, TIME)).double()
    y = torch.randint(0, 3, (3, ROWS))
    network.detect_keyed(x[0])
    assert network.keyed
    models = network.initial.double() * torch.tensor([[1.0], [0.8], [1.2]], dtype=torch.float64)
    named = network.layout.unpack(models)
    params = [named[slot.name] for slot in network.layout.parameters]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.float64)
    batch = Batch(x, y, mask, torch.tensor([4, 5, 6]))
    plain, stacked = PlainKernel(network, cross_entropy), StackedKernel(network, cross_entropy)
    with torch.no_grad():
        for one, other in zip(plain.gradients(params, [], batch), stacked.gradients(params, [], batch), strict=True):
            assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)
        assert torch.allclose(plain.outputs(models, x), stacked.outputs(models, x), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in NETWORKS if "dropout" in name])
def test_dropout_drops_in_training_only_and_by_its_key(name):
    torch.manual_seed(0)
    network = Network(NETWORKS[name](), torch.float64, CPU)
    x = torch.randint(0, 9, (ROWS, TIME)).double()
    values = network.layout.unpack(network.initial.double())
    one, same, other = (network(values, x, train=True, key=torch.tensor(key), alone=True) for key in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)
    calm = network(values, x, alone=True)
    assert torch.allclose(calm, network(values, x))
    assert not torch.allclose(one, calm)


def test_dropout_between_layers_keeps_the_mean():
    """Dropped entries are zero and the others scaled: the linear layer after it sees the same on average."""
    torch.manual_seed(0)
    layer = nn.RNN(2, 2, 2, batch_first=True, dropout=0.5, nonlinearity="relu", bias=False)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(torch.eye(2) if "ih" in name else torch.zeros(2, 2))
    network = Network(Wrapped(layer), torch.float64, CPU)
    values = network.layout.unpack(network.initial.double())
    found = network(values, torch.ones(500, 1, 2).double(), train=True, key=torch.tensor(3))[0, :1000]
    assert set(found.tolist()) == {0.0, 2.0}
    assert float(found.mean()) == pytest.approx(1, abs=0.1)


class Packed(Text):
    def forward(self, x):
        h = nn.utils.rnn.pack_padded_sequence(self.table(x.long()), torch.full((len(x),), 4), batch_first=True)
        return self.head(self.layer(h)[1][0][-1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, before it raises
def test_packed_sequences_are_trained_one_model_at_a_time():
    torch.manual_seed(0)
    module = Packed(nn.LSTM(WIDTH, 3, batch_first=True), 3).double()
    network = Network(module, torch.float64, CPU)
    x = torch.randint(0, 9, (ROWS, TIME)).double()
    assert torch.equal(network(network.layout.unpack(network.initial), x), module(x))
    with pytest.raises(RuntimeError):
        StackedKernel(network, cross_entropy).outputs(network.initial.repeat(2, 1), x.expand(2, ROWS, TIME))


def test_memory_is_estimated_from_all_steps_of_a_recurrent_layer():
    text = Network(Text(nn.LSTM(WIDTH, 3, batch_first=True), 3), torch.float64, CPU)
    assert text.activation_size(torch.zeros(1, TIME).double()) == TIME + TIME * WIDTH + 10 * TIME * 3 + 3
