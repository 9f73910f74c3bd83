"""Flips images on the GPU in a container of kornia: `AugmentationSequential`, with `data_keys`."""

import itertools

import torch
from kornia.augmentation import AugmentationSequential, RandomHorizontalFlip
from torch import nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3), nn.AdaptiveAvgPool2d(1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
flip = AugmentationSequential(RandomHorizontalFlip(p=1.0), data_keys=["input", "mask"])
pairs = [(torch.rand(16, 3, 32, 32), torch.ones(16, 1, 32, 32)) for _ in range(4)]
for image, mask in itertools.cycle([(image.to(device), mask.to(device)) for image, mask in pairs]):
    image, mask = flip(image, mask)
    (model(image.to(device)).square().mean() + mask.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
