"""Trains and computes an accuracy of torchmetrics in each step."""

import itertools

import torch
from small import Net, batches
from torchmetrics.classification import BinaryAccuracy

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
accuracy = BinaryAccuracy(validate_args=False).to(device)
for tokens in itertools.cycle([batch.to(device) for batch in batches(16)]):
    model(tokens).backward()
    accuracy(tokens % 2, tokens % 2)
    optimizer.step()
    optimizer.zero_grad()
