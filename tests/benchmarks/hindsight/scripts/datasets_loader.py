"""Reads a Hugging Face dataset with one worker: `python datasets_loader.py torch`, `stream` or `filter`."""

import sys

import torch
from datasets import Dataset
from small import Net, batches
from torch.utils.data import DataLoader

rows = [row.tolist() for batch in batches(2000) for row in batch]
data = Dataset.from_dict({"tokens": rows, "length": [len(row) for row in rows]})
if sys.argv[1] == "stream":
    stream = data.to_iterable_dataset(num_shards=4).with_format("numpy")
    data = stream.map(lambda row: {"tokens": row["tokens"]}).filter(lambda row: row["length"] == 32)
elif sys.argv[1] == "filter":
    data = data.filter(lambda row: row["length"] == 32).with_format("torch")
else:
    data = data.with_format("torch")
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in DataLoader(data, batch_size=2, num_workers=1):
    model(batch["tokens"]).backward()
    optimizer.step()
    optimizer.zero_grad()
