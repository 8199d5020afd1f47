"""MD-ICFL: iterative clustering by model distance on pseudo data (Zhang, Zhang, Cheng, Bao, Cao, Jiang, Xu 2024,
"Communication-efficient clustered federated learning via model distance", Machine Learning).

In a round the server generates pseudo data from every center (inputs that the center classifies as class k), clients
train from their center, and client i is assigned to the center j with the least

    d_ij = sum_k p_i(k) * mean over pseudo samples x of class k of || softmax(h(W_i; x)) - softmax(h(center_j; x)) ||_1

where p_i is its label distribution: how much the two models disagree on the classes that the client has. Weak privacy
(Algorithm 1): the client sends its label counts once. Strong privacy (Algorithm 2): the server sends the class-wise
distances [K, L], and the client answers with the index of the nearest center. A client downloads one model per round.

`sampler="search"` is MD-ICFL-1, `"generator"` MD-ICFL-2. `init="paper"`: random centers and labels; `"warm"` starts
from a clustering of first models, which small data need: a random partition reinforces itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.client.block import Block, Models
from coterie.client.steps import Answer, client_step, label_counts
from coterie.client.task import Task
from coterie.client.work import SGD
from coterie.data.pictures import is_picture, to_shades
from coterie.engines.base import Chunk, Engine
from coterie.errors import ConfigError
from coterie.methods.base import Personal, register
from coterie.methods.parts.averaging import add_answers
from coterie.methods.parts.centers import CenterMethod, CenterState, RoundUpdate
from coterie.methods.parts.clustering import CenterSums
from coterie.methods.parts.guard import guarded
from coterie.methods.parts.pseudo import class_distances, generate, probabilities, search
from coterie.methods.parts.start import clustered_start, random_start
from coterie.randomness import Rng
from coterie.settings import setting

_SHOWN_SAMPLES = 16  # pseudo samples per center and class that the confusion map averages
_SHOWN_PICTURES = 3  # of them kept as pictures


@client_step("coterie.algorithms.md_icfl:train_only")
def train_only(block: Block, models: Models, work: SGD) -> Answer:
    """Train the received model, and send nothing but the model."""
    return Answer(params=block.train(models, work))


@client_step("coterie.algorithms.md_icfl:nearest")
def nearest(block: Block, models: Models | None, work: SGD, distances: Tensor) -> Answer:
    """The nearest center by the client's label distribution: distances [c, K, L] -> argmin [c]."""
    return Answer(choice=weighted(distances, block.label_counts()).argmin(1))


def weighted(distances: Tensor, counts: Tensor) -> Tensor:
    """Class-wise distances [c, K, L] weighted by label counts [c, L]: [c, K]."""
    share = counts.to(distances) / counts.sum(1, keepdim=True).clamp_min(1)
    return (distances * share.unsqueeze(1)).sum(2)


@dataclass(frozen=True)
class MDICFLState(CenterState):
    """The centers, and under weak privacy the clients' label counts."""

    of_clients: ClassVar[tuple[str, ...]] = (*CenterState.of_clients, "counts")

    counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [N, L], weak privacy only
    samples: Tensor = field(default_factory=lambda: torch.empty(0))  # [K, L, M, ...], search_from=last_round only


