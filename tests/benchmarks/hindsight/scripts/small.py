"""A small model and made-up data, for scripts of libraries that come without a model."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64
VOCABULARY = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Net(nn.Module):
    """A model that learns to repeat its input tokens. A call returns the loss."""

    def __init__(self, depth: int = 4, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def batches(count: int, batch: int = 2, length: int = 32) -> list[Tensor]:
    """Return random tokens of shape [batch, length], always from the same seed."""
    torch.manual_seed(0)
    return [torch.randint(VOCABULARY, (batch, length)) for _ in range(count)]


def llama(**settings: Any) -> Any:
    """Return a tiny Llama of transformers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **settings,
    }
    return LlamaForCausalLM(LlamaConfig(**config))
