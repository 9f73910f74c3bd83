"""Trains with the Trainer of transformers."""

import os

from small import batches, llama
from texts import settings
from transformers import Trainer, TrainingArguments

rows = [{"input_ids": row, "labels": row} for batch in batches(32) for row in batch]
given = settings(os.environ["PERFSUITE_LAUNCH_DIR"])
Trainer(model=llama(), args=TrainingArguments(**given), train_dataset=rows).train()
