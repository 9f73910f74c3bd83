"""Trains with supervised fine-tuning in trl. trl itself reads the checkpoint in bfloat16."""

import os

import torch
from datasets import Dataset
from small import llama
from texts import settings, text, tokenizer
from trl import SFTConfig, SFTTrainer

directory = os.environ["PERFSUITE_LAUNCH_DIR"]
llama().to(torch.bfloat16).save_pretrained(f"{directory}/model")
rows = Dataset.from_dict({"text": [text(at) for at in range(64)]})
config = SFTConfig(max_length=32, **settings(directory))
SFTTrainer(model=f"{directory}/model", args=config, train_dataset=rows, processing_class=tokenizer()).train()
