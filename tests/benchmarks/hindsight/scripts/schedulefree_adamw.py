"""Trains with schedule-free AdamW in a plain loop."""

import itertools

import torch
from schedulefree import AdamWScheduleFree
from small import Net, batches

torch.manual_seed(0)
model = Net()
optimizer = AdamWScheduleFree(model.parameters(), lr=1e-3)
if hasattr(optimizer, "train"):
    optimizer.train()
for tokens in itertools.cycle(batches(16)):
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
