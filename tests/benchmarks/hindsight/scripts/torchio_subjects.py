"""Trains on volumes that torchio reads and changes: `python torchio_subjects.py WORKERS`."""

import os
import sys

import torch
import torchio as tio
from torch import nn

torch.manual_seed(0)
path = f"{os.environ['PERFSUITE_LAUNCH_DIR']}/volume.nii"
tio.ScalarImage(tensor=torch.rand(1, 8, 8, 8)).save(path)
subjects = [tio.Subject(volume=tio.ScalarImage(path), mask=tio.LabelMap(path)) for _ in range(4000)]
changes = tio.Compose([tio.ToCanonical(), tio.RandomFlip(), tio.RescaleIntensity((0, 1))])
data = tio.SubjectsDataset(subjects, transform=changes)
model = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Conv3d(4, 1, 3), nn.AdaptiveAvgPool3d(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.utils.data.DataLoader(data, batch_size=16, num_workers=int(sys.argv[1])):
    model(batch["volume"][tio.DATA].float()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
