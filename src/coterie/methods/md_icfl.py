"""MD-ICFL: iterative clustering by model distance on pseudo data (Zhang, Zhang, Cheng, Bao, Cao, Jiang, Xu 2024,
"Communication-efficient clustered federated learning via model distance", Machine Learning).

In a round the server generates pseudo data from every center (inputs that the center classifies as class k), clients
train from their center, and client i is assigned to the center j with the least

    d_ij = sum_k p_i(k) * mean over pseudo samples x of class k of || softmax(h(W_i; x)) - softmax(h(center_j; x)) ||_1

where p_i is its label distribution: how much the two models disagree on the classes that the client has. Weak privacy
(Algorithm 1): the client sends its label counts. Strong privacy (Algorithm 2): the server sends the class-wise
distances [K, L], and the client answers with the index of the nearest center. A client downloads one model per round.

Deviation, with its reason: `rule="balanced"`. A client with many samples of one class soon predicts that class for
everything, so on pseudo samples of this class it agrees with every center, and the paper's p_i gives exactly this class
the largest weight. The classes of which it holds a few samples tell the centers apart. So all classes that a client
holds count the same, and it moves only to a center that is clearly nearer. `rule="plain"` is the paper's.

`sampler="search"` is MD-ICFL-1, `"generator"` MD-ICFL-2. `init="paper"`: random centers and labels; `"warm"` starts
from a clustering of first models, which small data need: a random partition reinforces itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.client import forms
from coterie.client.block import Block, Models
from coterie.client.forms import Asked, Forms
from coterie.client.steps import Answer, ClientStep, clearly_lowest, client_step
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.pictures import is_picture, to_shades
from coterie.engines.base import Chunk, Engine
from coterie.methods.base import Personal, register
from coterie.methods.parts.averaging import add_answers
from coterie.methods.parts.centers import CenterMethod, CenterState, RoundUpdate, watched
from coterie.methods.parts.clustering import CenterSums
from coterie.methods.parts.guard import guarded
from coterie.methods.parts.pseudo import class_distances, generate, probabilities, search
from coterie.methods.parts.start import find_clusters, placed, random_start, warm_start
from coterie.randomness import Rng
from coterie.settings import setting

_SHOWN_SAMPLES = 16  # pseudo samples per center and class that the confusion map averages
_SHOWN_PICTURES = 3  # of them kept as pictures


@client_step("coterie.algorithms.md_icfl:train_only", lambda asked: forms.model(asked) | forms.watched(asked))
def train_only(
    block: Block, models: Models, work: SGD, watch: Tensor | None = None, vote: Tensor | None = None
) -> Answer:
    """Train the received model, and send nothing but the model (and what `watched` says of its loss)."""
    return Answer(**watched(block, models, watch, vote), params=block.train(models, work))


def counted(asked: Asked) -> Forms:
    """A model and label counts."""
    counts = asked.label_counts(asked.task.num_classes)
    return forms.model(asked) | forms.watched(asked) | {"counts": counts}


@client_step("coterie.algorithms.md_icfl:train_and_count", counted)
def train_and_count(
    block: Block, models: Models, work: SGD, watch: Tensor | None = None, vote: Tensor | None = None
) -> Answer:
    """As `train_only`, with the label counts of now: a client's data may change."""
    return Answer(**train_only(block, models, work, watch, vote), counts=block.label_counts())


def placed_by_distance(asked: Asked) -> Forms:
    """One of the centers whose distances were sent."""
    return {"choice": asked.choice(len(asked.given["distances"]))}


@client_step("coterie.algorithms.md_icfl:nearest", placed_by_distance)
def nearest(block: Block, models: Models | None, work: SGD, distances: Tensor, own: Tensor | None = None) -> Answer:
    """The nearest center by the client's label counts: distances [c, K, L], and its present center `own` [c]."""
    return Answer(choice=nearest_center(distances, block.label_counts(), own))


def nearest_center(distances: Tensor, counts: Tensor, own: Tensor | None) -> Tensor:
    """The center [c] of clients with class-wise distances [c, K, L], label counts [c, L] and present centers [c].

    Balanced: every class that the client holds counts the same, and it moves only to a clearly nearer center. Without
    `own` the plain rule: classes count by their share, and the least distance wins.
    """
    weights = class_weights(counts, "plain" if own is None else "balanced").to(distances)
    found = (distances * weights.unsqueeze(1)).sum(2) / weights.sum(1, keepdim=True).clamp_min(1)  # [c, K]
    return clearly_lowest(found, own)


def class_weights(counts: Tensor, rule: str) -> Tensor:
    """How much each class counts for clients with label counts [c, L]."""
    return counts if rule == "plain" else (counts > 0).to(counts.dtype)


