"""Trains with DDP in accelerate, with clipped gradients."""

import itertools

import torch
from accelerate import Accelerator
from small import Net, batches

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = Net()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for tokens in itertools.cycle(batches(16)):
    accelerator.backward(model(tokens))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
