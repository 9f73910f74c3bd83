"""A LLaMA of transformers with Megatron-FSDP, on random tokens.

torchrun --nproc-per-node=8 tests/frameworks/recipes/train_megatron_fsdp.py
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron_fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    # Megatron-FSDP 0.6 asks for the submesh of tensor parallelism even if there is none.
    mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=32_000
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        fsdp_unit_modules=[LlamaDecoderLayer],
        zero_dp_strategy=3,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
    )
    for step in range(200):
        tokens = torch.randint(config.vocab_size, (2, 256)).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
