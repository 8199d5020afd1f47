"""MD-ICFL: iterative clustering by model distance on pseudo data (Zhang, Zhang, Cheng, Bao, Cao, Jiang, Xu 2024,
"Communication-efficient clustered federated learning via model distance", Machine Learning).

In a round the server makes pseudo data from every center (what the center calls class k), clients train from
their own center, and client i goes to the center j with the least

    d_ij = sum_k p_i(k) * mean over pseudo samples x of class k of || softmax(h(W_i; x)) - softmax(h(center_j; x)) ||_1

where p_i is its label distribution: how differently the two models speak about what the client has. Weak privacy
(Algorithm 1): the client sends its label counts once. Strong privacy (Algorithm 2): the server sends the class-wise
distances [K, L], and only the index of the nearest center comes back. One model goes down per client and round.

`sampler="search"` is MD-ICFL-1, `"generator"` MD-ICFL-2. `init="paper"`: random centers, random labels; `"warm"`
starts from a clustering of first models, which small data need: a random partition feeds itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.client.block import Answer, Block, Models, client_step, label_counts
from coterie.client.work import SGD
from coterie.data.pictures import is_picture, to_shades
from coterie.engines.base import Chunk, Engine
from coterie.errors import ConfigError
from coterie.methods.base import Personal, register
from coterie.methods.parts.centers import CenterMethod, CenterState
from coterie.methods.parts.clustering import CenterSums
from coterie.methods.parts.pseudo import class_distances, generate, probabilities, search
from coterie.randomness import Rng
from coterie.settings import setting

_SHOWN_SAMPLES = 16  # pseudo samples of each center and class that the confusion map is a mean of
_SHOWN_PICTURES = 3  # of them that are kept as pictures


@client_step("coterie.algorithms.md_icfl:train_only")
def train_only(block: Block, models: Models, work: SGD) -> Answer:
    """Train the model that was sent, and send nothing but the model."""
    return Answer(params=block.train(models, work))


@client_step("coterie.algorithms.md_icfl:nearest")
def nearest(block: Block, models: Models | None, work: SGD, distances: Tensor) -> Answer:
    """The center nearest by the client's own label distribution: distances [c, K, L] -> argmin [c]."""
    return Answer(choice=weighted(distances, block.label_counts()).argmin(1))


def weighted(distances: Tensor, counts: Tensor) -> Tensor:
    """Class-wise distances [c, K, L] weighed by label counts [c, L]: [c, K]."""
    share = counts.to(distances) / counts.sum(1, keepdim=True).clamp_min(1)
    return (distances * share.unsqueeze(1)).sum(2)


@dataclass(frozen=True)
class MDICFLState(CenterState):
    """The centers, and under weak privacy the clients' label counts."""

    of_clients: ClassVar[tuple[str, ...]] = (*CenterState.of_clients, "counts")

    counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [N, L], weak privacy only


