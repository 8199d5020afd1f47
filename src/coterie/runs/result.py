"""A finished run: its numbers, its clusters, and every client's model."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.data.federation import Federation
from coterie.data.groups import name_groups
from coterie.engines import make_engine
from coterie.engines.absent import AbsentEngine
from coterie.engines.base import Engine
from coterie.errors import ConfigError, MissingExtra, RunError, nearest_name
from coterie.methods.base import Personal
from coterie.nets.flat import state_dict
from coterie.nets.mixture import Served
from coterie.nets.registry import ModelMaker
from coterie.randomness import Rng
from coterie.runs.folder import RunFolder
from coterie.runs.kept import inputs_of, is_in_table, kept_personal
from coterie.runs.loop import Trainer
from coterie.runs.newcomers import Newcomers, like_the_run, onboard, personal_models
from coterie.runs.observers import Row
from coterie.runs.saving import save_model
from coterie.settings import values_of
from coterie.version import VERSION


class NotKept(RunError):
    """A personal model that the run folder does not hold: it takes the data of the run."""


class Result:
    """A finished run: its numbers, its clusters, and every client's model."""

    def __init__(self, trainer: Trainer, summary: dict[str, Any], held_out: Federation | None = None) -> None:
        self._trainer = trainer
        self._held_out = held_out
        self.summary = summary

    @property
    def path(self) -> Path | None:
        """The run folder, if any."""
        return None if self._trainer.folder is None else self._trainer.folder.path

    @property
    def federation(self) -> Federation:
        """The clients that took part."""
        return self._trainer.federation

    @property
    def settings(self) -> dict[str, Any]:
        """The tables of config.toml; empty without a run folder."""
        return {} if self._trainer.folder is None else self._trainer.folder.config()

    @property
    def rows(self) -> list[Row]:
        """The numbers of every round."""
        return self._trainer.progress.rows

    @property
    def labels(self) -> Tensor:
        """The cluster of each client, int64 [N]; -1: not seen."""
        labels: Tensor = self._trainer.state.labels
        return labels.clone()

    @property
    def clusters(self) -> dict[str, int]:
        """The cluster of each client, by name."""
        return dict(zip(self._trainer.federation.names, self.labels.tolist(), strict=True))

    @property
    def centers(self) -> Tensor:
        """The models of the clusters, [K, P]; parts that stay with the clients are as in the initial weights."""
        return self._trainer.algorithm.whole(self._trainer.engine.task, self._trainer.state.centers)

    def personal_model(self, client: str | int) -> nn.Module:
        """The network with the weights of this client, adapted if the method adapts; a `MixtureModel` if it mixes."""
        task = self._trainer.engine.task
        return self._served(client).module(task.module, task.num_classes, task.input_shape)

    def client_state_dict(self, client: str | int) -> dict[str, Tensor]:
        """The state_dict of this client's personal model."""
        return dict(self.personal_model(client).state_dict())

    def _served(self, client: str | int) -> Served:
        names = self._trainer.federation.names
        held_out = () if self._held_out is None else self._held_out.names
        if client in held_out and self.unseen is not None:
            return next(self.unseen.models(torch.tensor([held_out.index(str(client))])))[1]
        if not self.has_data and self._trainer.folder is not None:
            is_number = isinstance(client, int) and 0 <= client < len(names)
            name = names[int(client)] if is_number else str(client)
            kept = kept_personal(self._trainer.folder, name, self._trainer.engine.task)
            if kept is not None:
                return kept
        number = names.index(client) if isinstance(client, str) and client in names else client
        if not isinstance(number, int) or not 0 <= number < len(names):
            nearest = nearest_name(str(client), (*names, *held_out))
            hint = f" Did you mean '{nearest}'?" if nearest else ""
            raise ConfigError(f"There is no client {client!r}. Clients are {names[0]} ... {names[-1]}.{hint}")
        if not self.has_data and not is_in_table(self._personal(number)):
            where = f"The model of {names[number]} is not in {self.path}: the client makes it of its own data"
            if self.is_deployed:
                raise NotKept(
                    f'{where}. Let the sites send theirs when the run is started: set = "run.keep_models=64".'
                )
            raise NotKept(f"{where}. Open the run with its data, or start it with --set run.keep_models=MB.")
        return personal_served(self._trainer, number)

    def _personal(self, client: int) -> Personal:
        return self._trainer.algorithm.personal(self._trainer.state, torch.tensor([client]))

    def is_center(self, client: str) -> bool:
        """Whether a client is served with the center of its cluster, as it is."""
        number = self._trainer.federation.names.index(client)
        personal, label = self._personal(number), int(self.labels[number])
        if label < 0 or not is_in_table(personal):
            return False
        assert personal.models is not None
        assert personal.refs is not None
        return torch.equal(personal.models[int(personal.refs[0])], self.centers[label])

    @property
    def is_deployed(self) -> bool:
        """Whether the clients were sites, which have their data and what they remember."""
        return bool(self.settings.get("run", {}).get("over_sites"))

    @property
    def has_data(self) -> bool:
        """Whether the data of the clients is at hand; a run can also be opened without."""
        return not isinstance(self._trainer.engine, AbsentEngine)

    def model(self, *, client: str | int | None = None, cluster: int | None = None) -> nn.Module:
        """The network of a cluster, or of a client as `personal_model` has it, in eval mode."""
        if (client is None) == (cluster is None):
            raise ConfigError("Name a client or a cluster, one of the two.")
        if client is not None:
            return self.personal_model(client)
        assert cluster is not None
        module = copy.deepcopy(self._trainer.engine.task.module)
        module.load_state_dict(self.cluster_state_dict(cluster))
        return module.eval()

    def facts(self, *, client: str | int | None = None, cluster: int | None = None) -> dict[str, str]:
        """What a model of this run must know to be used elsewhere, as texts for the metadata of a file."""
        trainer, make = self._trainer, self._trainer.engine.task.make
        if client is not None:
            name = trainer.federation.names[client] if isinstance(client, int) else client
            known = self.clusters.get(name, -1)
            which = {"client": name, "cluster": json.dumps(None if known < 0 else known)}
        else:
            which = {"cluster": json.dumps(cluster)}
        network = make.name if isinstance(make, ModelMaker) else type(trainer.engine.task.module).__name__
        said = {} if trainer.folder is None else inputs_of(trainer.folder)
        return {
            **trainer.federation.input_facts(),
            **said,
            "network": network,
            "network_settings": json.dumps(dict(make.settings) if isinstance(make, ModelMaker) else {}),
            "outputs": json.dumps(make.outputs if isinstance(make, ModelMaker) else None),
            "algorithm": str(self.summary.get("algorithm", "")),
            "dataset": str(self.summary.get("dataset", "")),
            **which,
            "round": json.dumps(trainer.served_round),
            "data_digest": str(self.summary.get("digest", "")),
            "coterie": VERSION,
        }

    def export(
        self,
        file: str | Path,
        *,
        client: str | int | None = None,
        cluster: int | None = None,
        format: str = "safetensors",
    ) -> Path:
        """Write the model of a client or of a cluster to a file, with what is needed to use it (`facts`)."""
        module, task = self.model(client=client, cluster=cluster), self._trainer.engine.task
        facts = self.facts(client=client, cluster=cluster)
        return save_model(module, Path(file), format, facts, task.input_shape, task.integers)

    def cluster_state_dict(self, cluster: int) -> dict[str, Tensor]:
        """The weights of a cluster's center, for `load_state_dict`."""
        if not 0 <= cluster < len(self.centers):
            known = f"Clusters are 0 ... {len(self.centers) - 1}" if len(self.centers) else "The method has none"
            raise ConfigError(f"There is no cluster {cluster}. {known}.")
        return state_dict(self._trainer.engine.task.module, self.centers[cluster])

    @functools.cached_property
    def unseen(self) -> Newcomers | None:
        """The clients that were held out of the run (`unseen`), assigned and evaluated; None if there are none."""
        return None if self._held_out is None else self.onboard(self._held_out)

    def onboard(self, new_clients: Federation) -> Newcomers:
        """Assign new clients by the method's rule, adapt if the method adapts, and evaluate them."""
        trainer = self._trainer
        rng = Rng.seed(trainer.schedule.seed).at("assign")
        known = like_the_run(new_clients, trainer.federation)
        round, groups = trainer.served_round, trainer.groups()
        there = None if groups is None else torch.from_numpy(groups)
        return onboard(trainer.algorithm, trainer.state, trainer.engine, known, round, rng, there)

    def assign(self, new_clients: Federation) -> Tensor:
        """The cluster of each client of another federation by the method's rule; int64 [n]."""
        return self.onboard(new_clients).labels

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """What reports read from a run folder, from memory: for `coterie.views.plots` and notebooks."""
        trainer, schedule = self._trainer, self._trainer.schedule
        head = {key: self.summary[key] for key in ("algorithm", "dataset", "model", "engine", "device")}
        newcomers = self.unseen
        return {
            "name": f"{head['dataset']}-{head['algorithm']}-s{schedule.seed}",
            "config": {
                "run": head | values_of(schedule) | {"from_python": True},
                "algorithm": values_of(trainer.algorithm),
                "work": values_of(trainer.engine.task.work),
            },
            "rows": self.rows,
            "labels": trainer.label_history(),
            "clients": trainer.client_arrays(),
            "manifest": trainer.federation.manifest(),
            **trainer.exhibits(),
            "method": trainer.method_exhibits(),
            "failures": [vars(failure) for failure in trainer.engine.failures],
            "unseen": [] if newcomers is None else newcomers.rows(),
        }

    def frame(self, of: str = "rounds") -> Any:
        """A pandas table of the rounds, or (`of="clients"`) of the clients."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra("Result.frame()", "report") from error
        if of == "rounds":
            return pandas.json_normalize([_columns_of(row) for row in self.rows])
        if of == "clients":
            arrays = self._trainer.client_arrays()
            last = {k: v[-1] if v.ndim == 2 else v for k, v in arrays.items() if k != "round"}
            if "group" in last:
                groups = last["group"].tolist()
                called = name_groups(last["name"].tolist(), groups, self.federation.named_groups)
                last["group_name"] = pandas.Series([called[group] for group in groups])
            return pandas.DataFrame(last | {"cluster": self.labels.numpy()})
        raise ConfigError(f"frame(of=...) takes 'rounds' or 'clients'. Got {of!r} instead.")

    def __repr__(self) -> str:
        accuracy, loss = self.summary["accuracy"], self.summary["loss"]
        score = (
            f"accuracy {accuracy['macro']:.4f}" if accuracy else f"loss {loss['macro']:.4f}" if loss else "no scores"
        )
        return f"<Result of {self.summary['algorithm']} on {self.summary['dataset']}: {score}>"

    # ---- pickling ----

    def __getstate__(self) -> dict[str, Any]:
        """All that makes the run again in another process: data, method, state; no engine and no open file."""
        trainer, engine = self._trainer, self._trainer.engine
        plan = engine.describe()
        name = plan["engine"] if plan["engine"] in ("loop", "vectorized", "absent") else "vectorized"
        return {
            "summary": self.summary,
            "path": self.path,
            "held_out": self._held_out,
            "algorithm": trainer.algorithm,
            "task": replace(engine.task, module=copy.deepcopy(engine.task.module)),
            "federation": trainer.federation,
            "schedule": trainer.schedule,
            "engine": (name, str(engine.device), str(engine.dtype).removeprefix("torch.")),
            "reserved": engine.reserved,
            "checkpoint": trainer.snapshot(),
            "rows": self.rows,
        }

    def __setstate__(self, stored: dict[str, Any]) -> None:
        name, device, precision = stored["engine"]
        task, federation, path = stored["task"], stored["federation"], stored["path"]
        device = "cpu" if device.startswith("cuda") and not torch.cuda.is_available() else device
        if name == "absent":
            place, dtype = torch.device("cpu"), getattr(torch, precision)
            engine: Engine = AbsentEngine(task, federation.names, federation.keys, place, dtype)
        else:
            engine = make_engine(name, task, federation, device, {"precision": precision})
        engine.reserved = stored["reserved"]
        folder = None if path is None or not (path / "config.toml").is_file() else RunFolder(path)
        self._trainer = Trainer(stored["algorithm"], engine, federation, stored["schedule"], folder)
        self._trainer.load(stored["checkpoint"], stored["rows"])
        self._held_out, self.summary = stored["held_out"], stored["summary"]


def _columns_of(row: Row) -> Row:
    """A row for a table, with the spread over clients in columns of its own."""
    names = ("tenth", "quarter", "median", "three_quarters", "nine_tenths")
    found = {key: value for key, value in row.items() if key != "spread"}
    for score, five in row.get("spread", {}).items():
        found[score] = {**(found.get(score) or {}), **dict(zip(names, five, strict=True))}
    return found


def personal_served(trainer: Trainer, client: int) -> Served:
    """What a client is served with, as it was evaluated."""
    who, round = torch.tensor([client]), trainer.served_round
    trainer.engine.begin(round, "evaluate")
    personal = trainer.algorithm.personal(trainer.state, who)
    return next(personal_models(trainer.engine, personal, who, trainer.rng_of_evaluation(round)))[1]


def personal_vector(trainer: Trainer, client: int) -> Tensor:
    """The personal model [P] of a client of a method that serves one model."""
    return personal_served(trainer, client).params[0]
