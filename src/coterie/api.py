"""Coterie from Python: `run`, `Result`, and `open_run`, which opens a finished run again."""

from __future__ import annotations

import copy
import datetime
import functools
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import coterie
from coterie.algorithm import Algorithm, find_algorithm
from coterie.block import Task
from coterie.config import Experiment, merge, resolve
from coterie.engine import Engine
from coterie.engines import make_engine
from coterie.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    MissingExtra,
    RunError,
    StorageError,
    UnknownName,
    nearest_name,
)
from coterie.federation import Federation
from coterie.local import SGD
from coterie.models import Builder, ModelMaker, import_object
from coterie.network import LOSSES, Loss, state_dict
from coterie.newcomers import Newcomers, like_the_run, meet, split_unseen
from coterie.observers import Listener, Row, RunInfo, Several
from coterie.randomness import Rng
from coterie.runs import RunFolder
from coterie.settings import check, values_of
from coterie.train import Schedule, Trainer, attack_of


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
        """What a run folder holds for reports, from memory: `coterie.plots` and notebooks draw from it."""
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

    def _repr_html_(self) -> str:
        """The headline numbers and the curve, for notebooks."""
        from coterie.report.data import of_result
        from coterie.report.notebook import run_html

        return run_html(of_result(self))

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
    from coterie.block import adapt, own_model

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


