"""Trains a deep Llama with adapters of peft. Each target is named: `python peft_names.py LAYERS`."""

import itertools
import sys

import peft
import torch
from small import batches, llama

model = llama(num_hidden_layers=int(sys.argv[1]))
targets = [name for name, _ in model.named_modules() if name.endswith(("q_proj", "v_proj"))]
model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets))
optimizer = torch.optim.AdamW(
    [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3
)
for tokens in itertools.cycle(batches(16)):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