@dataclass(frozen=True)
class MDICFLState(CenterState):
    """The centers, and their last pseudo data."""

    samples: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, L, M, ...], search_from=last_round only


@register
@dataclass(frozen=True)
class MDICFL(CenterMethod[MDICFLState]):
    """K centers; a client joins the one whose predictions agree most with its own on the classes it has."""

    key: ClassVar[str] = "md_icfl"
    paper: ClassVar[str] = "Zhang et al. 2024"
    needs_classes: ClassVar[bool] = True
    state_type: ClassVar[type[CenterState]] = MDICFLState

    weighting: Literal["equal", "samples"] = setting(
        "samples", "weight of a client in its cluster's mean; under strong privacy always equal"
    )
    sampler: Literal["search", "generator"] = setting("search", "how pseudo data are generated: MD-ICFL-1 or MD-ICFL-2")
    privacy: Literal["weak", "strong"] = setting("weak", "send label counts, or only the nearest center's index")
    rule: Literal["balanced", "plain"] = setting(
        "balanced",
        "how a client's classes count in its distance to a center: all it holds alike, and it moves only to a clearly "
        "nearer center; or by their share of its samples, as in the paper",
    )
    pseudo_samples: int = setting(30, "pseudo samples per center and class (M)", ge=1)
    iterations: int | None = setting(None, "iterations of the sampler; by default 100, for the generator 1,000", ge=1)
    search_from: Literal["noise", "last_round"] | None = setting(
        None,
        "where a round's search starts: new noise, or the samples of the last round; by default last_round, "
        "with init=paper noise",
    )
    refresh: int = setting(5, "iterations of a search from the samples of the last round", ge=1)
    prior_weight: float = setting(0.1, "weight of the prior on pseudo samples (lambda)", ge=0)
    prior_mean: float = setting(0.0, "prior mean of the inputs (mu): 0 for pixels in [-1, 1]", ge=-100, le=100)
    witness_rounds: int = setting(
        0, "rounds of training fresh models that classify the pseudo data at the end (Figs. 5 and 6)", ge=0
    )

    def start(self, task: Task, engine: Engine, rng: Rng) -> MDICFLState:
        """Cluster first models; in the paper K random centers and random labels."""
        begin = random_start if self.init == "paper" else warm_start
        return begin(self, self.empty_state(engine), engine, rng)

    def round(self, state: MDICFLState, engine: Engine, cohort: Tensor, rng: Rng) -> MDICFLState:
        """Generate pseudo data, train, assign to the center at the least model distance, average."""
        state = placed(self, state, engine, cohort, rng)
        x, predictions = self.pseudo(state, engine, rng.at("prepare"))
        state = self.with_samples(state, x)
        update = RoundUpdate(self, state, engine)
        for chunk in self.train(state, engine, cohort, rng.at("train")):
            hints = self.hints(chunk, state.labels)
            distances = class_distances(engine.forward, chunk.answer.params, predictions, x, **hints)  # [c, K, L]
            update.add(chunk, self.nearest(distances, chunk, state.labels, engine, rng))
        return guarded(self, state, update, engine, rng)

    def pseudo(self, state: MDICFLState, engine: Engine, rng: Rng) -> tuple[Tensor, Tensor]:
        """Pseudo data of every center [K, L, M, ...], and its own predictions on them [K, L, M, L]."""
        x = self.pseudo_data(state, engine, rng, self.pseudo_samples)
        return x, probabilities(engine.forward, state.centers, x)

    def with_samples(self, state: MDICFLState, x: Tensor) -> MDICFLState:
        """The state with a round's pseudo data, if the next search starts from them."""
        return replace(state, samples=x) if self._goes_on else state

    @property
    def _goes_on(self) -> bool:
        """Whether a search starts from the samples of the last round.

        Not from the paper's random centers: they change much in a round, and samples of the last round then confirm
        the old labels.
        """
        wanted = self.search_from or ("noise" if self.init == "paper" else "last_round")
        return self.sampler == "search" and wanted == "last_round"

    def hints(self, chunk: Chunk, labels: Tensor) -> dict[str, Any]:
        """What `class_distances` may use to skip work: under weak privacy the label counts, and the old labels."""
        if self.privacy == "strong":
            return {}
        return {"counts": class_weights(chunk.answer.counts, self.rule), "likely": labels[chunk.clients]}

    def nearest(self, distances: Tensor, chunk: Chunk, labels: Tensor, engine: Engine, rng: Rng) -> Tensor:
        """The nearest center [c] by class-wise distances [c, K, L]; -1 where it is not known.

        Weak privacy: the server weights them by label counts. Strong: the client does, and answers with the index.
        """
        own = None if self.rule == "plain" else labels[chunk.clients].to(engine.device)
        if self.privacy == "weak":
            return nearest_center(distances, chunk.answer.counts, own).cpu()
        # A client that does not answer the second call keeps its label.
        chosen = torch.full((len(chunk.clients),), -1, dtype=torch.int64)
        each = {"distances": distances} if own is None else {"distances": distances, "own": own}
        for reply in engine.call(nearest, chunk.clients, each=each, rng=rng.at("nearest")):
            chosen[reply.positions] = reply.answer.choice.cpu()
        return chosen

    def assign(self, state: MDICFLState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer signs and joins the cluster of the nearest signatures; if they do not tell, it chooses by loss."""
        return find_clusters(self, state, engine, newcomers, rng).labels

    def member_step(self, state: MDICFLState, engine: Engine) -> tuple[ClientStep, dict[str, Tensor]]:
        """Clients send their model, and under weak privacy their label counts."""
        return (train_only if self.privacy == "strong" else train_and_count), {}

    def weights_of(self, chunk: Chunk) -> Tensor:
        """By samples where label counts are sent."""
        counts = chunk.answer.get("counts")
        if counts is None or self.weighting == "equal":
            return torch.ones(len(chunk.clients), device=chunk.answer.params.device)
        return counts.sum(1)

    def signs_classes(self, engine: Engine) -> bool:
        """Under strong privacy nothing about classes leaves a client."""
        return self.privacy == "weak" and super().signs_classes(engine)

    def pseudo_data(self, state: MDICFLState, engine: Engine, rng: Rng, samples: int) -> Tensor:
        """Pseudo data of every center: [K, L, samples, ...]."""
        make = search if self.sampler == "search" else generate
        more: dict[str, Any] = {} if self.iterations is None else {"iterations": self.iterations}
        wanted = (len(state.centers), engine.task.num_classes, samples, *engine.task.input_shape)
        last = state.samples[:, :, :samples] if state.samples.dim() == len(wanted) else state.samples
        # After a repair a center is another model, and samples of the old one would speak for it.
        repaired = state.repaired_in >= engine.round - 1
        if self._goes_on and last.shape == wanted and not repaired:
            more |= {"start": last, "iterations": self.refresh}
        return make(
            engine.forward,
            state.centers,
            engine.task.num_classes,
            engine.task.input_shape,
            rng,
            samples=samples,
            prior_weight=self.prior_weight,
            prior_mean=self.prior_mean,
            **more,
        )

    def exhibits(self, state: MDICFLState, engine: Engine, rng: Rng) -> dict[str, NDArray[Any]]:
        """Pseudo samples of the last centers (Fig. 7) and how models classify them (Figs. 5 and 6).

        `told` [K, K, L, L]: the mean prediction of center i on center j's samples of class k. `witness` [K, L, L]: that
        of a fresh model trained by the clients of cluster j; only with `witness_rounds`.
        """
        x = self.pseudo_data(state, engine, rng.at("pseudo"), min(self.pseudo_samples, _SHOWN_SAMPLES))

        def mean_predictions(models: Tensor, inputs: Tensor) -> Tensor:
            """Models [i, P], inputs [L, M, ...] -> [i, L, L]."""
            outputs = engine.forward(models, inputs.flatten(0, 1)).softmax(-1)
            return outputs.reshape(len(models), *inputs.shape[:2], -1).mean(2)

        found = {"told": torch.stack([mean_predictions(state.centers, own) for own in x]).float().cpu().numpy()}
        if is_picture(x.shape[3:]):
            found["pseudo"] = to_shades(x[:, :, :_SHOWN_PICTURES])
        if self.witness_rounds:
            new = self._witnesses(state, engine, rng.at("witness"))
            rows = [mean_predictions(new[j : j + 1], own)[0] for j, own in enumerate(x)]
            found["witness"] = torch.stack(rows).float().cpu().numpy()
        return found

    def _witnesses(self, state: MDICFLState, engine: Engine, rng: Rng) -> Tensor:
        """A fresh model per cluster, trained by its members from random weights: [K, P]."""
        drawn = [engine.task.draw(rng.at("model", k)) for k in range(self.num_clusters)]
        models = torch.stack(drawn).to(engine.device, engine.dtype)
        members = (state.labels >= 0).nonzero().flatten()
        for number in range(self.witness_rounds):
            refs, work = state.labels[members], self.work(engine)
            sums = CenterSums(self.num_clusters, like=models)
            chunks = engine.call(train_only, members, models=models, refs=refs, work=work, rng=rng.at(number))
            add_answers(sums, chunks, state.labels)
            models = sums.means(keep=models)
        return models

    def personal(self, state: MDICFLState, clients: Tensor) -> Personal:
        """The center; under strong privacy the client computes its scores, and losses stay with it."""
        return replace(super().personal(state, clients), private=self.privacy == "strong")
