"""Coterie: finds the kinds of clients and their number, trains a model for each, and personalises it.

The method for clients of which nothing is known. It costs about FedAvg's bytes and asks only a round's cohort.

1. For `warmup` rounds it is FedAvg: one center.
2. Then clients sign, once each: per class, the mean gradient of their samples at the center of that round, in two
   halves (`parts/kinds.py`). Gradients of two halves of one kind agree up to noise, and the noise is known. Kinds are
   groups of clients that differ beyond noise, and by so much that a model of their own is worth its smaller data. So
   the number of kinds is found; with IID clients or pure label skew it is one. A client that takes part for the first
   time later signs then, and joins the nearest kind.
3. In some later rounds clients sign at their own centers: a model that has learnt more shows smaller differences. A
   cluster with several kinds is cut, and its parts start from the means of their members' models.
4. Some rounds after a cut, members compare their center with the mean of it and the nearest one. Clusters that one
   model serves as well are merged (`parts/mergers.py`).
5. A client whose held-out loss rises signs again and moves, or chooses a center by its loss (`parts/guard.py`).
6. Clients train with their label proportions taken out. Each is served with a mix of its center, adjusted to its label
   proportions, and the model that it trained last, as its held-out samples prefer (`parts/personal.py`).

Every decision is recorded with its evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coterie.client.task import Task
from coterie.engines.base import Chunk, Engine
from coterie.errors import ConfigError
from coterie.methods.base import ClusterState, Decision, Move, Personal, register
from coterie.methods.parts import signatures
from coterie.methods.parts.centers import (
    REST,
    SignedMethod,
    has_signature,
    without_signatures,
)
from coterie.methods.parts.cuts import Update
from coterie.methods.parts.found import CoterieState, with_signatures, without
from coterie.methods.parts.guard import rechosen, with_misplaced
from coterie.methods.parts.halves import coarsened, halves_shape, sign_at
from coterie.methods.parts.kinds import CLEAR, WORTH
from coterie.methods.parts.member import train_member, try_member
from coterie.methods.parts.mergers import COMPARED, with_comparisons
from coterie.methods.parts.personal import (
    NUM_MIXES,
    balance_of,
    mixes,
    served,
)
from coterie.methods.parts.signatures import Signatures
from coterie.methods.parts.start import chosen_by_loss, find_clusters, signatures_tell
from coterie.randomness import Rng
from coterie.settings import setting

AUTO = "auto"
_AGAIN = 6  # rounds after the first signing in which clients sign again; then 18, 42, ...
_DOUBT = 0.75  # of `clear`: with less, the first look left no doubt; by chance z reaches half of it
_OWN = 0.5  # own models with at least this share are finished at the end ...
_FINISH = 0.25  # ... by this share of the run's work
_COMPARE = 4  # rounds between two comparisons of mixes


@register
@dataclass(frozen=True)
class Coterie(SignedMethod[CoterieState]):
    """As many models as there are kinds of clients, each personalised; the default method."""

    key: ClassVar[str] = "coterie"
    paper: ClassVar[str] = "this project; builds on FeSEM, MD-ICFL, CFL and APFL"
    state_type: ClassVar[type[ClusterState]] = CoterieState
    finds_clusters: ClassVar[bool] = True
    choice_share: ClassVar[float] = 0.04
    sign_cost: ClassVar[float] = 0.4  # a coarse copy and a signature

    num_clusters: int | str = setting(AUTO, "number of clusters K: auto finds it; a number; or a range such as 2-6")
    warmup: int = setting(1, "rounds of plain averaging before clients sign", ge=0)
    serve: Literal["own", "kind"] = setting(
        "own",
        "serve a client for data like its own (a mix with its own model), or for any data of its kind (its cluster's "
        "model)",
    )
    guard: bool = setting(True, "let clients sign again and move, or choose by loss, when their loss has risen")
    clear: float = setting(CLEAR, "evidence (z) from which two groups of clients count as different kinds", gt=0)
    worth: float = setting(WORTH, "benefit (q) from which a cut is tried; from 10 on it is made at once", ge=0)

    def start(self, task: Task, engine: Engine, rng: Rng) -> CoterieState:
        """One center: the common model."""
        classes, width = halves_shape(task, self.signs_classes(engine))
        zeros = torch.zeros(engine.num_clients, classes, width, dtype=engine.dtype, device=engine.device)
        return self.first_state(
            engine,
            1,
            signatures=zeros,
            contrasts=zeros.clone(),
            counts=torch.zeros(engine.num_clients, classes, dtype=torch.int64),
            shares=zeros.new_zeros(1, classes if classes > 1 else 0),
            curves=zeros.new_zeros(1, NUM_MIXES),
            served=engine.initial().unsqueeze(0),
            behind=zeros.new_zeros(1),
            tried=torch.full((engine.num_clients,), -1, dtype=torch.int64),
            trials=engine.initial().unsqueeze(0)[:0],
            made_in=torch.zeros(1, dtype=torch.int64),
            due_in=torch.zeros(1, dtype=torch.int64),
            merged=torch.zeros(1, dtype=torch.bool),
        )

    def check(self, num_clients: int) -> None:
        """Refuse a number or range of clusters that cannot be."""
        low, high = self.bounds
        if low < 1 or (high is not None and high < low):
            raise ConfigError(
                f"num_clusters of Coterie must be at least 1, and a range must rise. Got {self.num_clusters!r} instead."
            )
        if low > num_clients:
            raise ConfigError(
                f"num_clusters of Coterie must be at most the number of clients, {num_clients}. "
                f"Got {self.num_clusters!r} instead."
            )

    @property
    def bounds(self) -> tuple[int, int | None]:
        """The least and the largest number of clusters; None: any."""
        if self.num_clusters == AUTO:
            return 1, None
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(self.num_clusters))
        if found is None:
            raise ConfigError(
                "num_clusters of Coterie must be 'auto', an int >= 1, or a range such as '2-6'. "
                f"Got {self.num_clusters!r} instead."
            )
        return int(found[1]), int(found[2] or found[1])

    def round(self, state: CoterieState, engine: Engine, cohort: Tensor, rng: Rng) -> CoterieState:
        """Place new clients, train, average; look for kinds if clients signed; let clients choose anew."""
        if not state.signed_in and engine.round > self.warmup:
            state = replace(state, common=state.centers[0], signed_in=engine.round)
        signed, unseen = has_signature(state), state.labels < 0
        state = self._placed(state, engine, cohort, rng.at("place"))
        is_signing = self._signs_now(state, engine)
        has_news = is_signing or not torch.equal(has_signature(state), signed)
        update = Update(self, state, engine, keep=has_news or any(one["what"] != COMPARED for one in state.proposals))
        for chunk in self._train(state, engine, cohort[state.labels[cohort] >= 0], is_signing, rng):
            update.add(chunk)
        state, alarmed = update.unaveraged(), update.alarms.clients
        if len(alarmed):
            state = self._rechosen(state, engine, alarmed, rng.at("alarmed"))
        state = update.averaged(state)
        silent = unseen & ~torch.zeros_like(unseen).index_fill(0, update.answered, True)
        state = replace(state, labels=torch.where(silent, -1, state.labels))
        if state.proposals:
            state = update.with_verdicts(state)
        elif has_news:
            state = update.with_kinds(state)
        if self.guard and state.num_clusters > 1:
            state = self._rechosen(with_misplaced(state, engine), engine, update.answered, rng.at("choose"))
            state = state if state.proposals else self._without_empty(state, engine)
        return state if state.proposals else self._with_comparisons(state, engine)

    def _with_comparisons(self, state: CoterieState, engine: Engine) -> CoterieState:
        """The state in which members of clusters that are due try mergers in the next round, if nothing is against it.

        In a round in which clients sign they try nothing, and at the end a merged cluster needs rounds to train.
        """
        following, last = engine.round + 1, engine.task.work.total_rounds or engine.round + 1 + REST
        if following + REST > last or self._signs_in(state, following, last):
            return state
        return with_comparisons(state, engine.round, engine.participation, self.bounds[0])

    def _without_empty(self, state: CoterieState, engine: Engine) -> CoterieState:
        """The state without clusters that all members have left, unless there would be too few."""
        sizes = torch.bincount(state.labels[state.labels >= 0], minlength=state.num_clusters)
        used = sizes > 0
        if bool(used.all()) or int(used.sum()) < self.bounds[0]:
            return state
        empty = (~used).nonzero().flatten().tolist()
        decision = Decision(round=engine.round, what="removed", clusters=empty)
        return replace(without(state, ~used), decisions=[*state.decisions, decision])

    def _signs_now(self, state: CoterieState, engine: Engine) -> bool:
        """Whether the members sign at their centers in this round."""
        return self._signs_in(state, engine.round, engine.task.work.total_rounds or engine.round + REST)

    def _signs_in(self, state: CoterieState, number: int, last: int) -> bool:
        """Whether the members sign at their centers in a round, of which `last` is the last."""
        since = number - state.signed_in
        if not state.signed_in or (since and number + REST > last):
            return False  # at the end there is no time left for new clusters
        if since == _AGAIN and state.num_clusters > 1 and state.doubt < _DOUBT * self.clear:
            return False  # the first look found kinds and left no doubt; the next one is later
        return since % _AGAIN == 0 and (since // _AGAIN + 1).bit_count() == 1

    def _train(
        self, state: CoterieState, engine: Engine, members: Tensor, is_signing: bool, rng: Rng
    ) -> Iterator[Chunk]:
        """Members train from their centers; those of a cluster whose cut is tried get a second model."""
        work, in_trial = self.work(engine), state.tried[members] >= 0
        others, some = members[~in_trial], members[in_trial]
        watching = {"watch": torch.ones(())} if self.guard and state.num_clusters > 1 else {}
        if self.vote:
            watching["vote"] = torch.ones(())
        payload = watching | ({"sign": self._by_class(engine)} if is_signing else {})
        finishing = self._finishing(state, engine)[state.labels[others]]
        for group, more in ((others[~finishing], {}), (others[finishing], {"finish": self._rounds_to_finish(engine)})):
            labels = state.labels[group]
            each = _told(state, labels) | {"balance": _balance(state, labels)}
            if not self._mixes_now(engine):
                del each["curve"]
            if len(group):
                yield from engine.call(
                    train_member,
                    group,
                    models=state.centers,
                    refs=labels,
                    payload=payload | more,
                    each=each,
                    work=work,
                    rng=rng,
                )
        if len(some):
            table = torch.cat([state.centers, state.trials])
            labels = state.labels[some]
            refs = torch.stack([labels, state.num_clusters + state.tried[some]], dim=1)
            each = _told(state, labels) | {"balance": _balance(state, labels)}
            yield from engine.call(
                try_member, some, models=table, refs=refs, payload=watching, each=each, work=work, rng=rng
            )

    def _mixes_now(self, engine: Engine) -> bool:
        """Whether clients compare mixes in this round: in some, which saves time, and in the last."""
        is_last = engine.round == engine.task.work.total_rounds
        return engine.round % _COMPARE == 0 or engine.participation < 1 or (is_last and self.serve == "own")

    def _finishing(self, state: CoterieState, engine: Engine) -> Tensor:
        """The clusters whose members finish their own models in this round, bool [K].

        In the last rounds, so that each client does so about once; and where own models have the larger share.
        """
        left = (engine.task.work.total_rounds or 0) - engine.round
        is_time = self.serve == "own" and 0 <= left < max(1, round(1 / engine.participation))
        prefer_own = mixes(state.curves.device)[state.curves.argmin(1), 0] >= _OWN
        return (prefer_own & is_time).cpu()

    def _rounds_to_finish(self, engine: Engine) -> Tensor:
        return torch.tensor(_FINISH * (engine.task.work.total_rounds or 0))

    def ending(self, rounds: int, participation: float) -> tuple[int, str] | None:
        """In the last rounds, personal models are finished and no new clusters are looked for."""
        return rounds + 1 - max(REST, round(1 / participation)), "coterie finishes personal models in the last rounds"

    def _by_class(self, engine: Engine) -> Tensor:
        return torch.tensor(float(self.signs_classes(engine)))

    # ---- clients that come later, and clients that change ----

    def _placed(self, state: CoterieState, engine: Engine, cohort: Tensor, rng: Rng) -> CoterieState:
        """The state in which the clients of a cohort have a cluster; clients that have not signed yet sign now."""
        if state.num_clusters == 1:
            state = replace(state, labels=state.labels.index_fill(0, cohort, 0))
        late = cohort[~has_signature(state)[cohort]]
        if not len(late) or state.signed_in in (0, engine.round):
            return state
        known = has_signature(state) & (state.labels >= 0)
        for chunk in self.sign(state, engine, late, rng.at("sign")):
            state = with_signatures(state, chunk)
        if state.num_clusters == 1 or not signatures_tell(replace(state, counts=state.counts * known.unsqueeze(1))):
            labels = torch.zeros_like(late) if state.num_clusters == 1 else _by_loss(state, engine, late, rng)
            return replace(state, labels=state.labels.index_copy(0, late, labels))
        there = known.to(state.signatures.device)
        members = Signatures.of(state.signatures[there], state.counts[known])
        new = late[has_signature(state)[late]]
        if not len(new):
            return state
        signed = Signatures(state.signatures[new.to(there.device)], state.counts[new].to(state.signatures))
        labels, doubt = signatures.nearest(signed, members, state.labels[known], state.num_clusters)
        lost = (labels < 0).nonzero().flatten()
        if len(lost):  # they share no class with any member
            labels[lost] = _by_loss(state, engine, new[lost], rng.at("lost"))
        pending = state.pending.index_copy(0, new, doubt)
        return replace(state, labels=state.labels.index_copy(0, new, labels), pending=pending)

    def sign(self, state: CoterieState, engine: Engine, clients: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Clients sign at the common model, of which they get a coarse copy."""
        coarse, scales = coarsened(state.common, engine.task.layout)
        payload = {"coarse": coarse, "scales": scales, "sign": self._by_class(engine)}
        return engine.call(sign_at, clients, payload=payload, rng=rng)

    def _rechosen(self, state: CoterieState, engine: Engine, answered: Tensor, rng: Rng) -> CoterieState:
        """Clients in doubt, and those whose loss has risen, choose anew; those who move are recorded."""
        after = replace(rechosen(self, state, engine, answered, rng), repairs=state.repairs)
        renewed = (after.signatures != state.signatures).flatten(1).any(1).cpu()
        after = without_signatures(after, renewed)  # these have no halves: the client signs again when it takes part
        moved = ((after.labels != state.labels) & (state.labels >= 0)).nonzero().flatten()
        if not len(moved):
            return after
        moves = [
            Move(client=engine.names[i], from_cluster=int(state.labels[i]), to_cluster=int(after.labels[i]))
            for i in moved.tolist()
        ]
        risen = int(state.alarmed[moved].sum())
        decision = Decision(round=engine.round, what="move", clusters=[], moves=moves, loss_rose=risen)
        tried = after.tried.index_fill(0, moved, -1)  # the cut that they were to try is not of their cluster
        return replace(after, tried=tried, decisions=[*after.decisions, decision])

    def assign(self, state: CoterieState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer signs and joins the cluster of the nearest signatures; if they do not tell, it chooses by loss."""
        if state.num_clusters == 1:
            return torch.zeros(len(newcomers), dtype=torch.int64)
        return find_clusters(self, state, engine, newcomers, rng).labels

    def personal(self, state: CoterieState, clients: Tensor) -> Personal:
        """The client's mix of its center and its own model, or with `serve=kind` its center."""
        plain = super().personal(replace(state, centers=state.served), clients)
        return plain if self.serve == "kind" else replace(plain, serve=served, each=_told(state, state.labels[clients]))


def _by_loss(state: CoterieState, engine: Engine, clients: Tensor, rng: Rng) -> Tensor:
    """The clusters that clients [n] choose by loss; one that does not answer keeps its own."""
    chosen = chosen_by_loss(state, engine, clients, rng)
    return torch.where(chosen < 0, state.labels[clients], chosen)


def _told(state: CoterieState, labels: Tensor) -> dict[str, Tensor]:
    """What the server tells members of these clusters [n]: label proportions [n, L] and losses of mixes [n, G]."""
    there = labels.clamp_min(0).to(state.centers.device)
    known = (labels >= 0).to(state.shares).unsqueeze(1)
    return {"shares": state.shares[there] * known, "curve": state.curves[there]}


def _balance(state: CoterieState, labels: Tensor) -> Tensor:
    """How far members of these clusters [n] take their label proportions out of training, [n]."""
    return balance_of(state.curves[labels.clamp_min(0).to(state.centers.device), 0], state.shares.shape[1])
