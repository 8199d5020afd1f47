"""The one round loop: sample a cohort, let the method do its round, evaluate, record, checkpoint.

Some engines carry the evaluation of a round with the calls of the next one (`Engine.carry`). The row of the round is
then complete one round later; until then it is pending, also in checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.client.privacy import Released
from coterie.client.steps import adapt_and_evaluate, evaluate, evaluate_privately
from coterie.data.federation import Federation
from coterie.engines.attacks import Attack
from coterie.engines.base import Engine, Failure, Request
from coterie.errors import (
    ConfigError,
    CoterieError,
    Interrupted,
    MethodError,
    RunError,
    StopRun,
    defined_at,
    raised_at,
)
from coterie.methods.base import Algorithm, ClusterState, Personal
from coterie.randomness import Rng
from coterie.runs.checks import check_checkpoint, columns_of, plain_settings, unfit
from coterie.runs.divergence import divergence, loss_of_guessing
from coterie.runs.exhibits import Arrays, Sketches, listening, member_pictures
from coterie.runs.folder import Checkpoint, RunFolder
from coterie.runs.metrics import (
    METRICS,
    best_validated,
    cluster_sizes,
    measured,
    of_clusters,
    of_scores,
    quantiles,
    summarized,
)
from coterie.runs.observers import Listener, Row, Several
from coterie.runs.settings import Schedule
from coterie.settings import check

log, methods = logging.getLogger("coterie.runs"), logging.getLogger("coterie.methods")

_SHOW_EVERY = 2.0  # seconds, at least, between two writes of the arrays that reports read
_SHOW_SHARE = 50  # such a write may take one part in fifty of the time
_MAPPED = 20  # rounds in which the clients' models are sketched


@dataclass
class Progress:
    """The progress of a run: what a checkpoint holds besides the states of method and engine."""

    round: int = 0
    rows: list[Row] = field(default_factory=list)
    labels: list[NDArray[np.int64]] = field(default_factory=list)  # [N] after the start and each round
    scores: list[dict[str, NDArray[Any]]] = field(default_factory=list)  # [N] of each evaluation
    score_rounds: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("start", "train", "server", "evaluate"), 0.0)
    )


@dataclass(frozen=True)
class Moment:
    """Method and clients after a round: what is served, or where training goes on."""

    round: int
    state: Any
    memory: dict[str, Tensor]  # what the clients remember, where the engine knows

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Its tensors for a checkpoint."""
        found = {f"{name}state.{key}": tensor for key, tensor in self.state.tensors().items()}
        return found | {f"{name}memory.{key}": tensor for key, tensor in self.memory.items()}

    def plain(self) -> dict[str, Any]:
        """The rest of it, in JSON."""
        return {"round": self.round, "state": self.state.plain()}


@dataclass(frozen=True)
class Pending:
    """A round whose row is not complete: what is known of it, and the evaluation that is missing."""

    row: Row
    known: dict[str, Any]  # inputs of metrics
    request: Request | None  # None: the round is not evaluated
    honest: NDArray[np.bool_]  # [N] clients that do not attack
    state: Any  # of the method after the round


