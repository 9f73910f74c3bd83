"""Trains with direct preference optimization in trl."""

import os

from datasets import Dataset
from small import llama
from texts import settings, text, tokenizer
from trl import DPOConfig, DPOTrainer

rows = Dataset.from_dict(
    {
        "prompt": [text(at, 12) for at in range(64)],
        "chosen": [f" {text(at + 1, 12)}" for at in range(64)],
        "rejected": [f" {text(at + 2, 12)}" for at in range(64)],
    }
)
config = DPOConfig(max_length=32, **settings(os.environ["PERFSUITE_LAUNCH_DIR"]))
DPOTrainer(
    model=llama(), ref_model=llama(), args=config, train_dataset=rows, processing_class=tokenizer()
).train()
