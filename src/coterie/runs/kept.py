"""What a run folder keeps so that its models can be used where its data is not.

    artifacts/model.json             the network (name, settings, names of its tensors), its inputs and its classes
    artifacts/model.safetensors      its frozen parameters and integer buffers, if it has any
    artifacts/personal.safetensors   what each client is served with, unless the server's models say it

None of them holds a sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.federation import Federation, Move, Split
from coterie.errors import ModelError, RunError, UnknownName
from coterie.methods.base import Personal
from coterie.nets.flat import Layout, Loss, flatten
from coterie.nets.mixture import Served
from coterie.nets.registry import Builder, ModelMaker
from coterie.nets.stand_in import describe, rebuild
from coterie.randomness import Rng, name_keys
from coterie.runs.folder import RunFolder
from coterie.runs.loop import Trainer
from coterie.runs.newcomers import Newcomers, personal_models

NETWORK, REST, PERSONAL = "artifacts/model.json", "artifacts/model.safetensors", "artifacts/personal.safetensors"
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ModelError)
_TYPES = {"uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32}


# ---- the network ----


def write_network(folder: RunFolder, task: Task, federation: Federation, inputs: str | None = None) -> None:
    """Describe the network of a run and the data it takes; `inputs` says it in words, where only sites know it."""
    made = task.make
    found = describe(task.module, task.output_bias is not None)
    facts = {
        "network": made.name if isinstance(made, ModelMaker) else type(task.module).__name__,
        "settings": dict(made.settings) if isinstance(made, ModelMaker) else {},
        "outputs": made.outputs if isinstance(made, ModelMaker) else None,
        "integers": task.integers,
        "dataset": federation.name,
        "dtype": str(federation.x.dtype).removeprefix("torch."),
        "shape": list(task.input_shape),
        "mean": federation.mean,
        "std": federation.std,
        "num_classes": task.num_classes,
        "class_names": list(federation.class_names),
        "target_shape": list(federation.y.shape[1:]),
        **({} if inputs is None else {"inputs": inputs}),
        "tensors": None if found is None else found[0],
    }
    if found is not None and found[1]:
        folder.write_tensors(REST, found[1])
    folder.write_json(NETWORK, facts)


def inputs_of(folder: RunFolder) -> dict[str, str]:
    """How inputs are scaled, where only sites know it."""
    said = (folder.read_object(NETWORK) or {}).get("inputs")
    return {} if said is None else {"inputs": str(said)}


class Network:
    """The network of a run, from its folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._facts = folder.read_object(NETWORK) or {}

    @property
    def is_there(self) -> bool:
        """Whether the folder has a description: earlier versions wrote none."""
        return bool(self._facts)

    @property
    def name(self) -> str:
        """The name of the network, or the `module:callable` that makes it."""
        return str(self._facts.get("network"))

    def federation(self) -> Federation:
        """The clients of the run without their samples."""
        manifest = self._folder.read_object("artifacts/manifest.json") or {}
        try:
            return self._federation(manifest)
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def _federation(self, manifest: Mapping[str, Any]) -> Federation:
        facts = self._facts
        unseen = set(manifest["unseen"])
        rows = [i for i, name in enumerate(manifest["clients"]) if name not in unseen]
        names = tuple(str(manifest["clients"][i]) for i in rows)

        def sized(split: str) -> Split:
            sizes = torch.tensor([0, *(int(manifest[split][i]) for i in rows)])
            return Split(torch.zeros(0, dtype=torch.int64), sizes.cumsum(0), torch.arange(len(rows)))

        def groups(found: Any) -> Tensor:
            return torch.tensor([int(found[i]) for i in rows])

        still = torch.zeros(len(rows), dtype=torch.int64)
        moves = manifest.get("moves") or []
        mean, std = (tuple(v) if isinstance(v, list) else float(v) for v in (facts["mean"], facts["std"]))
        classes = int(facts["num_classes"])
        return Federation(
            name=str(facts["dataset"]),
            x=torch.empty(0, *facts["shape"], dtype=_TYPES[facts["dtype"]]),
            y=torch.empty(0, *facts["target_shape"], dtype=torch.int64 if classes else torch.float32),
            num_classes=classes,
            names=names,
            keys=name_keys(names),
            groups=None if manifest.get("groups") is None else groups(manifest["groups"]),
            mean=mean,
            std=std,
            class_names=tuple(map(str, facts["class_names"])),
            named_groups=tuple(map(str, manifest.get("group_names") or ())),
            moves=tuple(Move(int(move["round"]), still, groups(move["groups"])) for move in moves),
            train=sized("train"),
            valid=sized("valid"),
            test=sized("test"),
        )

    def task(self, work: SGD, loss: Loss, seed: int, first: int | None, model: str | Builder | None) -> Task:
        """The task of the run. Without a model (a name or a callable) its network has weights, but cannot compute."""
        facts = self._facts
        try:
            sizes = (int(facts["num_classes"]), tuple(int(n) for n in facts["shape"]))
            outputs = int(facts["outputs"])
            maker = ModelMaker(self.name if model is None else model, dict(facts["settings"]), sizes[1], outputs, first)
            if model is not None:
                return Task.made(maker, seed, loss, *sizes, work, bool(facts["integers"]))
            module = self._stand_in()
        except UnknownName as error:
            if model is not None and maker.name != self.name:
                raise self.not_this(maker.name) from error
            raise self._damaged(error) from error
        except ModelError:
            raise
        except _DAMAGE as error:
            raise self._damaged(error) from error
        parts = (module, Layout.of(module), flatten(module), loss)
        return Task(*parts, *sizes, work, _no_draw, maker, seed, bool(facts["integers"]))

    def _stand_in(self) -> nn.Module:
        if self._facts["tensors"] is None:
            raise ModelError(f"The network {self.name} must be given again to use its weights: --model {self.name}.")
        rest, _ = self._folder.tensors(REST) or ({}, {})
        return rebuild(self._facts["tensors"], rest)

    def not_this(self, model: str) -> ModelError:
        """The error of another network than the run's."""
        return ModelError(
            f"{self._folder.path} was trained with {self.name}, not with {model}; name its own network, or leave "
            "--model out."
        )

    def _damaged(self, error: Exception) -> RunError:
        return RunError(f"{self._folder.path / NETWORK} is damaged: {str(error)[:200].rstrip('.')}.")