class Trainer:
    """Runs a method on an engine. With a folder, the run can be stopped and resumed at any time."""

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
                f"{type(algorithm).__name__} needs validation samples, and no client has any. "
                "Hold some out with --set scenario.valid=0.1."
            )
        if schedule.patience is not None and not bool(federation.valid.sizes.any()):
            raise ConfigError(
                f"patience={schedule.patience} needs validation samples, and no client has any. "
                "Hold some out with --set scenario.valid=0.1."
            )
        if algorithm.needs_classes and not engine.task.num_classes:
            raise ConfigError(
                f"{algorithm.key} works by classes, and the targets of {federation.name} are numbers; "
                "use another method, such as coterie, fesem or ifca."
            )
        self.algorithm, self.engine, self.federation = algorithm, engine, federation
        self.schedule, self.folder = schedule, folder
        self._settings = {} if folder is None else plain_settings(folder.config())
        self.progress = Progress()
        self.state: Any = None
        self._pending: Pending | None = None
        self._best: Moment | None = None  # the round with the best validation score so far; only with `patience`
        self._last: Moment | None = None  # the last round of a finished run, if it serves an earlier one
        self._stop: str | None = None  # why the run ends before its last round
        self._observer = Several([observer])
        self._should_stop = should_stop
        self._rng = Rng.seed(schedule.seed).at("run")
        self._saved_at = self._shown_at = time.monotonic()
        self._show_took = 0.0
        self.sketches = Sketches(engine)
        self._guessing = loss_of_guessing(engine.task, federation)
        self._set_attack()
        engine.participation = schedule.participation
        engine.dropout, engine.dropout_rng = schedule.dropout, Rng.seed(schedule.seed).at("dropout")

    def run(self) -> None:
        """Run to the last round, from the start or from a restored checkpoint."""
        if self.state is None:
            self._start()
        while not self._is_over():
            self._round(self.progress.round + 1)
            if self._should_stop():
                self._report(self._complete())
                self._save()
                raise Interrupted(f"Stopped after round {self.progress.round} of {self.schedule.rounds}.")
        self._report(self._complete())
        self._check_labels()
        if self._stop is not None:
            self._note(f"stopped after round {self.progress.round}: {self._stop}")
        self._serve_best()
        self._save()
        if self.folder is not None:
            arrays = self.method_exhibits()
            if arrays:
                self.folder.write_arrays("artifacts/method.npz", arrays)

    def _is_over(self) -> bool:
        """Whether no round is left. A run that is stopped still evaluates its last round."""
        if self.progress.round >= self.schedule.rounds or self.algorithm.should_stop(self.state):
            return True
        return self._stop is not None and self._is_evaluated(self.progress.round)

    def _is_evaluated(self, number: int) -> bool:
        rows = self.progress.rows
        if self._pending is not None:
            return self._pending.request is not None
        return bool(rows) and rows[-1]["round"] == number and "accuracy" in rows[-1]

    @property
    def served_round(self) -> int:
        """The round whose models are served: the best one with `patience`, once the run has ended; else the last."""
        return self.progress.round if self._last is None or self._best is None else self._best.round

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time of a `with` block as part of a phase."""
        began = time.perf_counter()
        yield
        self.progress.seconds[phase] += time.perf_counter() - began

    def _start(self) -> None:
        with self.timed("start"):
            self.engine.begin(0, "start")
            with self._blaming("start"):
                self.state = self.algorithm.start(self.engine.task, self.engine, self._rng.at("init"))
            self._check_result("start")
            self.progress.labels.append(self.state.labels.numpy().copy())

    def _round(self, number: int) -> None:
        began, worked = time.perf_counter(), self.engine.client_seconds
        failures, repairs, decisions = len(self.engine.failures), len(self.state.repairs), len(self.state.decisions)
        rng = self._rng.at("round", number)
        self.engine.begin(number, "round")
        self.welcome()
        before = self._padded(self.progress.labels[-1], -1)
        cohort = self.engine.draw(rng.at("cohort"), self.engine.cohort_size)
        if self._pending is not None and self._pending.request is not None:
            self.engine.carry(self._pending.request, self._pending.row["round"], cohort)
        # About twenty rounds and the last one are enough for a map of the models.
        is_mapped = number % max(1, self.schedule.rounds // _MAPPED) == 0 or number == self.schedule.rounds
        engine = listening(self.engine, self.sketches) if is_mapped else self.engine
        with self._blaming("round"):
            self.state = self.algorithm.round(self.state, engine, cohort, rng.at("work"))
        self._check_result("round")
        trained = time.perf_counter()
        in_clients = self.engine.client_seconds - worked

        labels = self.state.labels.numpy().copy()
        is_stopped = self._stop is not None or self.algorithm.should_stop(self.state)
        is_last = number == self.schedule.rounds or is_stopped
        totals = self.engine.ledger.totals()
        sent = {phase: totals[phase]["down"] + totals[phase]["up"] for phase in ("start", "repair")}
        row: Row = {
            "round": number,
            "cohort": len(cohort),
            "cluster_sizes": cluster_sizes(labels, self.state.num_clusters),
            "clients_met": int((labels >= 0).sum()),
            "failures": len(self.engine.failures) - failures,
            "repairs": self.state.repairs[repairs:],
            "decisions": self.state.decisions[decisions:],
            "bytes": {"down": totals["down"], "up": totals["up"], **sent},  # so far, without evaluation
            "seconds": {"train": in_clients, "server": trained - began - in_clients, "evaluate": 0.0},
        }
        self.progress.round = number
        self.progress.labels.append(labels)
        done = self._complete()  # the round before
        is_evaluated = is_last or number % self.schedule.evaluate_every == 0
        self._pending = self._as_pending(row, before, is_evaluated)
        if is_last or not is_evaluated or not self.engine.carries:
            done += self._complete()
        now = time.monotonic()
        if not is_last and now - self._saved_at >= self.schedule.checkpoint_every:
            self._save()
        elif not is_last and now - self._shown_at >= max(_SHOW_EVERY, _SHOW_SHARE * self._show_took):
            self._show()
        self._report(done)

    def _as_pending(self, row: Row, before: NDArray[np.int64], is_evaluated: bool) -> Pending:
        """The last round with what the method knows now; `before` are the labels [N] before it."""
        labels = self.progress.labels[-1]
        known = self._known_clusters(labels) | {"before": before, "after": labels}
        request = self._evaluation(row["round"]) if is_evaluated else None
        return Pending(row, known, request, ~self._attackers(len(labels)), self.state)

    def _complete(self) -> list[Row]:
        """Complete the pending row with the scores of its round, and write it; returns it if there is one."""
        began = time.perf_counter()
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        row, known = dict(pending.row), pending.known
        head: Row = {"round": row["round"], "cohort": row["cohort"]}
        if pending.request is not None:
            failures = len(self.engine.failures)
            scores = self._evaluate(row["round"], pending.request)
            counts = [name for name in ("samples", "valid_samples") if name in scores]
            scores = scores | {name: scores[name] * pending.honest for name in counts}  # attackers have no samples
            head["spread"] = quantiles(scores)
            known = known | of_scores(scores, known["after"])
            row["failures"] += len(self.engine.failures) - failures
        row = head | measured(known) | row
        row["seconds"] = row["seconds"] | {"evaluate": time.perf_counter() - began}
        for phase, seconds in row["seconds"].items():
            self.progress.seconds[phase] += seconds
        self.progress.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
        self._watch(row, pending.state)
        return [row]

    def _watch(self, row: Row, state: Any) -> None:
        """Keep the state after a round that is the best so far, and stop when there was none for long enough."""
        if self.schedule.patience is None or "accuracy" not in row:
            return
        if best_validated(self.progress.rows)[0] == row["round"]:
            # States are never changed in place; the clients' memory is.
            self._best = Moment(row["round"], state, _copied(self.engine.memory_tensors()))
        self._judge()

    def _judge(self) -> None:
        """Stop the run if no round was the best for long enough."""
        best, since = best_validated(self.progress.rows)
        if self.schedule.patience is not None and since >= self.schedule.patience:
            self._stop = f"validation was best in round {best}, and not better in {since} evaluations since"

    def _serve_best(self) -> None:
        """Return to the best round; the last one is kept in the checkpoint."""
        if self.schedule.patience is None or self._best is None or self._best.round == self.progress.round:
            return
        self._last = Moment(self.progress.round, self.state, dict(self.engine.memory_tensors()))
        self._take(self._best)
        joined = self.engine.num_clients - len(self.state.labels)
        self.state = self.state.with_more_clients(joined) if joined else self.state
        personal = self.algorithm.personal(self.state, torch.arange(1))
        if not self.engine.remembers and (personal.models is None or personal.serve is not None):
            self._note(
                f"the models are those of round {self._best.round}; what clients remember is of round "
                f"{self.progress.round}, as only they have it"
            )

    def _note(self, text: str) -> None:
        if text not in self.engine.notes:  # a run that was killed at its end has it already
            self.engine.notes.append(text)

    def _take(self, moment: Moment) -> None:
        """Make method, clients and round those of that moment."""
        self.state = moment.state
        self.engine.load_memory(moment.memory)
        self.engine.begin(moment.round, "round")

    def _report(self, rows: list[Row]) -> None:
        for row in rows:
            _log_round(row)
            try:
                self._observer.round(row)
            except StopRun as stop:
                self._stop = str(stop) or "an observer has stopped it"

    def welcome(self) -> int:
        """Take in clients that have joined; to the method they are clients it has not seen yet."""
        count = self.engine.welcome()
        if count:
            self.state = self.state.with_more_clients(count)
            self._set_attack()
            self.federation = self.engine.population(self.federation)
        return count

    def _set_attack(self) -> None:
        self.attack = attack_of(self.engine.keys, self.schedule)
        self.engine.attack = None if self.attack.is_none else self.attack

    def label_history(self) -> NDArray[np.int64]:
        """The labels after the start and each round, [T + 1, N]."""
        return np.stack([self._padded(row, -1) for row in self.progress.labels])

    def _padded(self, values: NDArray[Any], fill: float) -> NDArray[Any]:
        """Earlier values [n] as values of all clients [N]: some may have joined since."""
        return np.pad(values, (0, self.engine.num_clients - len(values)), constant_values=fill)

    def _evaluation(self, number: int) -> Request:
        """The evaluation of every client's personal model on its test samples, after a round."""
        everyone = torch.arange(len(self.state.labels))
        with self._blaming("personal"):
            personal = self.algorithm.personal(self.state, everyone)
        return evaluation_of(self.engine, personal, everyone, self.rng_of_evaluation(number))

    def _evaluate(self, number: int, request: Request) -> dict[str, NDArray[Any]]:
        """The scores of every client after a round, which may be the one before the current round."""
        now = self.engine.round
        self.engine.begin(number, "evaluate")
        scores = scores_of(self.engine, request)
        self.engine.begin(now, "round")
        self.progress.scores.append(scores)
        self.progress.score_rounds.append(number)
        return scores

    def _known_clusters(self, labels: NDArray[np.int64]) -> dict[str, Any]:
        """Inputs of metrics about clusters; attackers count as not seen."""
        return of_clusters(np.where(self._attackers(len(labels)), -1, labels), self.groups())

    def _attackers(self, count: int) -> NDArray[np.bool_]:
        """Which of the first `count` clients attack."""
        return self.attack.attackers.numpy()[:count]

    def rng_of_evaluation(self, number: int) -> Rng:
        """The randomness with which personal models are adapted in that round."""
        return self._rng.at("evaluate", number)

    def groups(self) -> NDArray[np.int64] | None:
        """The true groups in the current round; None if those of clients that joined are unknown."""
        groups = self.federation.at(self.engine.round).groups
        return None if groups is None or len(groups) != self.engine.num_clients else groups.numpy()

    # ---- what a method may do wrong ----

    @contextlib.contextmanager
    def _blaming(self, function: str) -> Iterator[None]:
        """An error that is raised in the user's code is a sentence with its file and line."""
        try:
            yield
        except (CoterieError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's code may raise anything
            if (place := raised_at(error)) is None:
                raise  # a mistake of ours
            name = type(self.algorithm).__name__
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise MethodError(f"{name}.{function} failed ({place}): {said}") from error

    def _check_result(self, function: str) -> None:
        """Raise MethodError if `start` or `round` returned something that is no state of this run."""
        method, state = type(self.algorithm), self.state
        expected = method.state_type
        if type(state) is not expected:
            known = isinstance(state, ClusterState)
            why = f"must return a {expected.__name__}. Got {type(state).__name__} instead"
            why += "; set state_type to it, or a resumed run would lose its fields" if known else ""
        else:
            try:
                self._check_state(state)
                # Answers are checked, and a mean of finite answers is finite: what is not finite is the method's.
                if not bool(torch.isfinite(state.centers.sum())):
                    raise ValueError("centers are not finite")
                return
            except (ValueError, TypeError, AttributeError) as error:
                why = f"returned a wrong state: {error}"
        where = defined_at(getattr(method, function))
        raise MethodError(f"{method.__name__}.{function} ({where}) {why}.")

    def _check_labels(self) -> None:
        """Add a note if the method never said which cluster a client is in."""
        answered = len(self.engine.failures) < sum(row["cohort"] for row in self.progress.rows)
        if answered and all(bool((labels < 0).all()) for labels in self.progress.labels):
            self._note(
                f"{type(self.algorithm).__name__} never sets labels, so every client counts as not seen; set them in "
                "round for the clients that answered, such as labels[chunk.clients] = 0"
            )

    # ---- the summary ----

    def summary(self) -> dict[str, Any]:
        """The result in numbers, as in `summary.json` and `--json`."""
        rows, labels = self.progress.rows, self.state.labels.numpy()
        seconds, best = self.progress.seconds, None if self.schedule.patience is None else self.served_round
        return {
            "rounds": self.progress.round,
            "clients": len(self.federation),
            "clients_met": int((labels >= 0).sum()),
            "clusters": self.state.num_clusters,
            "best_round": best,  # whose models and scores these are; None: those of the last round
            **summarized(rows, self._known_clusters(labels), best),
            **self._movement(),
            "cluster_sizes": cluster_sizes(labels, self.state.num_clusters),
            "cluster_groups": self._cluster_groups(labels),
            "diverged": divergence(rows, self.engine.failures, self._guessing, self.federation),
            "repairs": list(self.state.repairs),
            "decisions": list(self.state.decisions),
            "failures": len(self.engine.failures),
            "failures_by_reason": dict(Counter(failure.reason for failure in self.engine.failures).most_common()),
            "attack": self._attack_summary(),
            "privacy": self._privacy_summary(),
            "bytes": self.engine.ledger.totals(),
            "seconds": {"total": sum(seconds.values()), **seconds},
            "notes": list(self.engine.notes),
            "seed": self.schedule.seed,
            "stopped_early": self.progress.round < self.schedule.rounds,
        }

    def _cluster_groups(self, labels: NDArray[np.int64]) -> list[dict[str, int]] | None:
        """Of each cluster, how many clients of each true group are in it; None if groups are unknown."""
        groups = self.groups()
        if groups is None:
            return None
        names = self.federation.at(self.engine.round).group_names()
        found: list[dict[str, int]] = [{} for _ in cluster_sizes(labels, self.state.num_clusters)]
        for group, name in names.items():  # in one order for all clusters
            for cluster, count in Counter(labels[(groups == group) & (labels >= 0)].tolist()).items():
                found[cluster][name] = count
        return found

    def _movement(self) -> dict[str, Any]:
        """What the start found and what the rounds changed: ARI after the start, and clients that moved since.

        Both are None for methods that put no client into a cluster before the first round.
        """
        history = self.label_history()
        placed, last = history[0] >= 0, history[-1]
        seen = history[:-1] >= 0
        groups = self.federation.at(0).groups
        known = None if groups is None or len(groups) != len(last) else groups.numpy()
        first = of_clusters(np.where(self.attack.attackers.numpy(), -1, history[0]), known)
        return {
            "start_ari": METRICS["ari"].value(first),
            "moved_since_start": int((last[placed] != history[0][placed]).sum()) if placed.any() else None,
            "label_changes": [int(count) for count in ((history[1:] != history[:-1]) & seen).sum(1)],
        }

    def _attack_summary(self) -> dict[str, Any] | None:
        if self.attack.is_none:
            return None
        names = [self.federation.names[i] for i in self.attack.attackers.nonzero().flatten().tolist()]
        return {"kind": self.schedule.attack, "attackers": names, "corrupt": self.schedule.corrupt}

    def _privacy_summary(self) -> dict[str, Any] | None:
        """What differential privacy covers, and the numbers that its guarantee follows from; None if it is off."""
        work, released = self.engine.task.work, self.engine.released
        if work.update_clip is None:
            return None
        return {
            "clip": work.update_clip,
            "noise": work.update_noise or 0.0,
            "participation": self.schedule.participation,
            "rounds": self.progress.round,
            "releases": max(released.counts, default=0),  # of the client that has sent most
            "noised": sorted(released.noised),
            "exact": sorted(released.exact),
        }

    # ---- saving and resuming ----

    def _save(self) -> None:
        """Write a checkpoint and the arrays that reports read."""
        self._saved_at = time.monotonic()
        if self.folder is None:
            return
        # The arrays come first: a run that is killed in between resumes from the checkpoint before, and writes both.
        self._show()
        try:
            self.folder.save_checkpoint(self.snapshot())
        except TypeError as error:
            name = type(self.state).__name__
            raise MethodError(f"{name} cannot be saved: {error}. Its fields must be tensors or JSON.") from error
        log.debug("%s: checkpoint of round %d", self.folder.path, self.progress.round)

    def snapshot(self) -> Checkpoint:
        """Everything that is needed to go on after this round, besides the rows of the rounds."""
        served = Moment(self.served_round, self.state, dict(self.engine.memory_tensors()))
        other = self._best if self._last is None else self._last
        other = None if other is None or other.state is self.state else other
        tensors = served.tensors("") | ({} if other is None else other.tensors("other."))
        tensors["history.labels"] = torch.from_numpy(self.label_history())
        for name, values in self._score_history().items():
            tensors[f"history.scores.{name}"] = torch.from_numpy(values)
        plain = {
            "state": served.plain()["state"],
            "other": None if other is None else other.plain(),
            "ledger": self.engine.ledger.entries,
            "released": self.engine.released.plain(),
            "failures": [asdict(failure) for failure in self.engine.failures],
            "score_rounds": self.progress.score_rounds,
            "seconds": self.progress.seconds,
            "notes": self.engine.notes,
            "round": self.progress.round,
            "rows_bytes": 0 if self.folder is None else self.folder.rows_bytes(),
            "settings": self._settings,
            "pending": None if self._pending is None else self._pending.row,
        }
        return Checkpoint(self.progress.round, tensors, plain)

    def _show(self) -> None:
        """Write the arrays that reports read, during the run and after it."""
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
        """Sketches of the clients' models and pictures of the clusters' members, if there are any."""
        self.sketches.add_memory(self.engine, self.progress.round)
        found = {"sketches": self.sketches.arrays()} if self.sketches.rounds.any() else {}
        if self.schedule.keep_pictures:
            pictures = member_pictures(self.federation.at(self.progress.round), self.progress.labels[-1])
            found |= {} if pictures is None else {"members": pictures}
        return found

    def method_exhibits(self) -> Arrays:
        """Arrays of the method itself, made at the end; counted as evaluation."""
        with self.timed("evaluate"):
            self.engine.begin(self.served_round, "evaluate")
            arrays = self.algorithm.exhibits(self.state, self.engine, self._rng.at("exhibits"))
            self.engine.begin(self.served_round, "round")
        return arrays

    def client_arrays(self) -> dict[str, NDArray[Any]]:
        """The content of `clients.npz`: names, groups, sizes, and the scores of each evaluation."""
        arrays: dict[str, NDArray[Any]] = {
            "name": np.array(self.federation.names),
            "train_samples": self.federation.train.sizes.numpy(),
            "round": np.array(self.progress.score_rounds, dtype=np.int64),
        }
        groups = self.groups()
        if groups is not None:
            arrays["group"] = groups
        return arrays | self._score_history()

    def _score_history(self) -> dict[str, NDArray[Any]]:
        """Scores of every evaluation, [evaluations, N] each."""
        names = self.progress.scores[0] if self.progress.scores else ()
        return {name: np.stack([self._padded(s[name], 0) for s in self.progress.scores]) for name in names}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Return to the state after that round; later rounds are removed from the folder."""
        assert self.folder is not None
        self._check_fit(checkpoint)
        self.folder.cut_rows(checkpoint.plain["rows_bytes"])
        self.load(checkpoint)
        if self._last is not None:  # training goes on where it ended
            self._take(self._last)
            self._last = None
        self._judge()
        with contextlib.suppress(RunError):  # damaged: the map of the models starts again
            self.sketches.load(self.folder.arrays("artifacts/sketches.npz") or {})

    def load(self, checkpoint: Checkpoint, rows: list[Row] | None = None) -> None:
        """As `restore`, without changing the folder; `rows` are those of the rounds, by default the folder's."""
        rows = rows if self.folder is None or rows is not None else self.folder.rows()
        rows = (rows or [])[: checkpoint.round]
        columns_of(rows, "rounds.jsonl" if self.folder is None else str(self.folder.path / "rounds.jsonl"))  # or raises
        tensors, plain = checkpoint.tensors, checkpoint.plain

        def under(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        self._check_fit(checkpoint)
        self.engine.begin(checkpoint.round, "round")
        try:
            self.state = self._restored(under("state."), plain["state"])
            self.engine.load_memory(under("memory."))
            other = plain.get("other")
            if other is not None:
                state = self._restored(under("other.state."), other["state"])
                other = Moment(other["round"], state, under("other.memory."))
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise unfit(self._place, checkpoint.round, error) from error
        self.engine.ledger.entries = plain["ledger"]
        self.engine.released = Released.of(plain.get("released") or {})
        self.engine.failures[:] = [Failure(**values) for values in plain["failures"]]
        self.engine.notes[:] = list(dict.fromkeys([*plain["notes"], *self.engine.notes]))
        history = {name: values.numpy() for name, values in under("history.scores.").items()}
        count = len(plain["score_rounds"])
        self.progress = Progress(
            round=checkpoint.round,
            rows=rows,
            labels=list(tensors["history.labels"].numpy()),
            scores=[{name: values[i] for name, values in history.items()} for i in range(count)],
            score_rounds=list(plain["score_rounds"]),
            seconds=dict(plain["seconds"]),
        )
        best = best_validated(self.progress.rows)[0]
        self._best = other
        if other is not None and other.round == checkpoint.round:  # a finished run, which serves an earlier round
            self._last, self._best = other, Moment(best or 0, self.state, _copied(under("memory.")))
            self.engine.begin(self.served_round, "round")
        elif other is None and self.schedule.patience is not None and best == checkpoint.round:
            self._best = Moment(best, self.state, _copied(under("memory.")))
        if plain.get("pending") is not None:
            self._pending = self._as_pending(plain["pending"], self.progress.labels[-2], is_evaluated=True)
        joined = self.engine.num_clients - len(self.state.labels)  # while the run was stopped
        if joined > 0:
            self.state = self.state.with_more_clients(joined)

    @property
    def _place(self) -> object:
        return "memory" if self.folder is None else self.folder.path

    def _check_fit(self, checkpoint: Checkpoint) -> None:
        tensors, plain, clients = checkpoint.tensors, checkpoint.plain, self.engine.num_clients
        check_checkpoint(tensors, plain, checkpoint.round, clients, self._place)

    def _restored(self, tensors: dict[str, Tensor], plain: dict[str, Any]) -> Any:
        """A state of a checkpoint, checked; older ones hold also what does not travel."""
        travels = self.algorithm.travels(self.engine.task)
        for name in ("common", "centers"):
            if not bool(travels.all()) and name in tensors and tensors[name].shape[-1:] == travels.shape:
                tensors[name] = tensors[name][..., travels]
        state = self.algorithm.state_type.restore(tensors, plain, self.engine.device)
        self._check_state(state)
        return state

    def _check_state(self, state: Any) -> None:
        """Raise ValueError if the tensors of a state do not have the clients and parameters of this run."""
        numbers, size = len(state.labels), int(self.algorithm.travels(self.engine.task).sum())
        clusters = state.centers.shape[:1] if state.centers.dim() == 2 else ("K",)
        forms = {"common": ((size,), self.engine.dtype), "centers": ((*clusters, size), self.engine.dtype)}
        for name, (shape, dtype) in (forms | {"labels": ((numbers,), torch.int64)}).items():
            found = getattr(state, name)
            if tuple(found.shape) != shape or found.dtype != dtype:
                expected = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
                raise ValueError(f"{name} is {found.dtype} of shape {tuple(found.shape)}, not {dtype} of {expected}")
        if numbers > self.engine.num_clients:
            raise ValueError(f"labels are of {numbers} clients, and there are {self.engine.num_clients}")
        most = state.num_clusters or numbers  # without centers, every client may be a cluster of its own
        wrong = state.labels[(state.labels < -1) | (state.labels >= most)]
        if len(wrong):
            kind = f"{most} cluster{'s' * (most > 1)}" if state.num_clusters else f"{most} clients and no centers"
            raise ValueError(f"labels are out of range: {int(wrong[0])}, with {kind} (-1 to {most - 1})")
        for name in state.of_clients:
            if len(rows := getattr(state, name)) not in (0, numbers):
                raise ValueError(f"{name} has {len(rows)} rows, and there are {numbers} clients")


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _log_round(row: Row) -> None:
    """Log a round and what the method did in it."""
    score = row.get("accuracy") or row.get("loss") or {}
    shown = "not evaluated" if score.get("macro") is None else f"{score['macro']:.4f}"
    log.debug("round %d: %s, cluster sizes %s", row["round"], shown, row["cluster_sizes"])
    for repair in row["repairs"]:
        methods.info("round %d: repair, %s", row["round"], repair.get("reason"))
    for decision in row["decisions"]:
        methods.info("round %d: %s of clusters %s", row["round"], decision.get("what"), decision.get("clusters"))


def attack_of(keys: Tensor, schedule: Schedule) -> Attack:
    """The simulated attack of a schedule among clients with these keys."""
    return Attack.of(keys, schedule.attack, schedule.attackers, schedule.corrupt, schedule.seed)


def evaluation_of(engine: Engine, personal: Personal, clients: Tensor, rng: Rng) -> Request:
    """The request that evaluates each of these clients [n] with its personal model."""
    work = None if personal.adapt is None else personal.adapt(engine.task.work)
    if personal.private and work is not None:
        raise NotImplementedError("No method both adapts its models and keeps its losses private.")
    step = evaluate_privately if personal.private else evaluate if work is None else adapt_and_evaluate
    step = step if personal.serve is None else personal.serve.evaluate
    return engine.request(step, clients, rng, personal.models, personal.refs, None, personal.each, work)


def scores_of(engine: Engine, evaluation: Request) -> dict[str, NDArray[Any]]:
    """The scores of each client [n]; clients that fail score 0 with samples = 0."""
    count = len(evaluation.cohort)
    found: dict[str, NDArray[Any]] = {}
    answered = np.zeros(count, dtype=np.int64)
    for chunk in engine.answers(evaluation):
        answered[chunk.positions.numpy()] = 1
        for name, values in chunk.answer.items():
            scores = np.zeros(count, dtype=np.int64 if name.endswith("samples") else np.float64)
            found.setdefault(name, scores)[chunk.positions.numpy()] = values.cpu().numpy()
    if not found:
        return {"samples": np.zeros(count, dtype=np.int64), "loss": np.zeros(count)}
    # Where clients keep their sample counts private, all weigh the same.
    return {"samples": answered} | found
