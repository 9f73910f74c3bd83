"""Trains a Llama with adapters of peft in a plain loop: `python peft_train.py oft`, `dora`, `lora`, ...

With the additional argument `bfloat16`, the Llama's parameters are bfloat16.
"""

import itertools
import sys

import peft
import torch
from small import batches, llama

TARGETS = ["q_proj", "v_proj", "up_proj"]
KINDS = {
    "lora": lambda: peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS),
    "dora": lambda: peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, use_dora=True),
    "oft": lambda: peft.OFTConfig(r=8, oft_block_size=0, target_modules=TARGETS),
    "vera": lambda: peft.VeraConfig(r=8, target_modules=["q_proj", "o_proj"]),
    "loha": lambda: peft.LoHaConfig(r=8, alpha=16, target_modules=TARGETS),
}
dtype = getattr(torch, sys.argv[2]) if sys.argv[2:] else torch.float32
model = peft.get_peft_model(llama().to(dtype), KINDS[sys.argv[1]]())
optimizer = torch.optim.AdamW(
    [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3
)
for tokens in itertools.cycle(batches(16)):
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