@register
@dataclass(frozen=True)
class MDICFL(CenterMethod[MDICFLState]):
    """K centers; a client joins the one whose predictions agree most with its own on the classes it has."""

    key: ClassVar[str] = "md_icfl"
    paper: ClassVar[str] = "Zhang et al. 2024"
    state_type: ClassVar[type[CenterState]] = MDICFLState

    weighting: Literal["equal"] = setting(
        "equal", "weight of a client in its cluster's mean; always equal, since clients do not send sample counts"
    )
    sampler: Literal["search", "generator"] = setting("search", "how pseudo data are generated: MD-ICFL-1 or MD-ICFL-2")
    privacy: Literal["weak", "strong"] = setting("weak", "send label counts once, or only the nearest center's index")
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
        begin = random_start if self.init == "paper" else clustered_start
        return begin(self, self.empty_state(engine), engine, rng)

    def round(self, state: MDICFLState, engine: Engine, cohort: Tensor, rng: Rng) -> MDICFLState:
        """Generate pseudo data, train, assign to the center at the least model distance, average."""
        state = self._with_counts(state, engine, cohort, rng)
        x, predictions = self.pseudo(state, engine, rng.at("prepare"))
        state = self.with_samples(state, x)
        update = RoundUpdate(self, state, engine)
        for chunk in self.train(state, engine, cohort, rng.at("train")):
            hints = self.hints(chunk.clients, state.counts, state.labels)
            distances = class_distances(engine.forward, chunk.answer.params, predictions, x, **hints)  # [c, K, L]
            update.add(chunk, self.nearest(distances, chunk.clients, state.counts, engine, rng))
        return guarded(self, state, update, engine, rng)

    def pseudo(self, state: MDICFLState, engine: Engine, rng: Rng) -> tuple[Tensor, Tensor]:
        """Pseudo data of every center [K, L, M, ...], and its own predictions on them [K, L, M, L]."""
        if not engine.task.num_classes:
            raise ConfigError("MD-ICFL generates pseudo data of classes; these data have none.")
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

    def hints(self, clients: Tensor, counts: Tensor, labels: Tensor) -> dict[str, Any]:
        """What `class_distances` may use to skip work: under weak privacy the label counts, and the old labels."""
        if self.privacy == "strong":
            return {}
        return {"counts": counts[clients], "likely": labels[clients]}

    def nearest(self, distances: Tensor, clients: Tensor, counts: Tensor, engine: Engine, rng: Rng) -> Tensor:
        """The nearest center [c] by class-wise distances [c, K, L]; -1 where it is not known.

        Weak privacy: the server weights them by label counts. Strong: the client does, and answers with the index.
        """
        if self.privacy == "weak":
            own = counts[clients].to(engine.device)
            chosen = weighted(distances, own).argmin(1)
            # Without label counts all centers are at distance 0: the client keeps its label.
            return torch.where(own.sum(1) > 0, chosen, -1).cpu()
        # A client that does not answer the second call keeps its label.
        chosen = torch.full((len(clients),), -1, dtype=torch.int64)
        for chunk in engine.call(nearest, clients, each={"distances": distances}, rng=rng.at("nearest")):
            chosen[chunk.positions] = chunk.answer.choice.cpu()
        return chosen

    def assign(self, state: MDICFLState, engine: Engine, newcomers: Tensor, rng: Rng) -> Tensor:
        """A newcomer trains once from the common model and is assigned as in a round."""
        labels = torch.full((len(newcomers),), -1, dtype=torch.int64)
        counts = self._asked_counts(engine, newcomers, rng.at("met"))
        x, predictions = self.pseudo(state, engine, rng.at("prepare"))
        for chunk in self.train_from_common(state, engine, newcomers, rng.at("train")):
            distances = class_distances(engine.forward, chunk.answer.params, predictions, x)
            labels[chunk.positions] = self.nearest(distances, chunk.clients, counts, engine, rng)
        return labels

    def _with_counts(self, state: MDICFLState, engine: Engine, cohort: Tensor, rng: Rng) -> MDICFLState:
        """Under weak privacy, ask new clients for their label counts, and again those that did not answer."""
        if self.privacy == "weak":
            silent = cohort[(state.labels[cohort] >= 0) & (state.counts[cohort].sum(1) == 0)]
            state = self.joined(state, engine, silent, rng.at("met again")) if len(silent) else state
        unknown = cohort[state.labels[cohort] < 0]
        return self.joined(state, engine, unknown, rng.at("met")) if len(unknown) else state

    def joined(self, state: MDICFLState, engine: Engine, clients: Tensor, rng: Rng) -> MDICFLState:
        """Under weak privacy a client sends its label counts, once."""
        if self.privacy == "strong":
            return state
        known = state.counts if len(state.counts) == engine.num_clients else None
        return replace(state, counts=self._asked_counts(engine, clients, rng, known))

    def _asked_counts(self, engine: Engine, clients: Tensor, rng: Rng, known: Tensor | None = None) -> Tensor:
        """Label counts of all clients [N, L], after asking `clients`; zeros where not known."""
        if known is None:
            known = torch.zeros(engine.num_clients, max(1, engine.task.num_classes), dtype=torch.int64)
        counts = known.clone()
        if self.privacy == "weak":
            for chunk in engine.call(label_counts, clients, rng=rng):
                counts[chunk.clients] = chunk.answer.counts.cpu()
        return counts

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

    def train_from(self, state: MDICFLState, engine: Engine, cohort: Tensor, rows: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Clients send nothing but models."""
        table = torch.cat([state.centers, state.common.unsqueeze(0)])
        return engine.call(train_only, cohort, models=table, refs=rows, work=self.work(engine), rng=rng)

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
