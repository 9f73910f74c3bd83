"""Trains a classifier, and calls a collection of torchmetrics in each step."""

import itertools

import torch
from torch import nn
from torchmetrics import Accuracy, F1Score, MetricCollection, Precision, Recall

CLASSES = 10
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, CLASSES))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
shared = {"num_classes": CLASSES, "average": "macro"}
metrics = MetricCollection([Accuracy(**shared), Precision(**shared), Recall(**shared), F1Score(**shared)])
data = [(torch.rand(16, 3, 16, 16), torch.randint(CLASSES, (16,))) for _ in range(8)]
for images, labels in itertools.cycle(data):
    scores = model(images)
    nn.functional.cross_entropy(scores, labels).backward()
    metrics(scores.detach().softmax(dim=1), labels)
    optimizer.step()
    optimizer.zero_grad()
