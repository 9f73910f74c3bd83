"""FLOPs of a training step by one versioned formula. The formula is pure; counting a model imports torch.

`palm-1`, after Chowdhery et al. 2022 (PaLM), appendix B: per token

    6 N + 12 L H Q S

N: parameters that take part in a matrix product: every linear layer and the language-model head, tied to the
embedding or not. The embedding look-up, norms, biases and positions are not in N. L layers, H heads of size
Q, S tokens in a sequence. A multiplication and its addition are two FLOPs; backward costs twice the forward;
activation recomputation is not counted (model FLOPs, not hardware FLOPs); attention is counted in full, not
halved for causality. Others count embeddings, or half the attention, and get another MFU for the same speed.

A Mamba has no attention term. Its scan and its convolution over 4 tokens are not in N: their products would
add 0.3 % to `mamba-1.6b`, 6 % to `mamba-tiny`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfsuite.result import Flops

if TYPE_CHECKING:
    from perfsuite.models import Model

FORMULA = "palm-1"


def flops_per_token(
    *, matmul_parameters: int, layers: int, heads: int, head_size: int, sequence_length: int
) -> float:
    """FLOPs of forward and backward for one token, by the formula above."""
    return 6.0 * matmul_parameters + 12.0 * layers * heads * head_size * sequence_length


def count(model: Model, sequence_length: int) -> Flops:
    """Count a model built on the meta device: no memory, whatever the size. Imports torch."""
    import torch

    from perfsuite.torch_model import transformers_config, transformers_model

    config = transformers_config(model)
    with torch.device("meta"):
        built = transformers_model(config, attention="eager")
    weights = [
        module.weight
        for module in built.modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    matmul = sum(weight.numel() for weight in weights if isinstance(weight, torch.Tensor))
    heads = getattr(config, "num_attention_heads", 0)
    head_size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return Flops(
        formula=FORMULA,
        per_token=flops_per_token(
            matmul_parameters=matmul,
            layers=config.num_hidden_layers,
            heads=heads,
            head_size=head_size,
            sequence_length=sequence_length,
        ),
        parameters=sum(parameter.numel() for parameter in built.parameters()),
        matmul_parameters=matmul,
    )
