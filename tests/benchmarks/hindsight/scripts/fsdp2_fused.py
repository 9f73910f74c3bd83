"""Trains with FSDP2 in a plain loop, with torch's fused AdamW."""

import itertools

import torch
from small import Net, batches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = Net()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for tokens in itertools.cycle(batches(16)):
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