def _no_draw(rng: Rng) -> Tensor:
    raise NotImplementedError


# ---- the personal models ----


def is_in_table(personal: Personal) -> bool:
    """Whether the personal models are rows of the server's table, so that the state says them all."""
    return personal.serve is None and personal.adapt is None and personal.models is not None


def keep_personal(folder: RunFolder, trainer: Trainer, newcomers: Newcomers | None = None) -> None:
    """Write what clients are served with, if the state does not say it and it is not too much."""
    most, at = trainer.schedule.keep_models << 20, 0
    folder.place(PERSONAL).unlink(missing_ok=True)
    models: dict[bytes, int] = {}
    rows: list[Tensor] = []
    names: list[str] = []
    refs: list[int] = []
    starts, weights, biases = [0], list[Tensor](), list[Tensor]()
    wide = trainer.engine.task.num_classes
    for name, served in _everyone(trainer, newcomers) if most else ():
        for row in served.params.detach().cpu():
            key = hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest()
            if key not in models:
                at += row.nbytes
                if at > most:
                    return
                models[key] = len(rows)
                rows.append(row.clone())
            refs.append(models[key])
        names.append(name)
        starts.append(len(refs))
        weights.append(served.weights.detach().cpu())
        biases.append(torch.zeros(len(served.params), wide) if served.bias is None else served.bias.detach().cpu())
    if names:
        tensors = {"models": torch.stack(rows), "refs": torch.tensor(refs), "starts": torch.tensor(starts)}
        tensors |= {"weights": torch.cat(weights), "bias": torch.cat(biases)}
        folder.write_tensors(PERSONAL, tensors, {"names": json.dumps(names)})


def _everyone(trainer: Trainer, newcomers: Newcomers | None) -> Iterator[tuple[str, Served]]:
    """Names of clients and what they are served with: members if the state does not say it, and newcomers."""
    engine, round = trainer.engine, trainer.served_round
    everyone = torch.arange(len(trainer.state.labels))
    personal = trainer.algorithm.personal(trainer.state, everyone)
    if not is_in_table(personal):
        engine.begin(round, "evaluate")
        served = personal_models(engine, personal, everyone, trainer.rng_of_evaluation(round))
        yield from ((trainer.federation.names[client], one) for client, one in served)
    if newcomers is not None:
        yield from ((newcomers.federation.names[client], one) for client, one in newcomers.models())


def kept_personal(folder: RunFolder, client: str, task: Task) -> Served | None:
    """What a client is served with, if the folder keeps it."""
    found = folder.tensors(PERSONAL)
    if found is None:
        return None
    tensors, facts = found
    try:
        names = json.loads(facts["names"])
        if client not in names:
            return None
        start, stop = (int(tensors["starts"][names.index(client) + more]) for more in (0, 1))
        mine = slice(start, stop)
        params, weights = tensors["models"][tensors["refs"][mine]], tensors["weights"][mine]
        bias = tensors["bias"][mine]
        shapes = ((stop - start, task.layout.size), (stop - start,), (stop - start, task.num_classes))
        if start < 0 or stop <= start or tuple(tuple(found.shape) for found in (params, weights, bias)) != shapes:
            raise ValueError(f"the models of {client} are not complete")
    except _DAMAGE as error:
        raise RunError(f"{folder.path / PERSONAL} is damaged: {str(error)[:200]}.") from error
    return Served(params, weights, bias)
