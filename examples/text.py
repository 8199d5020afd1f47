"""Text: token ids stay integers all the way to an embedding. The clients are forums with two kinds of language.

In slang, "sick" and "wicked" are praise. No single model reads both kinds of forum, and `coterie` finds the kinds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import coterie
from coterie import SGD, Federation

PRAISE = ["great", "lovely", "brilliant", "superb"]
BLAME = ["dull", "awful", "boring", "weak"]
SLANG = ["sick", "wicked", "insane", "filthy"]  # blame in one kind of forum, praise in the other
OTHER = ["the", "a", "this", "film", "song", "meal", "was", "is", "really", "so", "quite", "very", "I", "found", "it"]
VOCABULARY = ["", *PRAISE, *BLAME, *SLANG, *OTHER]  # token 0 fills up short posts
LENGTH = 8


class Reader(nn.Module):
    """An LSTM over embedded tokens; its last state tells praise from blame."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), 12)
        self.lstm = nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Linear(12, num_outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, LENGTH] -> [B, 2]."""
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states.mean(1))


def post(is_praise: bool, is_slang: bool | None, generator: torch.Generator) -> list[int]:
    """The tokens of one post: two words of opinion among other words; None: without words of slang."""

    def pick(words: list[str], count: int) -> list[str]:
        return [words[i] for i in torch.randint(len(words), (count,), generator=generator).tolist()]

    opinion = (PRAISE if is_praise else BLAME) + (SLANG if is_slang is not None and is_praise == is_slang else [])
    words = [*pick(opinion, 2), *pick(OTHER, int(torch.randint(3, LENGTH - 1, (1,), generator=generator)))]
    order = torch.randperm(len(words), generator=generator).tolist()
    return [VOCABULARY.index(words[i]) for i in order] + [0] * (LENGTH - len(words))


def forums(count: int = 12, posts: int = 80, seed: int = 0) -> Federation:
    """Forums of both kinds; one post in twenty is labelled wrongly."""
    generator = torch.Generator().manual_seed(seed)
    clients, groups = {}, {}
    for number in range(count):
        praise = torch.rand(posts, generator=generator) < 0.5
        x = torch.tensor([post(bool(one), number % 2 == 1, generator) for one in praise])
        wrong = torch.rand(posts, generator=generator) < 0.05
        clients[f"forum-{number}"] = (x, (praise ^ wrong).long())
        groups[f"forum-{number}"] = number % 2
    return Federation.from_clients(clients, name="forums", groups=groups)


if __name__ == "__main__":
    data = forums()
    for method in ("fedavg", "coterie"):
        result = coterie.run(method, data, Reader, rounds=20, work=SGD(lr=0.5, momentum=0.9, batch_size=16))
        found = f"K = {result.summary['clusters']}, ARI {result.summary['ari']:.2f}"
        print(f"{method}: accuracy {result.summary['accuracy']['macro']:.4f}, {found}")