def run(
    algorithm: Algorithm | str = "fesem",
    data: Federation | str = "rotated-digits",
    model: str | Builder | None = None,
    *,
    rounds: int = 20,
    work: SGD | None = None,
    seed: int = 0,
    participation: float = 1.0,
    unseen: float = 0.0,
    dropout: float = 0.0,
    attack: Literal["none", "sign_flip", "gaussian", "label_flip"] = "none",
    attackers: float = 0.2,
    corrupt: float = 0.0,
    keep_pictures: bool = True,
    loss: str | Loss = "cross_entropy",
    engine: str = "vectorized",
    device: str = "auto",
    engine_settings: Mapping[str, Any] | None = None,
    evaluate_every: int = 1,
    checkpoint_every: float = 30.0,
    out: str | Path | None = None,
    name: str | None = None,
    observer: Listener | None = None,
) -> Result:
    """Train and give back the result.

    `data` is a federation or the name of a dataset, `model` a name or a callable that makes an nn.Module;
    a named dataset brings the model and the work that suit it. With `out` the run is kept in a folder there.
    A share `unseen` of the clients takes part in no round and is met at the end; `dropout` is the share of a
    cohort that fails to answer. `attack` makes a share `attackers` of the clients do harm, and `corrupt` is the share
    of answers that arrive as NaN: see `coterie.attacks`. Without `keep_pictures` the run folder holds no samples of
    anyone's.

    >>> result = run("fesem", "rotated-digits", rounds=3, seed=1)
    >>> result.summary["ari"], result.centers.shape[0]
    (1.0, 4)
    >>> result.personal_model("r090-000")(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    schedule = Schedule(
        *(rounds, participation, seed, evaluate_every, checkpoint_every, unseen, dropout, attack, attackers, corrupt),
        keep_pictures=keep_pictures,
    )
    check(schedule)
    chosen = find_algorithm(algorithm)() if isinstance(algorithm, str) else algorithm
    if isinstance(data, str):
        reserve = {"reserve": getattr(chosen, "indicators", 0)}
        experiment = resolve(merge({"run": {"dataset": data, "seed": seed}, "scenario": reserve}))
        federation, name_of_data = experiment.federation(), data
        model = experiment.model if model is None else model
        settings = experiment.model_settings if model == experiment.model else {}
        work = experiment.work if work is None else work
    else:
        federation, name_of_data, settings = data, data.name, {}
        model = "mlp" if model is None else model
        work = SGD() if work is None else work
    setup = Setup(
        algorithm=chosen,
        algorithm_name=chosen.key,
        federation=federation,
        dataset_name=name_of_data,
        model=model,
        model_settings=settings,
        work=work,
        loss=loss,
        schedule=schedule,
        engine=engine,
        device=device,
        engine_settings=dict(engine_settings or {}),
    )
    folder = None
    if out is not None:
        folder = RunFolder.create(Path(out), name, setup.default_name, setup.tables())
    return execute(setup, folder, observer)


@dataclass(frozen=True)
class Setup:
    """A run ready to go: everything resolved, data loaded."""

    algorithm: Algorithm
    algorithm_name: str
    federation: Federation
    dataset_name: str
    model: str | Builder
    model_settings: Mapping[str, Any]
    work: SGD
    loss: str | Loss
    schedule: Schedule
    engine: str
    device: str
    engine_settings: dict[str, Any]

    @classmethod
    def of(cls, experiment: Experiment, federation: Federation | None = None) -> Setup:
        """Load the data of a resolved experiment, unless it was loaded before."""
        return cls(
            algorithm=experiment.algorithm,
            algorithm_name=experiment.algorithm_name,
            federation=experiment.federation() if federation is None else federation,
            dataset_name=experiment.dataset,
            model=experiment.model,
            model_settings=experiment.model_settings,
            work=experiment.work,
            loss=experiment.loss,
            schedule=experiment.schedule,
            engine=experiment.engine,
            device=experiment.device,
            engine_settings=experiment.engine_settings,
        )

    @property
    def model_name(self) -> str:
        """The network in words."""
        return self.model if isinstance(self.model, str) else getattr(self.model, "__name__", "own model")

    @property
    def default_name(self) -> str:
        """What the run is called if the user does not say."""
        data = Path(self.dataset_name).stem
        algorithm = self.algorithm_name.replace(":", "-")
        return f"{data}-{algorithm}-s{self.schedule.seed}"

    def tables(self) -> dict[str, dict[str, Any]]:
        """The settings of a run that was started from Python."""
        loss = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", "own loss")
        head = {
            "algorithm": self.algorithm_name,
            "dataset": self.dataset_name,
            "model": self.model_name,
            "loss": loss,
            "engine": self.engine,
            "device": self.device,
        }
        return {
            "run": {**head, **values_of(self.schedule), "from_python": True},
            "algorithm": values_of(self.algorithm),
            "work": values_of(self.work),
            "model": dict(self.model_settings),
            "engine": dict(self.engine_settings),
        }

    def task(self) -> Task:
        """The network with its first weights, the loss, the work."""
        data = self.federation
        outputs = data.num_classes or (1 if data.y.dim() == 1 else int(data.y[0].numel()))
        make = ModelMaker(self.model, self.model_settings, data.input_shape, outputs)
        seed = self.schedule.seed
        return Task.made(make, seed, find_loss(self.loss), data.num_classes, data.input_shape, self.work)


def find_loss(loss: str | Loss) -> Loss:
    """The loss of a name, of `module:callable`, or the callable itself."""
    if callable(loss):
        return loss
    if loss in LOSSES:
        return LOSSES[loss]
    if ":" not in loss:
        raise UnknownName("loss", loss, LOSSES)
    found: Loss = import_object(loss, "loss")
    return found


def execute(
    setup: Setup,
    folder: RunFolder | None = None,
    observer: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run to the end, from the beginning or from the folder's last whole checkpoint."""
    if folder is None:
        return _train(setup, None, observer, should_stop)
    with folder.held():
        try:
            return _train(setup, folder, observer, should_stop)
        except (StorageError, Interrupted):
            raise  # what there is can be resumed
        except Exception:
            folder.discard()  # a run that could not begin leaves nothing behind
            raise


def _train(
    setup: Setup, folder: RunFolder | None, observer: Listener | None, should_stop: Callable[[], bool]
) -> Result:
    check(setup.work)
    digest = setup.federation.digest()
    chosen: dict[str, Any] = {}
    before: dict[str, Any] | None = None
    if folder is not None:
        before = folder.read_json("environment.json")
        if before is not None:
            if before["digest"] != digest:
                raise RunError(f"The data of {folder.path} has changed since the run began; it cannot be resumed.")
            kept = ("chunk", "memory", "precision", "plan", "piece", "workers")
            chosen = {k: v for k, v in before["plan"].items() if k in kept} if setup.engine == "vectorized" else {}
    federation, held_out = split_unseen(setup.federation, setup.schedule.unseen, setup.schedule.seed)
    federation = attack_of(federation.keys, setup.schedule).on_data(federation)
    engine = make_engine(setup.engine, setup.task(), federation, setup.device, chosen | setup.engine_settings)
    if chosen and before is not None:
        engine.remember(before["plan"])
    told = Several([observer])
    trainer = Trainer(setup.algorithm, engine, federation, setup.schedule, folder, told, should_stop)
    if folder is not None:
        choice = folder.read_json("artifacts/choose-k.json")
        if choice is not None:
            engine.notes.append(f"--clusters auto chose K = {choice['recommended']}: {choice['reason']}")
        folder.write_json("environment.json", environment(engine, digest))
        unseen = [] if held_out is None else list(held_out.names)
        manifest = {"seed": setup.schedule.seed, "unseen": unseen, **setup.federation.manifest()}
        folder.write_json("artifacts/manifest.json", manifest)
        checkpoint, problems = folder.load_checkpoint()
        engine.notes += problems
        if checkpoint is not None:
            trainer.restore(checkpoint)
        else:
            folder.cut_rows(0)
    told.begin(
        RunInfo(
            name=setup.default_name if folder is None else folder.path.name,
            settings=setup.tables() if folder is None else folder.config(),
            path=None if folder is None else folder.path,
            done=trainer.progress.round,
        )
    )
    try:
        result = _result_of(setup, trainer, folder, held_out, digest)
    except BaseException:
        told.end(None)
        raise
    told.end(result.summary)
    return result


