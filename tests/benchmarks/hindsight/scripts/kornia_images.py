"""Changes images with kornia in each step: `python kornia_images.py RandomChannelShuffle`."""

import itertools
import sys

import kornia.augmentation
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3), nn.AdaptiveAvgPool2d(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
change = getattr(kornia.augmentation, sys.argv[1])(p=1.0)
images = [torch.rand(16, 3, 32, 32) for _ in range(8)]
for batch in itertools.cycle(images):
    model(change(batch)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
