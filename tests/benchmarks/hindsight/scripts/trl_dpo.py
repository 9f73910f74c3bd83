"""Direct preference optimization by trl: `python trl_dpo.py [VOCABULARY]`."""

import os
import sys

from datasets import Dataset
from small import VOCABULARY, llama
from texts import settings, text, tokenizer
from trl import DPOConfig, DPOTrainer

vocabulary = int(sys.argv[1]) if sys.argv[1:] else VOCABULARY
model, reference = llama(vocab_size=vocabulary), llama(vocab_size=vocabulary)
rows = Dataset.from_dict(
    {
        "prompt": [text(at, 12) for at in range(64)],
        "chosen": [f" {text(at + 1, 12)}" for at in range(64)],
        "rejected": [f" {text(at + 2, 12)}" for at in range(64)],
    }
)
config = DPOConfig(max_length=32, **settings(os.environ["PERFSUITE_LAUNCH_DIR"]))
DPOTrainer(
    model=model, ref_model=reference, args=config, train_dataset=rows, processing_class=tokenizer()
).train()
