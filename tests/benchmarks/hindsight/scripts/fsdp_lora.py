"""FSDP of accelerate over a Llama with LoRA, wrapped by peft's policy."""

import itertools

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from small import batches, llama

from perfsuite.frameworks.common.accelerate_env import force_fsdp

model = get_peft_model(llama(), LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
plugin = FullyShardedDataParallelPlugin(
    sync_module_states=False, cpu_ram_efficient_loading=False, use_orig_params=False
)
plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
force_fsdp(accelerator, plugin)  # accelerate makes DDP of it on a CPU
model = accelerator.prepare(model)
trained = [each for each in model.parameters() if each.requires_grad]
optimizer = accelerator.prepare(torch.optim.AdamW(trained, lr=1e-3))
for tokens in itertools.cycle(batches(16)):
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
