"""Programs of networks of every kind compute what the networks do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from coterie.errors import ModelError, StorageError
from coterie.nets.mixture import MixtureModel
from coterie.runs.saving import save_model


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(tokens))[0][:, -1])
        return out


def mixture() -> nn.Module:
    made = MixtureModel(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), 2, 3)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    made.weights.copy_(torch.tensor([0.3, 0.7]))
    return made.eval()


def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)).eval()


@pytest.mark.parametrize("form", ["torch.export", "onnx"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [(Words, (6,)), (mixture, (3, 2, 2)), (pictures, (3, 2, 2))],
    ids=["words", "mixture", "pictures"],
)
def test_a_program_takes_any_number_of_samples(form: str, make, shape: tuple[int, ...], tmp_path: Path):
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="needs pip install 'coterie[onnx]'")
        runtime = pytest.importorskip("onnxruntime")
    module, path, words = make().eval(), tmp_path / "m.pt2", make is Words
    save_model(module, path, form, {"inputs": "as they are"}, shape, words)
    for count in (1, 5):
        x = torch.randint(0, 9, (count, *shape)) if words else torch.randn(count, *shape)
        if form == "onnx":
            session = runtime.InferenceSession(str(path))
            got = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
            kind = session.get_modelmeta().custom_metadata_map["kind"]
            assert kind == ("mixture" if make is mixture else "network")
        else:
            got = torch.export.load(path).module()(x)
        torch.testing.assert_close(got, module(x), rtol=1e-4, atol=1e-5)


def test_tied_weights_are_written(tmp_path: Path):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[0].weight
    save_model(layers, tmp_path / "m", "safetensors", {}, (4,))
    with safe_open(tmp_path / "m", framework="pt") as file:
        assert torch.equal(file.get_tensor("0.weight"), file.get_tensor("1.weight"))
        assert (file.metadata()["kind"], file.metadata()["format"]) == ("network", "safetensors")


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum().item() > 0 else x  # a program cannot ask this


def test_what_cannot_be_a_program_is_one_sentence(tmp_path: Path):
    with pytest.raises(ModelError, match="Odd cannot be written as torch.export: .* Use --format safetensors."):
        save_model(Odd(), tmp_path / "m", "torch.export", {}, (2,))
    with pytest.raises(StorageError, match="cannot be written: No such file or directory"):
        save_model(Odd(), tmp_path / "none" / "m", "safetensors", {}, (2,))
    assert list(tmp_path.iterdir()) == []
