"""The ServerApp of a deployed run: waits for the sites, then runs the usual round loop over them.

The run folder gets a checkpoint after each round. A run whose server was killed resumes when it is started again with
the same name: no completed round is lost or repeated.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie.client.settings import WorkSettings
from coterie.client.task import Task
from coterie.data.federation import SPLITS, Federation
from coterie.data.values import GREY
from coterie.deploy.client import classes_of, dtype_of, loss_of, maker_of
from coterie.engines.flower.engine import FlowerEngine, FlowerSettings
from coterie.engines.flower.link import Link, Member, owner_of, splits_of
from coterie.engines.flower.site import one_client
from coterie.errors import ConfigError, Interrupted
from coterie.runs.execution import environment, finish
from coterie.runs.experiment import Experiment, resolve
from coterie.runs.extension import notes_of, record
from coterie.runs.folder import RunFolder, check_name
from coterie.runs.kept import keep_personal, write_network
from coterie.runs.loop import Trainer
from coterie.runs.settings import ClusterSettings, RunSettings, Schedule, apply_set, merge
from coterie.settings import build, fields_of, values_of

log = logging.getLogger("coterie.flower")

# Keys of the Flower run config, and the settings they stand for: flags without their dashes.
_TAKEN: dict[Any, tuple[str, ...]] = {
    RunSettings: ("algorithm",),
    Schedule: ("rounds", "seed", "participation", "evaluate_every", "patience"),
    ClusterSettings: ("num_clusters",),
    WorkSettings: tuple(name for name, field in fields_of(WorkSettings).items() if field.flags),
}
_PLACES = {
    fields_of(group)[name].flags[0].removeprefix("--"): f"{group.table}.{name}"
    for group, names in _TAKEN.items()
    for name in names
} | {name.replace("_", "-"): f"engine.{name}" for name in ("deadline", "poll", "max_samples", "max_weight")}
_OWN = ("set", "min-clients", "wait", "run-dir", "name", "identity", "keys")
_FIRST_HELLO = 120.0  # seconds that sites have to identify themselves at the start, when all do so at the same time
_WEIGHT = 10.0  # limit on a site's weight, in median sites: sites of different organisations


def deployed_server_app(site: Any) -> Any:
    """The ServerApp of a run over sites; docs/deployment.md lists the keys of its config."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        serve(grid, dict(context.run_config), site)

    return app


def serve(grid: Any, config: dict[str, Any], site: Any) -> dict[str, Any]:
    """Run over the nodes of a grid; returns the summary, empty if interrupted."""
    _log_to_stderr()
    tables = tables_of(config)
    identity = str(config.get("identity", "key"))
    if identity not in ("key", "claimed"):
        raise ConfigError(f"identity must be 'key' or 'claimed'. Got '{identity}' instead.")
    registered = _registered(str(config.get("keys", ""))) if identity == "key" else None
    experiment = resolve(merge(tables | {"engine": {}}))
    settings = build(FlowerSettings, {"max_weight": _WEIGHT} | tables.get("engine", {}), "engine")
    parent, name = Path(str(config.get("run-dir", "runs"))), str(config.get("name", "deployed"))
    folder = _folder(parent, name, tables, experiment)
    with folder.held():
        kept = folder.read_json("artifacts/members.json") or {"members": [], "lives": {}}
        link = Link(grid, identity, settings.poll, settings.max_samples, registered)  # type: ignore[arg-type]
        link.restore(kept["members"])
        _gather(link, int(config.get("min-clients", 2)), float(config.get("wait", 600)))
        federation = _federation(list(link.members.values()), site)
        task = Task.made(
            maker_of(site), experiment.schedule.seed, loss_of(site), classes_of(site), federation.input_shape,
            experiment.work_of_run, integers=True,  # only the sites know; a network with an embedding takes both
        )  # fmt: skip
        checkpoint, problems = folder.load_checkpoint()
        resumed = 0 if checkpoint is None else checkpoint.round
        past = {life: min(last, resumed) for life, last in kept["lives"].items()}  # later rounds are repeated
        engine = FlowerEngine(task, federation, link, settings, run=name, past=past)
        before, now = folder.config()["run"].get("rounds"), experiment.schedule.rounds
        if isinstance(before, int) and before != now:  # started again with another number of rounds
            record(folder, replace(experiment, schedule=replace(experiment.schedule, rounds=before)), resumed, now)
        engine.notes += [*problems, *notes_of(folder)]
        engine.reserved = _reserved(site, task)
        schedule = replace(experiment.schedule, checkpoint_every=0.0)  # sites keep the memory of only two rounds
        trainer = DeployedTrainer(experiment.algorithm, engine, federation, schedule, folder, observer=_log_round)
        trainer.lives = {**past, engine.life: schedule.rounds}
        trainer.write_members()
        folder.write_json("environment.json", environment(engine, federation.digest()))
        write_network(folder, task, federation, None if dtype_of(site) else "as load_data of the sites gives them")
        if checkpoint is None:
            folder.cut_rows(0)
        else:
            trainer.restore(checkpoint)
            log.info("resuming after round %d", checkpoint.round)
        try:
            trainer.run()
        except Interrupted as error:
            log.warning("%s", error)
            return {}
        keep_personal(folder, trainer)  # only on request: personal models are the sites' own
        head = {"algorithm": experiment.algorithm_name, "dataset": "sites", "model": "task.model"}
        return finish(trainer, head, folder, "flower", federation.digest())


