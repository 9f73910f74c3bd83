"""Configurations of torchtitan's registry with few layers: less to train on a CPU, and to run dry."""

from torchtitan.models.deepseek_v3 import config_registry as deepseek
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from bench_cases.torchtitan_configs import llama3_70b_whole_loss

LAYERS = 3  # of tests/test_theory.py, too


def _cut(config: Trainer.Config) -> Trainer.Config:
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    return config


def llama3_70b() -> Trainer.Config:
    """With the loss of all positions at once."""
    return _cut(llama3_70b_whole_loss())


def llama3_8b() -> Trainer.Config:
    """With the loss of one eighth of the positions at a time, as it is registered."""
    return _cut(llama3.llama3_8b())


def qwen3_30b_a3b() -> Trainer.Config:
    """All layers have experts."""
    return _cut(qwen3.qwen3_30b_a3b())


def deepseek_v3_16b() -> Trainer.Config:
    """The first layer has none."""
    return _cut(deepseek.deepseek_v3_16b())
