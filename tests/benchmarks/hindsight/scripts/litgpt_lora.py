"""Trains litgpt's GPT with LoRA in a plain loop."""

import itertools

import torch
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from small import batches
from torch.nn.functional import cross_entropy

config = Config(
    name="tiny",
    block_size=64,
    vocab_size=256,
    padded_vocab_size=256,
    n_layer=2,
    n_head=4,
    n_embd=64,
    lora_r=8,
    lora_alpha=16,
    lora_query=True,
    lora_value=True,
)
torch.manual_seed(0)
model = GPT(config)
mark_only_lora_as_trainable(model)
optimizer = torch.optim.AdamW(
    [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3
)
for tokens in itertools.cycle(batches(16)):
    cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
