"""Trains a model that was loaded in bfloat16 with FSDP2 in accelerate, in mixed precision."""

import itertools

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small import Net, batches

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
model = Net().to(accelerator.device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for tokens in itertools.cycle(batches(16)):
    accelerator.backward(model(tokens.to(accelerator.device)))
    optimizer.step()
    optimizer.zero_grad()
