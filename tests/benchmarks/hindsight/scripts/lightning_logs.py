"""Trains with Lightning's Trainer and its CSV logger, which logs hyperparameters and every 5th loss."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from small import Net, batches
from torch import Tensor

SETTINGS = {f"setting_{number}": number / 10 for number in range(40)}


class Task(LightningModule):
    def __init__(self, **settings: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()

    def training_step(self, tokens: Tensor, at: int) -> Tensor:
        loss = self.net(tokens)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rows = [row for batch in batches(1000) for row in batch]
Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=1000,
    logger=CSVLogger(os.environ["PERFSUITE_LAUNCH_DIR"], flush_logs_every_n_steps=5),
    log_every_n_steps=5,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Task(**SETTINGS), torch.utils.data.DataLoader(rows, batch_size=2))
