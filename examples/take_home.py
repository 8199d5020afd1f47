"""Take models home: export them from a run folder, and use them in plain PyTorch or onnxruntime.

    python examples/take_home.py

Each file says in its metadata how inputs are scaled. The accuracy of each is that of the run.
"""

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

import coterie


def scaled(x: torch.Tensor, facts: dict[str, str]) -> torch.Tensor:
    """Raw samples as the network takes them."""
    mean, std = (torch.tensor(json.loads(facts[key])) for key in ("mean", "std"))
    return (x.float() - mean) / std


def network(facts: dict[str, str]) -> nn.Module:
    """The network in plain PyTorch: this is coterie's mlp; for your own, call your own class."""
    hidden = json.loads(facts["network_settings"]).get("hidden", 200)
    inputs = torch.Size(json.loads(facts["input_shape"])).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, int(facts["outputs"])))


def from_safetensors(path: Path, x: torch.Tensor) -> torch.Tensor:
    """Outputs of weights in your own module."""
    with safe_open(path, framework="pt") as file:
        facts, weights = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    module = network(facts)
    module.load_state_dict(weights)
    with torch.no_grad():
        return module.eval()(scaled(x, facts))


def from_torch_export(path: Path, x: torch.Tensor) -> torch.Tensor:
    """Outputs of a program of torch.export, without the class."""
    files = {"coterie.json": ""}
    program = torch.export.load(path, extra_files=files)
    with torch.no_grad():
        return program.module()(scaled(x, json.loads(files["coterie.json"])))


def from_onnx(path: Path, x: torch.Tensor) -> torch.Tensor:
    """Outputs of a program in ONNX, without torch."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    facts = session.get_modelmeta().custom_metadata_map
    return torch.from_numpy(session.run(None, {"x": scaled(x, facts).numpy()})[0])


FORMS = {
    "safetensors": ("model.safetensors", from_safetensors),
    "torch.export": ("model.pt2", from_torch_export),
    "onnx": ("model.onnx", from_onnx),
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = coterie.run("fesem", "rotated-digits", rounds=5, out=folder, name="digits")
        data, client = run.federation, 0
        raw, (_, y) = data.x[data.test.rows(client)], data.samples(client, "test")
        turned = torch.rot90(raw, int(data.view_of(torch.tensor([client]))[0]), (2, 3))  # as this client sees them
        there = run.frame("clients")["accuracy"][client] if find_spec("pandas") else None
        home = coterie.open_run(Path(folder) / "digits", data=False)  # the run folder is enough
        for form, (name, load) in FORMS.items():
            if form == "onnx" and not (find_spec("onnxscript") and find_spec("onnxruntime")):
                print("onnx: pip install 'coterie[onnx]'")
                continue
            path = home.export(Path(folder) / name, client=data.names[client], format=form)
            accuracy = (load(path, turned).argmax(1) == y).float().mean().item()
            assert there is None or abs(accuracy - there) < 1e-6
            print(f"{form}: accuracy {accuracy:.4f}")
