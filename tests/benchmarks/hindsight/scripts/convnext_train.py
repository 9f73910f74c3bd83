"""Trains a tiny ConvNeXt V2 of transformers to classify images."""

import itertools

import torch
from transformers import ConvNextV2Config, ConvNextV2ForImageClassification

torch.manual_seed(0)
config = ConvNextV2Config(hidden_sizes=[8, 16, 32, 64], depths=[2, 2, 2, 2], image_size=32, num_labels=10)
model = ConvNextV2ForImageClassification(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = [(torch.rand(16, 3, 32, 32), torch.randint(10, (16,))) for _ in range(8)]
for images, labels in itertools.cycle(data):
    model(pixel_values=images, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
