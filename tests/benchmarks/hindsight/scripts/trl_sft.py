"""Trains with supervised fine-tuning in trl."""

import os
import sys

from datasets import Dataset
from small import llama
from texts import settings, text, tokenizer
from trl import SFTConfig, SFTTrainer

more = {"loss_type": sys.argv[1]} if sys.argv[1:] else {}
rows = Dataset.from_dict({"text": [text(at) for at in range(64)]})
config = SFTConfig(max_length=32, **more, **settings(os.environ["PERFSUITE_LAUNCH_DIR"]))
SFTTrainer(model=llama(), args=config, train_dataset=rows, processing_class=tokenizer()).train()
