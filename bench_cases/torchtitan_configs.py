"""Configurations that torchtitan's registry lacks: `--module=bench_cases.torchtitan_configs`."""

from torchtitan.config import ParallelismConfig
from torchtitan.models.llama3 import model_registry as llama3
from torchtitan.models.llama3.config_registry import llama3_70b
from torchtitan.models.qwen3 import model_registry as qwen3
from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b
from torchtitan.trainer import Trainer


def llama3_405b_bf16() -> Trainer.Config:
    """torchtitan's own `llama3_405b` without float8 and compilation."""
    config = llama3_70b()
    config.model_spec = llama3("405B")
    config.training.local_batch_size = 2
    return config


def qwen3_235b_a22b() -> Trainer.Config:
    """As torchtitan's `qwen3_30b_a3b`, with experts on the 8 ranks of a node."""
    config = qwen3_30b_a3b()
    config.model_spec = qwen3("235B-A22B")
    config.parallelism = ParallelismConfig(expert_parallel_degree=8)
    config.training.disable_cuda_graphs = True
    return config
