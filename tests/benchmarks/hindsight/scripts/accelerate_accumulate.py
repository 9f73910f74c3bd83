"""Trains with FSDP2 in accelerate. `Accelerator.accumulate` accumulates the gradients."""

import itertools

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small import Net, batches

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)
accelerator = Accelerator(gradient_accumulation_steps=4, fsdp_plugin=plugin)
model = Net().to(accelerator.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for tokens in itertools.cycle(batches(16)):
    with accelerator.accumulate(model):
        accelerator.backward(model(tokens.to(accelerator.device)))
        optimizer.step()
        optimizer.zero_grad()
