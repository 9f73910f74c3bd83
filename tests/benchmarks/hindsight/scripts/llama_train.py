"""Trains a Llama of transformers in a plain loop: `python llama_train.py [POSITIONS]`."""

import itertools
import sys

import torch
from small import batches, llama

model = llama(max_position_embeddings=int(sys.argv[1]) if sys.argv[1:] else 128)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens in itertools.cycle(batches(16)):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
