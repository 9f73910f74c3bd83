"""Images whose channels kornia shuffles in each step."""

import itertools

import torch
from kornia.augmentation import RandomChannelShuffle
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3), nn.AdaptiveAvgPool2d(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
shuffle = RandomChannelShuffle(p=1.0)
images = [torch.rand(16, 3, 32, 32) for _ in range(8)]
for batch in itertools.cycle(images):
    model(shuffle(batch)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