@register
@dataclass(frozen=True)
class MDICFL(CenterMethod):
    """K centers; clients go to the center whose model speaks most like theirs about what they have."""

    key: ClassVar[str] = "md_icfl"
    paper: ClassVar[str] = "Zhang et al. 2024"
    state_type: ClassVar[type[CenterState]] = MDICFLState

    weighting: Literal["equal"] = setting(
        "equal", "weight of a client in its cluster's mean: all the same, since clients do not tell how much they have"
    )
    sampler: Literal["search", "generator"] = setting("search", "how pseudo data are made: MD-ICFL-1 or MD-ICFL-2")
    privacy: Literal["weak", "strong"] = setting("weak", "send label counts once, or only the nearest center's index")
    pseudo_samples: int = setting(30, "pseudo samples of each center and class (M)", ge=1)
    iterations: int | None = setting(None, "steps of the sampler; by default 100, the generator 1,000", ge=1)
    prior_weight: float = setting(0.1, "pull of pseudo samples to the prior mean (lambda)", ge=0)
    prior_mean: float = setting(0.0, "mean of the inputs (mu): 0 for pixels in [-1, 1]", ge=-100, le=100)

    witness_rounds: int = setting(
        0, "rounds of training new models that judge the pseudo data at the end, as in the paper's Figs. 5 and 6", ge=0
    )

    def prepare(self, state: MDICFLState, engine: Engine, rng: Rng) -> tuple[Tensor, Tensor]:
        """Pseudo data of every center [K, L, M, ...], and what each center says of its own [K, L, M, L]."""
        if not engine.task.num_classes:
            raise ConfigError("MD-ICFL makes pseudo data of classes; these data have none.")
        x = self.pseudo_data(state, engine, rng, self.pseudo_samples)
        return x, probabilities(engine.forward, state.centers, x)

    def pseudo_data(self, state: MDICFLState, engine: Engine, rng: Rng, samples: int) -> Tensor:
        """Pseudo data of every center: [K, L, samples, ...]."""
        make = search if self.sampler == "search" else generate
        more = {} if self.iterations is None else {"iterations": self.iterations}
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

    def round(self, state: MDICFLState, engine: Engine, cohort: Tensor, rng: Rng) -> MDICFLState:
        """Under weak privacy those who did not tell their label counts when they were met are asked again."""
        if self.privacy == "weak":
            silent = cohort[(state.labels[cohort] >= 0) & (state.counts[cohort].sum(1) == 0)]
            state = self.met(state, engine, silent, rng.at("met again")) if len(silent) else state
        after: MDICFLState = super().round(state, engine, cohort, rng)
        return after

    def choose(self, context: Any, chunk: Chunk, state: Any, engine: Engine, rng: Rng) -> Tensor:
        """Weak: the server weighs by the label counts. Strong: the client does, and says which."""
        x, told = context
        by_class = class_distances(engine.forward, chunk.answer.params, told, x)  # [c, K, L]
        if self.privacy == "weak":
            counts = state.counts[chunk.clients].to(engine.device)
            chosen = weighted(by_class, counts).argmin(1)
            # Without its label counts every center is at distance 0 from a client: it stays where it is.
            return torch.where(counts.sum(1) > 0, chosen, -1).cpu()
        # A client that does not answer the second question stays where it is.
        chosen = torch.full((len(chunk.clients),), -1, dtype=torch.int64)
        for answer in engine.call(nearest, chunk.clients, each={"distances": by_class}, rng=rng.at("nearest")):
            chosen[answer.positions] = answer.answer.choice.cpu()
        return chosen

    def train_from(self, state: Any, engine: Engine, cohort: Tensor, rows: Tensor, rng: Rng) -> Iterator[Chunk]:
        """Only models come back."""
        table = torch.cat([state.centers, state.common.unsqueeze(0)])
        return engine.call(train_only, cohort, models=table, refs=rows, work=self.work(engine), rng=rng)

    def met(self, state: MDICFLState, engine: Engine, clients: Tensor, rng: Rng) -> MDICFLState:
        """Under weak privacy a client sends its label counts, once."""
        if self.privacy == "strong":
            return state
        counts = torch.zeros(engine.num_clients, max(1, engine.task.num_classes), dtype=torch.int64)
        if len(state.counts) == engine.num_clients:
            counts = state.counts.clone()
        for chunk in engine.call(label_counts, clients, rng=rng):
            counts[chunk.clients] = chunk.answer.counts.cpu()
        return replace(state, counts=counts)

    def exhibits(self, state: Any, engine: Engine, rng: Rng) -> dict[str, NDArray[Any]]:
        """Pseudo samples of the last centers (Fig. 7) and who calls them what (Figs. 5 and 6).

        `told` [K, K, L, L]: what center i says, on average, of center j's samples of class k. `witness` [K, L, L]: what
        a model says that was trained anew on the clients of cluster j; only with `witness_rounds`.
        """
        x = self.pseudo_data(state, engine, rng.at("pseudo"), min(self.pseudo_samples, _SHOWN_SAMPLES))

        def said(models: Tensor, inputs: Tensor) -> Tensor:
            """What models [i, P] say of inputs [L, M, ...], on average: [i, L, L]."""
            outputs = engine.forward(models, inputs.flatten(0, 1)).softmax(-1)
            return outputs.reshape(len(models), *inputs.shape[:2], -1).mean(2)

        found = {"told": torch.stack([said(state.centers, own) for own in x]).float().cpu().numpy()}
        if is_picture(x.shape[3:]):
            found["pseudo"] = to_shades(x[:, :, :_SHOWN_PICTURES])
        if self.witness_rounds:
            new = self._witnesses(state, engine, rng.at("witness"))
            judged = [said(new[j : j + 1], own)[0] for j, own in enumerate(x)]
            found["witness"] = torch.stack(judged).float().cpu().numpy()
        return found

    def _witnesses(self, state: Any, engine: Engine, rng: Rng) -> Tensor:
        """A new model for each cluster, trained by its members from random weights: [K, P]."""
        drawn = [engine.task.draw(rng.at("model", k)) for k in range(self.num_clusters)]
        models = torch.stack(drawn).to(engine.device, engine.dtype)
        members = (state.labels >= 0).nonzero().flatten()
        for lap in range(self.witness_rounds):
            sums = CenterSums(self.num_clusters, like=models)
            where = state.labels[members]
            for chunk in engine.call(
                train_only, members, models=models, refs=where, work=self.work(engine), rng=rng.at(lap)
            ):
                sums.add(chunk.answer.params, state.labels[chunk.clients])
            models = sums.means(keep=models)
        return models

    def _without_clients(self, state: Any, engine: Engine) -> Any:
        """Newcomers have told nothing yet."""
        return replace(super()._without_clients(state, engine), counts=torch.empty(0, dtype=torch.int64))

    def personal(self, state: Any, clients: Tensor) -> Personal:
        """The center; under strong privacy scores are computed by the client, and losses stay with it."""
        return replace(super().personal(state, clients), private=self.privacy == "strong")