class DeployedTrainer(Trainer):
    """The round loop, which admits new sites before each round."""

    lives: dict[str, int]

    def write_members(self) -> None:
        """Store the members and the ids of the server processes, for resuming."""
        assert self.folder is not None
        assert isinstance(self.engine, FlowerEngine)
        members = self.engine.link.records()
        self.folder.write_json("artifacts/members.json", {"members": members, "lives": self.lives})
        sizes = {split: [member[split] for member in members] for split in SPLITS}
        head = {"seed": self.schedule.seed, "unseen": [], "clients": [member["name"] for member in members]}
        self.folder.write_json("artifacts/manifest.json", {**head, **sizes, "groups": None, "label_counts": None})

    def welcome(self) -> int:
        """Admit the sites that have connected since the last round."""
        count = super().welcome()
        if count:
            self.write_members()
        return count


def _log_to_stderr() -> None:
    """Log only coterie's messages: every line is sent to the SuperLink."""
    ours = logging.getLogger("coterie")
    if not ours.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    logging.getLogger("httpx").setLevel(logging.WARNING)


def tables_of(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of a Flower run config: known keys, and `set` for any other field, in the syntax of `--set`.

    >>> tables_of({"algorithm": "fesem", "rounds": 3, "set": "algorithm.guard=false work.lr_decay=0.9"})["algorithm"]
    {'guard': False}
    """
    unknown = [key for key in config if key not in _PLACES and key not in _OWN]
    if unknown:
        known = ", ".join(sorted([*_PLACES, *_OWN]))
        raise ConfigError(f"There is no run config key '{unknown[0]}'. Known: {known}.")
    tables: dict[str, dict[str, Any]] = {"run": {"dataset": "rotated-digits", "keep_models": 0}}
    for key, value in config.items():
        if key in _PLACES and value != "":
            table, _, field = _PLACES[key].partition(".")
            tables.setdefault(table, {})[field] = value
    return apply_set(tables, str(config.get("set", "")).split())


def _folder(parent: Path, name: str, tables: dict[str, dict[str, Any]], experiment: Experiment) -> RunFolder:
    """Open the run folder of that name, or create it with all settings of the method and of the local work."""
    check_name(name)
    path = parent / name
    if path.exists():
        return RunFolder.open(path)
    parent.mkdir(parents=True, exist_ok=True)
    head = {**tables["run"], "dataset": "sites", "engine": "flower", "over_sites": True}
    whole = {"algorithm": values_of(experiment.algorithm), "work": values_of(experiment.work)}
    return RunFolder.create(parent, name, name, tables | {"run": values_of(experiment.schedule) | head, **whole})


def _registered(folder: str) -> Callable[[], set[str]]:
    """A function that reads the public keys of the sites, so that sites can be added during a run."""

    def read() -> set[str]:
        return {owner for path in sorted(Path(folder).glob("*.pub")) if (owner := _owner_in(path)) is not None}

    if not folder or not read():
        raise ConfigError(
            f'identity = "key" needs the registered keys of the sites, and there are no .pub files in "{folder}". '
            'Set keys to their folder on the server; or set identity = "claimed", for a trial without keys.'
        )
    return read


def _owner_in(path: Path) -> str | None:
    """The owner (`owner_of`) with the public key in a file; None if it is not one that can be read."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        log.warning("%s is not a public key that can be read: %s", path, error)
        return None
    return owner_of(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def _gather(link: Link, least: int, patience: float) -> None:
    """Wait until at least `least` sites are connected."""
    ends = time.monotonic() + patience
    reported = -1
    while True:
        link.roll_call(_FIRST_HELLO)
        there = len(link.connected)
        if there >= least:
            return
        if there != reported:
            log.info("%d of at least %d sites are connected", there, least)
            reported = there
        if time.monotonic() > ends:
            rejected = f" Rejected: {'; '.join(link.notes[:10])}." if link.notes else ""
            raise ConfigError(
                f"Only {there} of at least {least} sites connected in {patience:g} s; change min-clients or wait."
                + rejected
            )
        time.sleep(0.5)


def _federation(members: list[Member], site: Any) -> Federation:
    """The federation for the round loop: names and sizes, no data."""
    shape = maker_of(site).input_shape
    return Federation(
        name="sites",
        x=torch.empty(0, *shape, dtype=(kind := dtype_of(site) or torch.float32)),
        y=torch.empty(0, dtype=torch.int64),
        num_classes=classes_of(site),
        mean=GREY if kind == torch.uint8 else 0.0,
        std=GREY if kind == torch.uint8 else 1.0,
        **splits_of(members),
    )


def _reserved(site: Any, task: Task) -> Any:
    """The server's own samples, for methods that need them: (x, y) from `reserved()` of task.py."""
    if not hasattr(site, "reserved"):
        return None
    # As sites read their own samples, so that pixels are scaled alike.
    x, y = one_client("reserved()", site.reserved(), task.num_classes, held_out=False).samples(0)
    return x if task.integers else x.float(), y


def _log_round(row: dict[str, Any]) -> None:
    accuracy = row.get("accuracy")
    shown = {"round": row["round"], "accuracy": accuracy["macro"] if accuracy else None, "failures": row["failures"]}
    shown |= {"sizes": row["cluster_sizes"], "seconds": {k: round(v, 2) for k, v in row["seconds"].items()}}
    log.info("%s", json.dumps(shown))
