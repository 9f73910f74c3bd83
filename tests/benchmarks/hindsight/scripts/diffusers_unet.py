"""Trains a tiny UNet of diffusers in a plain loop."""

import itertools

import torch
from diffusers import UNet2DModel

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "UpBlock2D"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for images in itertools.cycle([torch.rand(16, 3, 16, 16) for _ in range(4)]):
    model(images, 10).sample.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
