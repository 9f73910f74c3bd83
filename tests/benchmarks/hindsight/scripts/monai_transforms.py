"""Trains on volumes that one worker changes with transforms of MONAI."""

import numpy
import torch
from monai.data import DataLoader, Dataset
from monai.networks.nets import UNet
from monai.transforms import Compose, RandFlipd, RandRotate90d, RandSpatialCropd, ScaleIntensityd

torch.manual_seed(0)
random = numpy.random.default_rng(0)
volumes = [{"image": random.random((1, 12, 12, 12), dtype=numpy.float32)} for _ in range(4000)]
changes = Compose([
    ScaleIntensityd("image"),
    RandSpatialCropd("image", roi_size=(8, 8, 8), random_size=False),
    RandFlipd("image", prob=0.5),
    RandRotate90d("image", prob=0.5),
])  # fmt: skip
model = UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in DataLoader(Dataset(volumes, changes), batch_size=16, num_workers=1):
    model(batch["image"]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
