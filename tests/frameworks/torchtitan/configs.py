"""Debug models of torchtitan's registry with one or two layers, which train in seconds on a CPU."""

from torchtitan.models.deepseek_v3 import config_registry as deepseek
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from bench_cases import torchtitan_configs as own


def _cut(config: Trainer.Config, layers: int) -> Trainer.Config:
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    return config


def deepseek_v3_debugmodel() -> Trainer.Config:
    """The first layer has no experts."""
    return _cut(deepseek.deepseek_v3_debugmodel(), 2)


def moonlight_debugmodel() -> Trainer.Config:
    """The first layer has no experts."""
    return _cut(own.moonlight_debugmodel(), 2)


def qwen3_moe_debug() -> Trainer.Config:
    """A layer of 40 million parameters."""
    return _cut(qwen3.qwen3_moe_debug(), 1)


def gpt_oss_debugmodel() -> Trainer.Config:
    """One layer with a window, and one without, of 18 million parameters each."""
    return _cut(gpt_oss.gpt_oss_debugmodel(), 2)
