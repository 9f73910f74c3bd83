"""Trains with DDP in Lightning Fabric."""

import itertools

import torch
from lightning.fabric import Fabric
from small import Net, batches

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
torch.manual_seed(0)
model = Net()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for tokens in itertools.cycle(batches(16)):
    fabric.backward(model(tokens))
    optimizer.step()
    optimizer.zero_grad()
