"""Trains with the Trainer of transformers. An evaluation, whose worker is persistent, follows each step."""

import os

from small import batches, llama
from texts import settings
from transformers import Trainer, TrainingArguments

rows = [{"input_ids": row, "labels": row} for batch in batches(32) for row in batch]
given = settings(os.environ["PERFSUITE_LAUNCH_DIR"])
arguments = TrainingArguments(
    eval_strategy="steps",
    eval_steps=1,
    dataloader_num_workers=1,
    dataloader_persistent_workers=True,
    per_device_eval_batch_size=4,
    **given,
)
Trainer(model=llama(), args=arguments, train_dataset=rows, eval_dataset=rows[:8]).train()
