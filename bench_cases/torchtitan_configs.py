"""Configurations that torchtitan's registry lacks: `--module=bench_cases.torchtitan_configs`."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import ParallelismConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.kimi_k2_7 import config_registry as kimi
from torchtitan.models.kimi_k2_7 import model_registry as kimi_model
from torchtitan.models.llama3 import model_registry as llama3
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_70b, llama3_debugmodel
from torchtitan.models.qwen3 import model_registry as qwen3
from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b
from torchtitan.trainer import Trainer


def llama3_405b_bf16() -> Trainer.Config:
    """Return torchtitan's `llama3_405b` without float8 and without compilation."""
    config = llama3_70b()
    config.model_spec = llama3("405B")
    config.training.local_batch_size = 2
    return config


def qwen3_235b_a22b() -> Trainer.Config:
    """Return the 235B-A22B model, configured like `qwen3_30b_a3b`.

    The experts are divided among the 8 ranks of a node.
    """
    config = qwen3_30b_a3b()
    config.model_spec = qwen3("235B-A22B")
    config.parallelism = ParallelismConfig(expert_parallel_degree=8)
    config.training.disable_cuda_graphs = True
    return config


def moonlight_16b_a3b_adamw() -> Trainer.Config:
    """Return torchtitan's `moonlight_16b_a3b`, Kimi's text model, with AdamW instead of DistMuon."""
    config = kimi.moonlight_16b_a3b()
    config.optimizer = default_adamw(lr=3e-4)
    return config


def moonlight_debugmodel() -> Trainer.Config:
    """Return `moonlight_16b_a3b_adamw` with torchtitan's debug model of Kimi, without its vision encoder."""
    config = moonlight_16b_a3b_adamw()
    config.model_spec = kimi_model("debugmodel")
    config.model_spec.model.vision_encoder = None
    config.loss.loss_fn.global_vocab_size = decoder_vocab_size(config.model_spec)
    config.training.local_batch_size = 1
    config.training.seq_len = 512
    return config


def llama3_8b_whole_loss() -> Trainer.Config:
    """Return `llama3_8b`, with the loss of all positions computed at once, like torchtitan in 2024."""
    return _whole_loss(llama3_8b())


def llama3_70b_whole_loss() -> Trainer.Config:
    """Return `llama3_70b`, with the loss of all positions computed at once, like torchtitan in 2024."""
    return _whole_loss(llama3_70b())


def llama3_405b_whole_loss() -> Trainer.Config:
    """Return `llama3_405b_bf16`, with the loss of all positions computed at once, like torchtitan in 2024."""
    return _whole_loss(llama3_405b_bf16())


def llama3_8b_float8() -> Trainer.Config:
    """Return torchtitan's `llama3_8b` with rowwise float8 in all linear layers except the head."""
    config = llama3_8b()
    config.model_spec = llama3("8B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])])
    return config


def llama3_debugmodel_float8_emulated() -> Trainer.Config:
    """Return torchtitan's `llama3_debugmodel_float8` with emulated float8, which runs on any machine."""
    config = llama3_debugmodel()
    config.model_spec = llama3("debugmodel", converters=[Float8LinearConverter.Config(emulate=True)])
    return config


def _whole_loss(config: Trainer.Config) -> Trainer.Config:
    """Compute the loss of all positions at once, not in parts as torchtitan 0.3 does to save memory."""
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    return config
