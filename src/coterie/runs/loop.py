"""The one round loop: sample a cohort, let the method do its round, evaluate, record, checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.client.steps import adapt_and_evaluate, evaluate, evaluate_privately
from coterie.data.federation import Federation
from coterie.engines.attacks import Attack
from coterie.engines.base import Engine, Failure
from coterie.errors import ConfigError, Interrupted, RunError
from coterie.methods.base import Algorithm, Personal
from coterie.randomness import Rng
from coterie.runs.exhibits import Arrays, Sketches, listening, member_pictures
from coterie.runs.folder import Checkpoint, RunFolder
from coterie.runs.metrics import cluster_sizes, measured, of_clusters, of_scores, quantiles, summarized
from coterie.runs.observers import Listener, Row, Several
from coterie.runs.settings import Schedule
from coterie.settings import check

_SHOW_EVERY = 2.0  # seconds between two looks that others get at a run that goes on
_MAPPED = 20  # rounds in which the models that clients send are sketched
_SHOW_SHARE = 50  # a look may take one part in so many of the time


@dataclass
class Progress:
    """Where a run stands: all that a checkpoint holds beside the method's state."""

    round: int = 0
    rows: list[Row] = field(default_factory=list)
    labels: list[NDArray[np.int64]] = field(default_factory=list)  # after each round, the start first
    scores: list[dict[str, NDArray[Any]]] = field(default_factory=list)  # of each evaluation
    score_rounds: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("start", "train", "server", "evaluate"), 0.0)
    )


