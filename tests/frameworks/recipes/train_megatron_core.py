"""A GPT of Megatron-Core with tensor, pipeline, data and expert parallelism, on random tokens.

    torchrun --nproc-per-node=8 tests/frameworks/recipes/train_megatron_core.py --tp 2 --pp 2

It needs neither Transformer Engine nor Apex.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# Without Transformer Engine, Megatron-Core 0.16 uses this name in its MoE router but does not define it.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("ep", 1), ("layers", 4), ("hidden", 512), ("heads", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (
        ("sequence", 256),
        ("vocabulary", 32_000),
        ("micro-batch", 2),
        ("micro-batches", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, help="experts of each layer (default: no experts)")
    parser.add_argument("--capacity", type=float, help="pad the tokens of each expert to this factor")
    return parser.parse_args()


def build(given: argparse.Namespace) -> Any:
    config = TransformerConfig(
        num_layers=given.layers,
        hidden_size=given.hidden,
        num_attention_heads=given.heads,
        tensor_model_parallel_size=given.tp,
        pipeline_model_parallel_size=given.pp,
        expert_model_parallel_size=given.ep,
        num_moe_experts=given.experts,
        moe_token_dispatcher_type="alltoall",
        moe_expert_capacity_factor=given.capacity,
        moe_pad_expert_input_to_capacity=given.capacity is not None,
        add_bias_linear=given.experts is None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=given.experts),
        vocab_size=given.vocabulary,
        max_sequence_length=given.sequence,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    config.finalize_model_grads_func = finalize_model_grads
    sharded = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    return DistributedDataParallel(config, sharded, Float16Module(config, model.cuda()))


def batches(given: argparse.Namespace) -> Iterator[Tensor]:
    while True:
        tokens = torch.randint(given.vocabulary, (given.micro_batch, given.sequence + 1))
        yield tokens.cuda()


def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


def forward(data: Iterator[Tensor], model: Any) -> tuple[Tensor, partial[Any]]:
    tokens = next(data)
    inputs = tokens[:, :-1].contiguous()
    labels = tokens[:, 1:].contiguous()
    length = inputs.shape[1]
    positions = torch.arange(length, device="cuda").expand_as(inputs)
    masked = torch.ones(1, 1, length, length, device="cuda", dtype=torch.bool).triu(1)
    return model(inputs, positions, masked, labels=labels), partial(loss_of)


def main() -> None:
    given = options()
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=given.tp,
        pipeline_model_parallel_size=given.pp,
        expert_model_parallel_size=given.ep,
    )
    model_parallel_cuda_manual_seed(1)
    model = build(given)
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(adam, [model])
    train = get_forward_backward_func()
    data = batches(given)
    for step in range(200):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = train(
            forward_step_func=forward,
            data_iterator=data,
            model=[model],
            num_microbatches=given.micro_batches,
            seq_length=given.sequence,
            micro_batch_size=given.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        if losses:
            print(f"step {step}: loss {losses[-1]['loss'].item():.3f}", flush=True)


if __name__ == "__main__":
    main()
