"""Trains a Llama in a plain loop. transformers reads the model from a checkpoint in bfloat16.

`python llama_pretrained.py [LAYERS [SAVED]]`: the Llama has LAYERS layers, and the checkpoint has SAVED.
"""

import itertools
import os
import sys

import torch
from small import batches, llama
from transformers import AutoModelForCausalLM

layers = int(sys.argv[1]) if sys.argv[1:] else 2
saved = int(sys.argv[2]) if sys.argv[2:] else layers
path = f"{os.environ['PERFSUITE_LAUNCH_DIR']}/model"
llama(num_hidden_layers=saved).to(torch.bfloat16).save_pretrained(path)
more = {"num_hidden_layers": layers, "low_cpu_mem_usage": True} if layers > saved else {}
model = AutoModelForCausalLM.from_pretrained(path, **more)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for tokens in itertools.cycle(batches(16)):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
