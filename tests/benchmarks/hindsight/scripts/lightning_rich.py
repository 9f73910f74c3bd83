"""Trains with Lightning's Trainer and a rich progress bar, as on a terminal."""

import os
from typing import Any

import torch

os.environ["FORCE_COLOR"] = "1"

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from small import Net, batches
from torch import Tensor


class Task(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, tokens: Tensor, at: int) -> Tensor:
        loss = self.net(tokens)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rows = [row for batch in batches(1000) for row in batch]
Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=1000,
    logger=False,
    callbacks=[RichProgressBar()],
    enable_checkpointing=False,
    enable_model_summary=False,
).fit(Task(), torch.utils.data.DataLoader(rows, batch_size=2))
