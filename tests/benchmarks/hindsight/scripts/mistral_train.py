"""Trains a tiny Mistral of transformers on sequences that are as long as its sliding window."""

import itertools

import torch
from small import VOCABULARY, batches
from transformers import MistralConfig, MistralForCausalLM

torch.manual_seed(0)
config = MistralConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    sliding_window=32,
)
model = MistralForCausalLM(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens in itertools.cycle(batches(16)):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
