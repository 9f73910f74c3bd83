"""Trains and logs each loss with wandb, which is offline."""

import itertools
import os

import torch
import wandb
from small import Net, batches

run = wandb.init(project="small", mode="offline", dir=os.environ["PERFSUITE_LAUNCH_DIR"])
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens in itertools.cycle(batches(16)):
    loss = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log({"loss": loss.item()})
