"""An optimizer of timm: `python timm_optimizer.py adan`."""

import itertools
import sys

import timm.optim
import torch
from small import Net, batches

torch.manual_seed(0)
model = Net()
optimizer = timm.optim.create_optimizer_v2(model, opt=sys.argv[1], lr=1e-3)
for tokens in itertools.cycle(batches(16)):
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
