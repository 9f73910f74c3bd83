"""Trains with DDP in Lightning's Trainer: `python lightning_ddp.py [PRECISION ACCUMULATION VOCABULARY]`."""

import sys
from typing import Any

import torch
from lightning import LightningModule, Trainer
from small import Net, batches
from torch import Tensor

precision, accumulation, vocabulary = sys.argv[1:] or ("32-true", "1", "256")


class Task(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(vocabulary=int(vocabulary))

    def training_step(self, tokens: Tensor, at: int) -> Tensor:
        return self.net(tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rows = [row for batch in batches(4000) for row in batch]
Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    precision=precision,
    accumulate_grad_batches=int(accumulation),
    max_steps=1000,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Task(), torch.utils.data.DataLoader(rows, batch_size=2))