def _result_of(
    setup: Setup, trainer: Trainer, folder: RunFolder | None, held_out: Federation | None, digest: str
) -> Result:
    """Train to the end, meet those who were held out, and write the result."""
    trainer.run()
    told = {"algorithm": setup.algorithm_name, "dataset": setup.dataset_name, "model": setup.model_name}
    result = Result(trainer, {}, held_out)
    began = time.perf_counter()
    newcomers = result.unseen
    trainer.progress.seconds["evaluate"] += time.perf_counter() - began
    result.summary = finish(trainer, told, folder, setup.engine, digest, newcomers)
    return result


def finish(
    trainer: Trainer,
    told: Mapping[str, Any],
    folder: RunFolder | None,
    engine_name: str,
    digest: str,
    newcomers: Newcomers | None = None,
) -> dict[str, Any]:
    """The summary of a run that has come to its end, written into its folder if it has one."""
    engine = trainer.engine
    summary = {
        **told,
        **trainer.summary(),
        "unseen": None if newcomers is None else newcomers.summary(),
        "engine": engine_name,
        "device": str(engine.device),
        "plan": engine.describe(),
        "digest": digest,
    }
    if folder is not None:
        summary["path"] = str(folder.path)
        folder.write_json("artifacts/failures.json", [vars(failure) for failure in engine.failures])
        if newcomers is not None:
            folder.write_json("artifacts/unseen.json", newcomers.rows())
        folder.write_json("summary.json", summary)
    return summary


def open_run(path: str | Path) -> Result:
    """A finished run of the command line, from its folder; nothing in it is changed."""
    folder = RunFolder.open(Path(path))
    summary = folder.summary()
    if summary is None:
        raise RunError(f"{path} is not finished; go on with 'coterie resume {path}'.")
    tables = folder.config()
    tables.pop("schema")
    if tables.get("run", {}).get("over_sites"):
        raise RunError(f"{path} is a run over sites, whose data are not here; it cannot be opened from its folder.")
    if tables.get("run", {}).get("from_python"):
        raise RunError(f"{path} was started from Python with objects of its own; it cannot be opened from its folder.")
    setup = Setup.of(resolve(tables))
    if setup.device.startswith("cuda") and not torch.cuda.is_available():
        setup = replace(setup, device="cpu")
    before = folder.read_json("environment.json")
    if before is None or before["digest"] != setup.federation.digest():
        raise RunError(f"The data of {path} has changed since the run was made; it cannot be opened.")
    checkpoint, problems = folder.load_checkpoint()
    if checkpoint is None or checkpoint.round != summary["rounds"]:
        raise CheckpointError(" ".join([f"The last checkpoint of {path} is not there whole.", *problems[:1]]))
    federation, held_out = split_unseen(setup.federation, setup.schedule.unseen, setup.schedule.seed)
    federation = attack_of(federation.keys, setup.schedule).on_data(federation)
    settings = {"precision": before["plan"]["precision"]} | setup.engine_settings
    engine = make_engine(setup.engine, setup.task(), federation, setup.device, settings)
    trainer = Trainer(setup.algorithm, engine, federation, setup.schedule, folder)
    trainer.load(checkpoint)
    return Result(trainer, summary, held_out)


def environment(engine: Engine, digest: str) -> dict[str, Any]:
    """Where and with what a run was made."""
    return {
        "coterie": coterie.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "plan": engine.describe(),
        "notes": list(engine.notes),
        "digest": digest,
    }
