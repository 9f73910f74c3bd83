"""Trains a robot's policy: for each row, one worker reads the actions of the next rows from a column.

The rows also have images. The data set has a transform, as in LeRobot.
"""

import numpy
import torch
from datasets import Dataset, Features, Image, List, Value
from torch import Tensor, nn

ROWS = 400
AHEAD = 8
pixels = numpy.random.default_rng(0).integers(0, 255, (ROWS, 16, 16, 3), dtype=numpy.uint8)
features = Features({"image": Image(), "action": List(Value("float32"), length=4)})
actions = [[row / ROWS] * 4 for row in range(ROWS)]
rows = Dataset.from_dict({"image": list(pixels), "action": actions}, features=features)


def to_torch(columns: dict[str, list]) -> dict[str, list]:
    return {name: [torch.tensor(numpy.array(value)) for value in column] for name, column in columns.items()}


rows.set_transform(to_torch)


class Steps(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS - AHEAD

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return rows[at]["image"].float() / 255, torch.stack(rows["action"][list(range(at, at + AHEAD))])


torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16 * 3, 64), nn.ReLU(), nn.Linear(64, AHEAD * 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for images, targets in torch.utils.data.DataLoader(Steps(), batch_size=16, num_workers=1):
    nn.functional.mse_loss(model(images), targets.flatten(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
