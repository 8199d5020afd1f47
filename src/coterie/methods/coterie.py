"""Coterie: finds the kinds of clients and their number, trains a model for each, and personalises it.

The method for clients of which nothing is known. It costs FedAvg's bytes and asks only the clients of a round's cohort.

1. For `warmup` rounds it is FedAvg: one center.
2. Then clients sign, once each: per class, the mean gradient of their samples at the center of that round, in two
   halves (`parts/kinds.py`). Gradients of two halves of one kind agree up to noise, and the noise is known. Kinds are
   groups of clients that differ beyond noise, and by so much that a model of their own is worth its smaller data. So
   the number of kinds is found; with IID clients or pure label skew it is one. A client that takes part for the first
   time later signs then, and joins the nearest kind.
3. In some later rounds clients sign at their own centers: a model that has learnt more shows smaller differences. A
   cluster with several kinds is cut, and its parts start from the means of their members' models.
4. A client whose held-out loss rises signs again and moves, or chooses a center by its loss (`parts/guard.py`).
5. Clients train with their label proportions taken out. Each is served with a mix of its center, adjusted to its label
   proportions, and the model that it trained last, as its held-out samples prefer (`parts/personal.py`).

Every decision is recorded with its evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Forms
from coterie.client.steps import Answer, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.engines.base import Chunk, Engine
from coterie.errors import ConfigError
from coterie.methods.base import ClusterState, Decision, Move, Personal, register
from coterie.methods.parts import signatures
from coterie.methods.parts.averaging import fits_in_memory
from coterie.methods.parts.centers import (
    REST,
    CenterState,
    SignedMethod,
    has_risen,
    has_signature,
    watched,
    without_signatures,
)
from coterie.methods.parts.guard import rechosen, with_misplaced
from coterie.methods.parts.halves import coarsened, halves_shape, restored, sign_at, signed_halves, signed_in_halves
from coterie.methods.parts.kinds import CLEAR, SURE, WORTH, Halves, Kinds, Limits, Noise, find_kinds
from coterie.methods.parts.personal import (
    NUM_MIXES,
    as_told,
    balance_of,
    choose_mix,
    compare_mixes,
    finish_own,
    label_prior,
    lengthened,
    mixes,
    served,
    train_balanced,
)
from coterie.methods.parts.signatures import Signatures
from coterie.methods.parts.start import by_signature, chosen_by_loss, find_clusters, signatures_tell
from coterie.methods.parts.vote import Votes
from coterie.randomness import Rng
from coterie.settings import setting

AUTO = "auto"
_MOST_CLUSTERS = 100
_BETTER = 1.0  # gain, in standard errors, that makes a tried cut
_FEWEST = 4  # members that must have tried it
_ENOUGH = 16  # clients that must have signed before kinds are looked for, or all
_AGAIN = 6  # rounds after the first signing in which clients sign again; then 18, 42, ...
_DOUBT = 0.75  # of `clear`: with less, the first look left no doubt; by chance z reaches half of it
_OWN = 0.5  # own models with at least this share are finished at the end ...
_FINISH = 0.25  # ... by this share of the run's work
_FEW = 10  # models: a center of fewer is served as a mean over rounds
_LARGE = 1e9  # in place of infinity, which JSON does not have
_COMPARE = 4  # rounds between two comparisons of mixes
_STRANGE, _SLACK = 4.0, 0.5  # a loss is strange if it is more than so many times the cluster's, plus this
_FADES = 0.5  # how much a cluster's past preference for mixes counts in a round


# ---- the client's half ----


def trained_member(asked: Asked) -> Forms:
    """A model; where they were asked for, losses of mixes, an alarm, and a signature."""
    found = forms.trained(asked) | forms.watched(asked)
    if {"shares", "curve"} <= asked.given.keys():
        found |= {"losses": asked.losses(NUM_MIXES, dtype=asked.dtype), "held": asked.samples("valid", "train")}
    return found | (signed_in_halves(asked) if "sign" in asked.given else {})


def tried_member(asked: Asked) -> Forms:
    """As `trained_member`, with losses of mixes with the second model."""
    return trained_member(asked) | {"tried": asked.losses(NUM_MIXES, dtype=asked.dtype)}


@client_step("coterie.coterie:train_member", trained_member)
def train_member(
    block: Block,
    models: Models,
    work: SGD,
    shares: Tensor | None = None,
    curve: Tensor | None = None,
    balance: Tensor | None = None,
    watch: Tensor | None = None,
    vote: Tensor | None = None,
    sign: Tensor | None = None,
    finish: Tensor | None = None,
) -> Answer:
    """Train the center and keep the result; before, watch its loss, and compare mixes on held-out samples.

    With `sign`, sign at the center; it is positive if classes are told apart. With `finish`, train the own model for so
    many rounds' worth of work more, and keep it where held-out samples prefer it.
    """
    found: dict[str, Tensor] = {}
    if shares is not None and curve is not None:
        losses, samples = compare_mixes(block, models, shares)
        choose_mix(block, losses, samples, curve)
        found |= {"losses": as_told(losses).to(models.table.dtype), "held": samples}
        if watch is not None:
            found["alarm"] = has_risen(block, losses[:, 0]) | is_strange(losses[:, 0], curve[:, 0])
        found |= watched(block, models, None, vote)  # the losses of mixes are adjusted to label proportions
    else:
        found |= watched(block, models, watch, vote)
    trained = train_balanced(block, models, work, shares, balance)
    if finish is not None and shares is not None and curve is not None:
        finish_own(block, models, lengthened(work, float(finish)), shares, curve)
    if sign is not None:  # at the same coarse model as clients that sign later
        layout = block.task.layout
        table = torch.stack([restored(*coarsened(row, layout), layout) for row in models.table])
        found |= signed_halves(block, Models(table, models.refs), bool(sign > 0))
    return Answer(params=trained, samples=block.samples, **found)


def is_strange(loss: Tensor, usual: Tensor) -> Tensor:
    """Whether a held-out loss [c] is far above that of the cluster [c]; a client that is seldom asked has no past."""
    return (usual > 0) & (loss > _STRANGE * usual + _SLACK)


@client_step("coterie.coterie:try_member", tried_member)
def try_member(block: Block, models: Models, work: SGD, shares: Tensor, curve: Tensor, balance: Tensor) -> Answer:
    """As `train_member`, with a second model: tell how it would do in place of the center, on held-out samples."""
    tried = Models(models.table, models.refs[:, 1])
    losses, _ = compare_mixes(block, tried, shares)
    found = train_member(block, Models(models.table, models.refs[:, 0]), work, shares, curve, balance)
    return Answer(**found, tried=as_told(losses).to(models.table.dtype))


# ---- the server's half ----


@dataclass(frozen=True)
class CoterieState(CenterState):
    """The clusters, the evidence for them, and the cuts that are tried."""

    of_clients: ClassVar[tuple[str, ...]] = (*CenterState.of_clients, "contrasts")

    contrasts: Tensor = field(default_factory=lambda: torch.empty(0))  # [N, L, D] differences of the signatures' halves
    shares: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, L] label proportions and weight; 0: unknown
    curves: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, G] mean held-out losses of mixes
    served: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, P] centers, as means over rounds if few answer
    behind: Tensor = field(default_factory=lambda: torch.empty(0))  # [K] models in the mean of a served center
    signed_in: int = 0  # the round at whose center clients sign; 0: not yet
    doubt: float = 0.0  # the largest z of a cut that was not made when clients last signed
    tried: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [N] rows of `trials`; -1: none
    trials: Tensor = field(default_factory=lambda: torch.empty(0))  # [T, P] centers of proposed parts
    proposals: list[Decision] = field(default_factory=list)  # the cuts that are tried in this round

    def with_more_clients(self, count: int) -> Self:
        """See `ClusterState`; new clients try no cut."""
        tried = torch.nn.functional.pad(self.tried, (0, count), value=-1)
        return replace(super().with_more_clients(count), tried=tried)


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
        update = _Update(self, state, engine, keep=has_news or bool(state.proposals))
        for chunk in self._train(state, engine, cohort[state.labels[cohort] >= 0], is_signing, rng):
            update.add(chunk)
        state = update.averaged()
        silent = unseen & ~torch.zeros_like(unseen).index_fill(0, update.answered, True)
        state = replace(state, labels=torch.where(silent, -1, state.labels))
        if state.proposals:
            state = update.with_verdicts(state)
        elif has_news:
            state = update.with_kinds(state)
        if not self.guard or state.num_clusters < 2:
            return state
        state = self._rechosen(with_misplaced(state, engine), engine, update.answered, rng.at("choose"))
        return state if state.proposals else self._without_empty(state, engine)

    def _without_empty(self, state: CoterieState, engine: Engine) -> CoterieState:
        """The state without clusters that all members have left, unless there would be too few."""
        sizes = torch.bincount(state.labels[state.labels >= 0], minlength=state.num_clusters)
        used = sizes > 0
        if bool(used.all()) or int(used.sum()) < self.bounds[0]:
            return state
        numbers = used.long().cumsum(0) - 1
        labels = torch.where(state.labels >= 0, numbers[state.labels.clamp_min(0)], state.labels)
        there = used.to(state.centers.device)
        empty = (~used).nonzero().flatten().tolist()
        decision = Decision(round=engine.round, what="removed", clusters=empty)
        return replace(
            state,
            centers=state.centers[there],
            served=state.served[there],
            behind=state.behind[there],
            curves=state.curves[there],
            shares=state.shares[there],
            labels=labels,
            decisions=[*state.decisions, decision],
        )

    def _signs_now(self, state: CoterieState, engine: Engine) -> bool:
        """Whether the members sign at their centers in this round."""
        since = engine.round - state.signed_in
        if not state.signed_in or (
            since and engine.round + REST > (engine.task.work.total_rounds or engine.round + REST)
        ):
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
        payload = {"watch": torch.ones(())} if self.guard and state.num_clusters > 1 else {}
        if self.vote:
            payload["vote"] = torch.ones(())
        if is_signing:
            payload["sign"] = self._by_class(engine)
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
            yield from engine.call(try_member, some, models=table, refs=refs, each=each, work=work, rng=rng)

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
            state = _with_signatures(state, chunk)
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


def _with_signatures(state: CoterieState, chunk: Chunk) -> CoterieState:
    """The state with the signatures of a chunk."""
    there = chunk.clients.to(state.signatures.device)
    return replace(
        state,
        signatures=state.signatures.index_copy(0, there, chunk.answer.signature.to(state.signatures)),
        contrasts=state.contrasts.index_copy(0, there, chunk.answer.contrast.to(state.contrasts)),
        counts=state.counts.index_copy(0, chunk.clients, chunk.answer.counts.cpu()),
    )


class _Update:
    """Collects one round."""

    def __init__(self, method: Coterie, state: CoterieState, engine: Engine, keep: bool) -> None:
        self._method, self._state, self._engine = method, state, engine
        self._average = method.mean_of(state.num_clusters, engine, like=state.centers)
        self._pending, self._alarmed = state.pending.clone(), state.alarmed.clone()
        self.answered = torch.empty(0, dtype=torch.int64)
        self._votes = Votes(state)
        self.keep = keep  # whether clients have signed, so that their models may be needed again
        self._fits = keep and fits_in_memory(engine.num_clients, engine)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []  # clients, models, weights
        self._fresh: list[Chunk] = []  # signatures at the clients' own centers
        self._verdicts: list[tuple[Tensor, Tensor, Tensor]] = []  # clients, losses of center and of part
        self._models = torch.zeros_like(state.behind)  # [K]
        self._losses = torch.zeros_like(state.curves, dtype=torch.float64)
        self._held = torch.zeros(state.num_clusters, dtype=torch.float64, device=state.curves.device)

    def add(self, chunk: Chunk) -> None:
        """Average the models of a chunk. A client whose loss has risen does not move its center."""
        state, clients, answer = self._state, chunk.clients, chunk.answer
        labels = state.labels[clients]
        alarm = answer.get("alarm")
        alarmed = torch.zeros(len(clients), dtype=torch.bool) if alarm is None else alarm.bool().cpu()
        self._pending[clients] |= alarmed
        self._alarmed[clients] |= alarmed
        weights = self._method.weights_of(chunk) * (~alarmed).to(self._engine.device)
        self._average.add(answer.params, labels, weights)
        self._models.index_add_(0, labels.to(self._models.device), (weights > 0).to(self._models))
        self.answered = torch.cat([self.answered, clients])
        self._votes.add(chunk, labels)
        if "losses" in answer:
            there, held = labels.to(self._held.device), answer.held.double()
            self._losses.index_add_(0, there, held.unsqueeze(1) * answer.losses.double())
            self._held.index_add_(0, there, held)
        if "tried" in answer:
            self._verdicts.append((clients, answer.losses.double().cpu(), answer.tried.double().cpu()))
        if self._fits:
            self._kept.append((clients, answer.params, weights))
        if "signature" in answer and state.signed_in == self._engine.round:
            self._state = _with_signatures(state, chunk)
        elif "signature" in answer:
            self._fresh.append(chunk)

    def averaged(self) -> CoterieState:
        """The state after the round, before kinds are looked for."""
        state = self._state
        seen = self._held > 0
        mean = (self._losses / self._held.clamp_min(1e-9).unsqueeze(1)).to(state.curves)
        known = (state.curves != 0).any(1, keepdim=True)
        blend = torch.where(known, _FADES * state.curves + (1 - _FADES) * mean, mean)
        found = self._votes.changes(self._average.means(keep=state.centers))
        centers: Tensor = found["centers"]
        behind = torch.minimum(state.behind + self._models, torch.clamp_min(self._models, _FEW))
        rate = (self._models / behind.clamp_min(1)).unsqueeze(1)
        after = replace(
            state,
            **found,
            served=torch.lerp(state.served, centers, rate),
            behind=behind,
            pending=self._pending,
            alarmed=self._alarmed,
            curves=torch.where(seen.unsqueeze(1), blend, state.curves),
            sent_in_rounds=state.sent_in_rounds + 2 * len(self.answered),
        )
        return _with_shares(after)

    def with_kinds(self, state: CoterieState) -> CoterieState:
        """Cut each cluster in which there are surely several kinds; propose a cut where there may be."""
        method, before = self._method, state.num_clusters
        low, high = method.bounds
        most = _MOST_CLUSTERS if high is None else high
        doubt = 0.0
        looks = [self._evidence(state, cluster) for cluster in range(before)]
        noise = Noise.of(Halves.joined([found for _, found in looks]))
        for cluster, (members, found) in enumerate(looks):
            if len(members) < (min(_ENOUGH, self._engine.num_clients) if before == 1 else 2):
                continue
            room = most - state.num_clusters + 1
            least = min(low, len(members)) if before == 1 else 1
            limits = Limits(method.clear, max(SURE, method.worth), least=least, most=max(1, room))
            keys = self._engine.keys[members]
            kinds = find_kinds(found, noise, keys, limits)
            state, proposed = self._cut(state, cluster, members, kinds), len(state.proposals)
            for part in range(kinds.count):
                inside = (kinds.labels == part).nonzero().flatten()
                number = int(state.labels[members[inside[0]]])
                limits = Limits(
                    method.clear, method.worth, most=max(1, most - state.num_clusters - len(state.trials) + 1)
                )
                if self._can_try(inside):
                    finer = find_kinds(found.at(inside), noise, keys[inside], limits)
                    state = self._proposed(state, number, members[inside], finer)
                    doubt = max(doubt, finer.last)
            if kinds.count == 1 and len(state.proposals) == proposed and room > 1 and self._is_look:
                nearly = find_kinds(found, noise, keys, Limits(method.clear, method.worth, least=2, most=2))
                state = self._decided(state, "refused", [cluster], nearly)
        return _with_shares(replace(state, doubt=min(doubt, _LARGE)))

    @property
    def _is_look(self) -> bool:
        """Whether all members were to sign in this round, not only those who came later."""
        return bool(self._fresh) or self._state.signed_in == self._engine.round

    def _can_try(self, members: Tensor) -> bool:
        """Whether enough of these members can be expected to try a cut in the next round."""
        is_last = self._engine.round == self._engine.task.work.total_rounds
        return bool(self._kept) and not is_last and len(members) * self._engine.participation >= _FEWEST

    def _proposed(self, state: CoterieState, cluster: int, members: Tensor, kinds: Kinds) -> CoterieState:
        """The state in which the members of a cluster try a cut in the next round, if there is one to try."""
        if kinds.count < 2:
            return state
        parts = torch.full_like(state.labels, -1).index_copy(0, members, kinds.labels)
        average = self._method.mean_of(kinds.count, self._engine, like=state.centers)
        for clients, models, weights in self._kept:
            inside = (parts[clients] >= 0).to(weights)
            average.add(models, parts[clients].clamp_min(0), weights * inside)
        centers = average.means(keep=state.centers[cluster].expand(kinds.count, -1))
        tried = state.tried.index_copy(0, members, len(state.trials) + kinds.labels)
        state = self._decided(state, "proposed", [cluster], kinds)
        proposals = [*state.proposals, state.decisions[-1]]
        return replace(state, tried=tried, trials=torch.cat([state.trials, centers]), proposals=proposals)

    def with_verdicts(self, state: CoterieState) -> CoterieState:
        """Cut the clusters whose members do better with their parts, by what they would be served with."""
        proposals, tried = state.proposals, state.tried
        none = torch.full_like(tried, -1)
        state = replace(state, proposals=[], tried=none, trials=state.trials[:0])
        if not self._verdicts:
            for proposal in proposals:
                state = self._decided(state, "refused", proposal["clusters"], _as_kinds(proposal))
            return state
        clients, center, part = (torch.cat(parts) for parts in zip(*self._verdicts, strict=True))
        if self._method.serve == "kind":
            center, part = center[:, :1], part[:, :1]
        for proposal in proposals:
            cluster = proposal["clusters"][0]
            mine = state.labels[clients] == cluster
            gains = center[mine][:, center[mine].mean(0).argmin()] - part[mine][:, part[mine].mean(0).argmin()]
            t = t_value(gains)
            members = ((state.labels == cluster) & (tried >= 0)).nonzero().flatten()
            _, parts = tried[members].unique(return_inverse=True)
            kinds = Kinds(parts, proposal["z"], proposal["q"])
            if t >= _BETTER:
                state = self._cut(state, cluster, members, kinds)
            else:
                state = self._decided(state, "refused", [cluster], kinds)
            state.decisions[-1]["t"] = round(t, 2)
        return _with_shares(state)

    def _evidence(self, state: CoterieState, cluster: int) -> tuple[Tensor, Halves]:
        """The members of a cluster that have signed [m], and their signatures: fresh ones, if there are any.

        A client whose loss has risen may have changed its kind, which is no reason to cut its cluster.
        """
        if not self._fresh:
            members = ((state.labels == cluster) & has_signature(state) & ~state.alarmed).nonzero().flatten()
            there = members.to(state.signatures.device)
            return members, Halves.of(state.signatures[there], state.contrasts[there], state.counts[members])
        clients = torch.cat([chunk.clients for chunk in self._fresh])
        mine = (state.labels[clients] == cluster) & ~state.alarmed[clients]
        rows, contrasts, counts = (
            torch.cat([chunk.answer[name] for chunk in self._fresh])[mine.to(state.centers.device)]
            for name in ("signature", "contrast", "counts")
        )
        return clients[mine], Halves.of(rows.to(state.signatures), contrasts.to(state.signatures), counts)

    def _cut(self, state: CoterieState, cluster: int, members: Tensor, kinds: Kinds) -> CoterieState:
        """Make a cluster of each kind; the largest keeps the number, and members that gave no evidence."""
        if kinds.count < 2:
            return state
        order = kinds.labels.bincount(minlength=kinds.count).argsort(descending=True, stable=True)
        numbers = torch.cat([torch.tensor([cluster]), state.num_clusters + torch.arange(kinds.count - 1)])
        number_of = torch.empty_like(numbers).index_copy(0, order, numbers)  # of each kind
        labels = state.labels.index_copy(0, members, number_of[kinds.labels])
        parent = state.centers[cluster].unsqueeze(0)
        centers = torch.cat([state.centers, parent.expand(kinds.count - 1, -1)])
        if self._kept:
            average = self._method.mean_of(len(centers), self._engine, like=centers)
            for clients, models, weights in self._kept:
                inside = (state.labels[clients] == cluster).to(weights.device)
                average.add(models, labels[clients], weights * inside)
            centers = torch.cat([centers[: len(state.centers)], average.means(keep=centers)[len(state.centers) :]])
            centers[cluster] = average.means(keep=centers)[cluster]
        more = torch.full((kinds.count - 1,), cluster, device=centers.device)
        state = replace(
            state,
            centers=centers,
            served=torch.cat([state.served, centers[len(state.centers) :]]).index_copy(0, more[:1], centers[more[:1]]),
            behind=torch.cat([state.behind, state.behind.new_zeros(len(more))]).index_fill(0, more[:1], 0),
            labels=labels,
            curves=torch.cat([state.curves, state.curves[more]]),
        )
        doubt = by_signature(state)[1] & (labels >= 0)  # they choose by loss
        inside = torch.zeros_like(doubt).index_fill(0, members, True)
        return self._decided(replace(state, pending=state.pending | (doubt & inside)), "cut", numbers.tolist(), kinds)

    def _decided(self, state: CoterieState, what: str, clusters: list[int], kinds: Kinds) -> CoterieState:
        sizes = sorted(kinds.labels.bincount().tolist(), reverse=True)
        by = "centers" if self._fresh else "common model"
        decision = Decision(
            round=self._engine.round,
            what=what,
            clusters=clusters,
            sizes=sizes,
            z=min(kinds.z, _LARGE),
            q=min(kinds.q, _LARGE),
            signed_at=by,
        )
        return replace(state, decisions=[*state.decisions, decision])


def _as_kinds(proposal: Decision) -> Kinds:
    """The parts of a proposal that nobody tried."""
    sizes = torch.tensor(proposal["sizes"])
    return Kinds(torch.arange(len(sizes)).repeat_interleave(sizes), proposal["z"], proposal["q"])


def t_value(gains: Tensor) -> float:
    """The mean of paired gains [n] in standard errors; 0 if there are too few."""
    if len(gains) < _FEWEST or float(gains.std()) <= 0:
        return 0.0
    return float(gains.mean() / gains.std() * len(gains) ** 0.5)


def _with_shares(state: CoterieState) -> CoterieState:
    """The state with the label proportions of its clusters, as far as their members have signed."""
    shares = torch.stack([label_prior(state.counts[state.labels == k]) for k in range(state.num_clusters)])
    return replace(state, shares=shares.to(state.shares)[:, : state.shares.shape[1]])
