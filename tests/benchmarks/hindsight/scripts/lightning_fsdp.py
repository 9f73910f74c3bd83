"""Trains with FSDP in Lightning's Trainer, in mixed precision. `configure_model` makes the model."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from small import Net, batches
from torch import Tensor


class Task(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Net()

    def training_step(self, tokens: Tensor, at: int) -> Tensor:
        return self.net(tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


rows = [row for batch in batches(4000) for row in batch]
Trainer(
    accelerator="gpu",
    devices=2,
    strategy="fsdp",
    precision="bf16-mixed",
    max_steps=1000,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Task(), torch.utils.data.DataLoader(rows, batch_size=2))
