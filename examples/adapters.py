"""Adapters: fine-tune a small Transformer for kinds of text, and send only its LoRA matrices.

The forums of `text.py` again: in some of them "sick" is praise. A Transformer that has read ordinary reviews is the
same everywhere and stays frozen. Clients train low-rank adapters of its attention, and its last layer. What is frozen
is not part of a model, so messages, ledger and checkpoints have the adapters only. `coterie` finds the kinds of forum.

    pip install 'coterie[text]'        # transformers and peft; the weights are made here, nothing is downloaded
    python examples/adapters.py
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from text import LENGTH, VOCABULARY, forums, post
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import coterie
from coterie import SGD


class Reader(nn.Module):
    """A BERT of two small layers over token ids; the mean of its states tells praise from blame."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        places = {"vocab_size": len(VOCABULARY), "max_position_embeddings": LENGTH}
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(**sizes, **places, **no_dropout, attn_implementation="eager")
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, LENGTH] -> [B, 2]."""
        return self.head(self.bert(tokens).last_hidden_state.mean(1))


@functools.cache
def ordinary(steps: int = 300) -> dict[str, Tensor]:
    """The weights of a Reader that has read ordinary reviews, without slang; made in some seconds."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reader = Reader().train()
    optimizer = torch.optim.Adam(reader.parameters(), lr=2e-3)
    for _ in range(steps):
        y = torch.randint(2, (32,), generator=generator)
        x = torch.tensor([post(bool(praise), None, generator) for praise in y])
        optimizer.zero_grad()
        nn.functional.cross_entropy(reader(x), y).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in reader.state_dict().items()}


def whole(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The Transformer, all of which is trained."""
    reader = Reader()
    reader.load_state_dict(ordinary())
    return reader


def adapted(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The frozen Transformer with adapters of rank 4; these and the last layer are trained."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["query", "value"], modules_to_save=["head"])
    return Plain(get_peft_model(whole(input_shape, num_outputs), lora))


class Plain(nn.Module):
    """A model of peft as a function of one tensor."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


if __name__ == "__main__":
    data = forums(count=16, posts=200)
    full, low_rank = SGD(optimizer="adam", lr=0.002, batch_size=16), SGD(lr=0.1, momentum=0.9, batch_size=16)
    for name, model, work in (("full fine-tuning", whole, full), ("adapters", adapted, low_rank)):
        for method in ("fedavg", "coterie"):
            result = coterie.run(method, data, model, rounds=15, work=work)
            found, sent = result.summary, result.summary["bytes"]
            print(
                f"{name}, {method}: accuracy {found['accuracy']['macro']:.4f}, K = {found['clusters']}, "
                f"ARI {found['ari']:.2f}, {result.centers.shape[1]} parameters, {sent['down'] / 1e6:.2f} MB down, "
                f"{sent['up'] / 1e6:.2f} MB up"
            )
