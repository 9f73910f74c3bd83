"""Trains in rounds with accelerate.

Each round prepares its own loader, and ends before the end of the data.
"""

import itertools

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from small import Net, batches

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = Net()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
rows = [row for batch in batches(16) for row in batch]
while True:
    loader = prepare_data_loader(torch.utils.data.DataLoader(rows, batch_size=2))
    for tokens in itertools.islice(loader, 1):
        accelerator.backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()
