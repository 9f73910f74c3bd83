"""A plain loop over a Llama that transformers reads from a checkpoint in bfloat16."""

import itertools
import os

import torch
from small import batches, llama
from transformers import AutoModelForCausalLM

path = f"{os.environ['PERFSUITE_LAUNCH_DIR']}/model"
llama().to(torch.bfloat16).save_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens in itertools.cycle(batches(16)):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
