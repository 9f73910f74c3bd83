"""FSDP2 by accelerate, with gradients accumulated by `Accelerator.accumulate`."""

import itertools

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small import Net, batches

from perfsuite.frameworks.common.accelerate_config import force_fsdp

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, fsdp_plugin=plugin)
force_fsdp(accelerator, plugin)  # accelerate makes DDP of it on a CPU
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for tokens in itertools.cycle(batches(16)):
    with accelerator.accumulate(model):
        accelerator.backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()
