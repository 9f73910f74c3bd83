"""Trains with Lightning's Trainer, and saves every 5 steps: `python lightning_save.py RANKS WORKERS`."""

import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from small import Net, batches
from torch import Tensor

ranks, workers = map(int, sys.argv[1:])


class Task(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, tokens: Tensor, at: int) -> Tensor:
        return self.net(tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rows = [row for batch in batches(4000) for row in batch]
saving = ModelCheckpoint(
    os.environ["PERFSUITE_LAUNCH_DIR"], every_n_train_steps=5, save_top_k=-1, save_last=True
)
Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    max_steps=1000,
    logger=False,
    callbacks=[saving],
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Task(), torch.utils.data.DataLoader(rows, batch_size=2, num_workers=workers))