class Trainer:
    """Runs a method on an engine; with a folder, so that it can be stopped and resumed at any moment."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        engine: Engine,
        federation: Federation,
        schedule: Schedule,
        folder: RunFolder | None = None,
        observer: Listener | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        check(schedule)
        check(algorithm)
        algorithm.check(len(federation))
        if algorithm.needs_validation and not bool(federation.valid.sizes.any()):
            raise ConfigError(
                f"{type(algorithm).__name__} weighs models on validation samples, and nobody has any; "
                "hold some out with --set scenario.valid=0.1."
            )
        self.algorithm, self.engine, self.federation = algorithm, engine, federation
        self.schedule, self.folder = schedule, folder
        self.progress = Progress()
        self.state: Any = None
        self._observer = Several([observer])
        self._should_stop = should_stop
        self._rng = Rng.seed(schedule.seed).at("run")
        self._saved_at = self._shown_at = time.monotonic()
        self._show_took = 0.0
        self.sketches = Sketches(engine)
        self.attack = attack_of(engine.keys, schedule)
        engine.attack = None if self.attack.is_none else self.attack
        engine.dropout, engine.dropout_rng = schedule.dropout, Rng.seed(schedule.seed).at("dropout")

    def run(self) -> None:
        """Run to the last round, from the start or from where `restore` put it."""
        if self.state is None:
            self._start()
        while self.progress.round < self.schedule.rounds and not self.algorithm.should_stop(self.state):
            self._round(self.progress.round + 1)
            if self._should_stop():
                self._save()
                raise Interrupted(f"Stopped after round {self.progress.round} of {self.schedule.rounds}.")
        self._save()
        if self.folder is not None:
            shown = self.method_exhibits()
            if shown:
                self.folder.write_arrays("artifacts/method.npz", shown)

    def _start(self) -> None:
        began = time.perf_counter()
        self.engine.begin(0, "start")
        self.state = self.algorithm.start(self.engine.task, self.engine, self._rng.at("init"))
        self.progress.labels.append(self.state.labels.numpy().copy())
        self.progress.seconds["start"] += time.perf_counter() - began

    def _round(self, number: int) -> None:
        began, worked = time.perf_counter(), self.engine.client_seconds
        before = self.progress.labels[-1]
        failures, repairs = len(self.engine.failures), len(self.state.repairs)
        rng = self._rng.at("round", number)
        self.engine.begin(number, "round")
        self.welcome()
        before = self._padded(before, -1)
        size = max(1, round(self.schedule.participation * self.engine.num_clients))
        cohort = self.engine.draw(rng.at("cohort"), size)
        # Some twenty rounds and the last one are enough for a map of the models.
        is_mapped = number % max(1, self.schedule.rounds // _MAPPED) == 0 or number == self.schedule.rounds
        engine = listening(self.engine, self.sketches) if is_mapped else self.engine
        self.state = self.algorithm.round(self.state, engine, cohort, rng.at("work"))
        train = self.engine.client_seconds - worked
        server = time.perf_counter() - began - train
        self.progress.seconds["train"] += train
        self.progress.seconds["server"] += server

        labels = self.state.labels.numpy().copy()
        row: Row = {"round": number, "cohort": len(cohort)}
        last = number == self.schedule.rounds or self.algorithm.should_stop(self.state)
        looked = time.perf_counter()
        known = self._known_clusters(labels) | {"before": before, "after": labels}
        if last or number % self.schedule.evaluate_every == 0:
            scores = self._evaluate(number)
            row |= {"spread": quantiles(scores)}
            known |= of_scores(scores, labels)
        row |= measured(known)
        row["cluster_sizes"] = cluster_sizes(labels, self.state.num_clusters)
        row["clients_met"] = int((labels >= 0).sum())
        row["failures"] = len(self.engine.failures) - failures
        row["repairs"] = self.state.repairs[repairs:]
        totals = self.engine.ledger.totals()
        # So far; evaluation is not part of it.
        row["bytes"] = {
            "down": totals["down"],
            "up": totals["up"],
            "start": totals["start"]["down"] + totals["start"]["up"],
            "repair": totals["repair"]["down"] + totals["repair"]["up"],
        }
        looking = time.perf_counter() - looked
        self.progress.seconds["evaluate"] += looking
        row["seconds"] = {"train": train, "server": server, "evaluate": looking}
        self.progress.round = number
        self.progress.rows.append(row)
        self.progress.labels.append(labels)
        if self.folder is not None:
            self.folder.append(row)
        if not last:
            now = time.monotonic()
            if now - self._saved_at >= self.schedule.checkpoint_every:
                self._save()
            elif now - self._shown_at >= max(_SHOW_EVERY, _SHOW_SHARE * self._show_took):
                self._show()
        self._observer.round(row)

    def welcome(self) -> int:
        """Let the engine take in clients that have come; to the method they are clients it has not met yet."""
        count = self.engine.welcome()
        if count:
            self.state = self.state.with_more_clients(count)
            self.attack = attack_of(self.engine.keys, self.schedule)
            self.engine.attack = None if self.attack.is_none else self.attack
            self.federation = self.engine.population(self.federation)
        return count

    def label_history(self) -> NDArray[np.int64]:
        """Everyone's label after each round, the start first: [rounds + 1, N]."""
        return np.stack([self._padded(row, -1) for row in self.progress.labels])

    def _padded(self, values: NDArray[Any], fill: float) -> NDArray[Any]:
        """Numbers of the clients of then as numbers of the clients of now: some may have come since."""
        missing = self.engine.num_clients - len(values)
        return values if not missing else np.concatenate([values, np.full(missing, fill, dtype=values.dtype)])

    def _evaluate(self, number: int) -> dict[str, NDArray[Any]]:
        """Scores of every client's personal model on its test samples; attackers count as without samples."""
        self.engine.begin(number, "evaluate")
        everyone = self.engine.everyone()
        personal = self.algorithm.personal(self.state, everyone)
        scores = evaluate_clients(self.engine, personal, everyone, self.rng_of_evaluation(number))
        self.engine.begin(number, "round")
        self.progress.scores.append(scores)
        self.progress.score_rounds.append(number)
        honest = ~self.attack.attackers.numpy()
        return scores | {"samples": scores["samples"] * honest}

    def _known_clusters(self, labels: NDArray[np.int64]) -> dict[str, Any]:
        """What metrics may know of the clusters; attackers count as not met."""
        return of_clusters(np.where(self.attack.attackers.numpy(), -1, labels), self._groups())

    def rng_of_evaluation(self, number: int) -> Rng:
        """What the adaptation of personal models hangs on in that round."""
        return self._rng.at("evaluate", number)

    def _groups(self) -> NDArray[np.int64] | None:
        """The true groups as they are in the round in hand."""
        groups = self.federation.at(self.engine.round).groups
        # Of clients that have come since nobody knows the group.
        return None if groups is None or len(groups) != self.engine.num_clients else groups.numpy()

    # ---- the summary ----

    def summary(self) -> dict[str, Any]:
        """The result in numbers, as `summary.json` and `--json` give it."""
        rows, labels = self.progress.rows, self.progress.labels[-1]
        seconds = self.progress.seconds
        return {
            "rounds": self.progress.round,
            "clients": len(self.federation),
            "clients_met": int((labels >= 0).sum()),
            "clusters": self.state.num_clusters,
            **summarized(rows, self._known_clusters(labels)),
            "cluster_sizes": cluster_sizes(labels, self.state.num_clusters),
            "repairs": list(self.state.repairs),
            "failures": len(self.engine.failures),
            "failures_by_reason": dict(Counter(failure.reason for failure in self.engine.failures).most_common()),
            "attack": self._attack_in_words(),
            "bytes": self.engine.ledger.totals(),
            "seconds": {"total": sum(seconds.values()), **seconds},
            "notes": list(self.engine.notes),
            "seed": self.schedule.seed,
            "stopped_early": self.progress.round < self.schedule.rounds,
        }

    def _attack_in_words(self) -> dict[str, Any] | None:
        if self.attack.is_none:
            return None
        names = [self.federation.names[i] for i in self.attack.attackers.nonzero().flatten().tolist()]
        return {"kind": self.schedule.attack, "attackers": names, "corrupt": self.schedule.corrupt}

    # ---- saving and going on ----

    def _save(self) -> None:
        """Write a checkpoint and the arrays that go with it."""
        self._saved_at = time.monotonic()
        if self.folder is None:
            return
        labels = self.label_history()
        tensors = {f"state.{name}": tensor for name, tensor in self.state.tensors().items()}
        tensors |= {f"memory.{name}": tensor for name, tensor in self.engine.memory_tensors().items()}
        tensors["history.labels"] = torch.from_numpy(labels)
        for name, values in self._score_history().items():
            tensors[f"history.scores.{name}"] = torch.from_numpy(values)
        plain = {
            "state": self.state.plain(),
            "ledger": self.engine.ledger.entries,
            "failures": [asdict(failure) for failure in self.engine.failures],
            "score_rounds": self.progress.score_rounds,
            "seconds": self.progress.seconds,
            "notes": self.engine.notes,
            "rows_bytes": self.folder.rows_bytes(),
        }
        self.folder.save_checkpoint(Checkpoint(self.progress.round, tensors, plain))
        self._show()

    def _show(self) -> None:
        """Write what others look at while the run goes on, and after it."""
        if self.folder is None:
            return
        began = time.monotonic()
        self.folder.write_array("labels.npy", self.label_history())
        self.folder.write_arrays("clients.npz", self.client_arrays())
        for name, arrays in self.exhibits().items():
            self.folder.write_arrays(f"artifacts/{name}.npz", arrays)
        self.folder.write_json("artifacts/failures.json", [asdict(failure) for failure in self.engine.failures])
        self._shown_at = time.monotonic()
        self._show_took = self._shown_at - began

    def exhibits(self) -> dict[str, Arrays]:
        """Sketches of the clients' models and pictures of clusters' members, as far as there are any."""
        self.sketches.add_memory(self.engine, self.progress.round)
        found = {"sketches": self.sketches.arrays()} if self.sketches.rounds.any() else {}
        if self.schedule.keep_pictures:
            pictures = member_pictures(self.federation.at(self.progress.round), self.progress.labels[-1])
            found |= {} if pictures is None else {"members": pictures}
        return found

    def method_exhibits(self) -> Arrays:
        """What the method itself has to show at the end; counted as evaluation."""
        began = time.perf_counter()
        self.engine.begin(self.progress.round, "evaluate")
        shown = self.algorithm.exhibits(self.state, self.engine, self._rng.at("exhibits"))
        self.engine.begin(self.progress.round, "round")
        self.progress.seconds["evaluate"] += time.perf_counter() - began
        return shown

    def client_arrays(self) -> dict[str, NDArray[Any]]:
        """What `clients.npz` holds: names, groups, sizes, and each client's scores by evaluation."""
        arrays: dict[str, NDArray[Any]] = {
            "name": np.array(self.federation.names),
            "train_samples": self.federation.train.sizes.numpy(),
            "round": np.array(self.progress.score_rounds, dtype=np.int64),
        }
        groups = self._groups()
        if groups is not None:
            arrays["group"] = groups
        return arrays | self._score_history()

    def _score_history(self) -> dict[str, NDArray[Any]]:
        if not self.progress.scores:
            return {}
        names = self.progress.scores[0]
        return {name: np.stack([self._padded(s[name], 0) for s in self.progress.scores]) for name in names}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put everything back as it was after that round; later rounds are cut off the folder."""
        assert self.folder is not None
        self.folder.cut_rows(checkpoint.plain["rows_bytes"])
        self.load(checkpoint)
        with contextlib.suppress(RunError):  # damaged: the map of the models begins anew
            self.sketches.load(self.folder.arrays("artifacts/sketches.npz") or {})

    def load(self, checkpoint: Checkpoint) -> None:
        """As `restore`, of a folder that is only read."""
        assert self.folder is not None
        tensors, plain = checkpoint.tensors, checkpoint.plain

        def under(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self.engine.begin(checkpoint.round, "round")
        self.state = self.algorithm.state_type.restore(under("state."), plain["state"], self.engine.device)
        self.engine.load_memory(under("memory."))
        self.engine.ledger.entries = plain["ledger"]
        self.engine.failures[:] = [Failure(**values) for values in plain["failures"]]
        self.engine.notes[:] = list(dict.fromkeys([*plain["notes"], *self.engine.notes]))
        history = {name: values.numpy() for name, values in under("history.scores.").items()}
        count = len(plain["score_rounds"])
        self.progress = Progress(
            round=checkpoint.round,
            rows=self.folder.rows()[: checkpoint.round],
            labels=list(tensors["history.labels"].numpy()),
            scores=[{name: values[i] for name, values in history.items()} for i in range(count)],
            score_rounds=list(plain["score_rounds"]),
            seconds=dict(plain["seconds"]),
        )


def attack_of(keys: Tensor, schedule: Schedule) -> Attack:
    """The harm that a schedule asks for, among clients with these keys."""
    return Attack.of(keys, schedule.attack, schedule.attackers, schedule.corrupt, schedule.seed)


def evaluate_clients(engine: Engine, personal: Personal, clients: Tensor, rng: Rng) -> dict[str, NDArray[Any]]:
    """Scores of each client [n] with its personal model; clients that fail score 0 with samples = 0."""
    work = None if personal.adapt is None else personal.adapt(engine.task.work)
    step = evaluate if work is None else adapt_and_evaluate
    if personal.private:
        if work is not None:
            raise NotImplementedError("no method adapts and keeps its losses to itself")
        step = evaluate_privately
    found: dict[str, NDArray[Any]] = {}
    call = engine.call(step, clients, models=personal.models, refs=personal.refs, work=work, rng=rng)
    for chunk in call:
        for name, values in chunk.answer.items():
            numbers = values.cpu().numpy()
            kind = np.int64 if name == "samples" else np.float64
            found.setdefault(name, np.zeros(len(clients), dtype=kind))[chunk.positions.numpy()] = numbers
    if found and "samples" not in found:
        found["samples"] = np.ones(len(clients), dtype=np.int64)  # not told: all clients weigh the same
    if not found:
        found = {"samples": np.zeros(len(clients), dtype=np.int64), "loss": np.zeros(len(clients))}
    return found
