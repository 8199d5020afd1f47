"""A finished run: its numbers, its clusters, and every client's model."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.client.steps import adapt, own_model
from coterie.data.federation import Federation
from coterie.errors import ConfigError, MissingExtra, nearest_name
from coterie.nets.flat import state_dict
from coterie.randomness import Rng
from coterie.runs.loop import Trainer
from coterie.runs.newcomers import Newcomers, like_the_run, meet
from coterie.runs.observers import Row
from coterie.settings import values_of


class Result:
    """A finished run: its numbers, its clusters, and everyone's model."""

    def __init__(self, trainer: Trainer, summary: dict[str, Any], held_out: Federation | None = None) -> None:
        self._trainer = trainer
        self._held_out = held_out
        self.summary = summary

    @property
    def path(self) -> Path | None:
        """The run folder, if there is one."""
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
        """The cluster of each client, int64 [N]; -1: not met."""
        return torch.from_numpy(self._trainer.progress.labels[-1])

    @property
    def clusters(self) -> dict[str, int]:
        """The cluster of each client, by name."""
        return dict(zip(self._trainer.federation.names, self.labels.tolist(), strict=True))

    @property
    def centers(self) -> Tensor:
        """The models of the clusters, [K, P]."""
        centers: Tensor = self._trainer.state.centers
        return centers

    def personal_model(self, client: str | int) -> nn.Module:
        """A copy of the network with the weights this client is served with, adapted where the method adapts."""
        module = copy.deepcopy(self._trainer.engine.task.module)
        module.load_state_dict(self.client_state_dict(client))
        return module.eval()

    def client_state_dict(self, client: str | int) -> dict[str, Tensor]:
        """The weights that this client is served with, as its module's `load_state_dict` takes them."""
        names = self._trainer.federation.names
        module = self._trainer.engine.task.module
        held_out = () if self._held_out is None else self._held_out.names
        if isinstance(client, str) and client in held_out and self.unseen is not None:
            found = self.unseen.models(torch.tensor([held_out.index(client)]))
            return state_dict(module, next(found)[1])
        number = names.index(client) if isinstance(client, str) and client in names else client
        if not isinstance(number, int) or not 0 <= number < len(names):
            nearest = nearest_name(str(client), (*names, *held_out))
            hint = f" Did you mean '{nearest}'?" if nearest else ""
            raise ConfigError(f"There is no client {client!r}; clients are {names[0]} ... {names[-1]}.{hint}")
        return state_dict(module, personal_vector(self._trainer, number))

    def cluster_state_dict(self, cluster: int) -> dict[str, Tensor]:
        """The weights of a cluster's model, as its module's `load_state_dict` takes them."""
        if not 0 <= cluster < len(self.centers):
            there = f"clusters are 0 ... {len(self.centers) - 1}" if len(self.centers) else "the method has none"
            raise ConfigError(f"There is no cluster {cluster}: {there}.")
        return state_dict(self._trainer.engine.task.module, self.centers[cluster])

    @functools.cached_property
    def unseen(self) -> Newcomers | None:
        """The clients that were held out of the run (`unseen`), assigned and evaluated; None if there are none."""
        return None if self._held_out is None else self.onboard(self._held_out)

    def onboard(self, new_clients: Federation) -> Newcomers:
        """Assign new clients by this run's own rule, adapt where the method adapts, and evaluate them."""
        trainer = self._trainer
        rng = Rng.seed(trainer.schedule.seed).at("assign")
        known = like_the_run(new_clients, trainer.federation)
        return meet(trainer.algorithm, trainer.state, trainer.engine, known, trainer.progress.round, rng)

    def assign(self, new_clients: Federation) -> Tensor:
        """The cluster of each client of another federation, found by this run's own rule; int64 [n]."""
        return self.onboard(new_clients).labels

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """What a run folder holds for reports, from memory: `coterie.views.plots` and notebooks draw from it."""
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
            return pandas.DataFrame(last | {"cluster": self.labels.numpy()})
        raise ConfigError(f"frame(of=...) takes 'rounds' or 'clients'. Got {of!r} instead.")

    def __repr__(self) -> str:
        accuracy = self.summary["accuracy"]
        score = f"accuracy {accuracy['macro']:.4f}" if accuracy else "no classes"
        return f"<Result of {self.summary['algorithm']} on {self.summary['dataset']}: {score}>"


def _columns_of(row: Row) -> Row:
    """A row of a round for a table: the spread over clients as columns of their own."""
    names = ("tenth", "quarter", "median", "three_quarters", "nine_tenths")
    found = {key: value for key, value in row.items() if key != "spread"}
    for score, five in row.get("spread", {}).items():
        found[score] = {**(found.get(score) or {}), **dict(zip(names, five, strict=True))}
    return found


def personal_vector(trainer: Trainer, client: int) -> Tensor:
    """The flat model [P] that a client is served with."""
    who = torch.tensor([client])
    personal = trainer.algorithm.personal(trainer.state, who)
    if personal.adapt is None and personal.models is not None and personal.refs is not None:
        return personal.models[personal.refs[0]]
    step = own_model if personal.adapt is None else adapt
    work = None if personal.adapt is None else personal.adapt(trainer.engine.task.work)
    rng = trainer.rng_of_evaluation(trainer.progress.round)  # the model that the last round evaluated
    trainer.engine.begin(trainer.progress.round, "evaluate")
    call = trainer.engine.call(step, who, models=personal.models, refs=personal.refs, work=work, rng=rng)
    return next(iter(call)).answer.params[0]
