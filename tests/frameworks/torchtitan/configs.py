"""Configurations like those of torchtitan's registry, but with few layers.

Debug models have one or two layers, and train in seconds on a CPU. Larger models have three, and are used in
dry runs (tests/bench_cases/test_theory.py).
"""

from torchtitan.models.deepseek_v3 import config_registry as deepseek
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from bench_cases import torchtitan_configs as own

LAYERS = 3  # tests/bench_cases/test_theory.py uses it as well


def _cut(config: Trainer.Config, layers: int) -> Trainer.Config:
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    return config


def deepseek_v3_debugmodel() -> Trainer.Config:
    """Return a model whose first layer has no experts."""
    return _cut(deepseek.deepseek_v3_debugmodel(), 2)


def moonlight_debugmodel() -> Trainer.Config:
    """Return a model whose first layer has no experts."""
    return _cut(own.moonlight_debugmodel(), 2)


def llama3_debugmodel() -> Trainer.Config:
    """Return a model with one layer for each of two ranks of a pipeline."""
    return _cut(llama3.llama3_debugmodel(), 2)


def llama3_debugmodel_float8_emulated() -> Trainer.Config:
    """Return a model that has every kind of layer that torchtitan converts to float8."""
    return _cut(own.llama3_debugmodel_float8_emulated(), 2)


def qwen3_moe_debug() -> Trainer.Config:
    """Return a model with one layer of 40 million parameters."""
    return _cut(qwen3.qwen3_moe_debug(), 1)


def gpt_oss_debugmodel() -> Trainer.Config:
    """Return a model with two layers of 18 million parameters each, one with a window and one without."""
    return _cut(gpt_oss.gpt_oss_debugmodel(), 2)


def llama3_70b() -> Trainer.Config:
    """Return a model that computes the loss of all positions at once."""
    return _cut(own.llama3_70b_whole_loss(), LAYERS)


def llama3_8b() -> Trainer.Config:
    """Return a model that computes the loss of an eighth of the positions at a time, as registered."""
    return _cut(llama3.llama3_8b(), LAYERS)


def qwen3_30b_a3b() -> Trainer.Config:
    """Return a model in which all layers have experts."""
    return _cut(qwen3.qwen3_30b_a3b(), LAYERS)


def deepseek_v3_16b() -> Trainer.Config:
    """Return a model whose first layer has no experts."""
    return _cut(deepseek.deepseek_v3_16b(), LAYERS)
