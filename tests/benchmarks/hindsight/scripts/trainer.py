"""The Trainer of transformers."""

import os
import sys

from small import batches, llama
from texts import settings
from transformers import Trainer, TrainingArguments

rows = [{"input_ids": row, "labels": row} for batch in batches(32) for row in batch]
given = settings(os.environ["PERFSUITE_LAUNCH_DIR"])
accumulated = {"gradient_accumulation_steps": int(sys.argv[1])} if sys.argv[1:] else {}
Trainer(model=llama(), args=TrainingArguments(**accumulated, **given), train_dataset=rows).train()
