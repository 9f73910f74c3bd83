"""An everyday script for `accelerate launch`: a small model learns to repeat a sequence.

    accelerate launch --multi_gpu --num_processes=2 tests/frameworks/recipes/train_accelerate.py

(`--multi_gpu` also starts several processes on a machine without GPUs.)
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sequences: Any = torch.randint(64, (4096, 32))
    loader: DataLoader[Tensor] = DataLoader(sequences, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(10):
        for tokens in loader:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}, {accelerator.num_processes} processes: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
