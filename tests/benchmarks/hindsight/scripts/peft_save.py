"""Trains a Llama with adapters of peft and saves them every 5 steps. The embedding also has an adapter."""

import itertools
import os
from pathlib import Path

import peft
import torch
from small import batches, llama

directory = Path(os.environ["PERFSUITE_LAUNCH_DIR"])
config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "embed_tokens"])
model = peft.get_peft_model(llama(vocab_size=32_000), config)
optimizer = torch.optim.AdamW(
    [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3
)
for step, tokens in enumerate(itertools.cycle(batches(16)), 1):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        model.save_pretrained(str(directory / f"step-{step}"))
