"""The rule of thumb for memory of model and optimizer, to set beside what was measured. Pure.

16 bytes for each trained parameter (Rajbhandari et al. 2020, ZeRO, section 3.1): weights and gradients in 16
bits, and Adam's fp32 copy of the weights, momentum and variance. Kept in fp32 with 16-bit compute, as
`bf16-mixed` is here, the same 16 are shared out 4, 4 and 8. The rule knows no buckets: DDP keeps a second
copy of the gradients in them, unless these are views of the buckets (`gradient_as_bucket_view`). Activations,
other buffers of the communication and gathered parameters come on top.
"""

from __future__ import annotations

from typing import Literal

from perfsuite.documents import Data

WEIGHT_BYTES = 2
GRADIENT_BYTES = 2
ADAM_BYTES = 12
BUCKET_BYTES = 4
"""Of the buckets of DDP, where gradients are in fp32."""

ZeroStage = Literal[0, 1, 2, 3]
"""What is sharded: nothing; optimizer state; gradients, too (SHARD_GRAD_OP); weights, too (FULL_SHARD)."""


class ModelMemory(Data):
    """Bytes on each rank, by what they hold."""

    weights: float
    gradients: float
    optimizer: float
    buckets: float = 0

    @property
    def total(self) -> float:
        """All four."""
        return self.weights + self.gradients + self.optimizer + self.buckets


def model_memory(
    parameters: int,
    *,
    trained: int | None = None,
    frozen_bytes: float = WEIGHT_BYTES,
    ranks: int = 1,
    zero_stage: ZeroStage = 0,
    buckets: bool = False,
) -> ModelMemory:
    """Of a model with so many parameters, of which `trained` (None: all) have gradients and optimizer state.

    `frozen_bytes`: of each of the others; 1 in 8 bits, 0.5 in 4. `buckets`: of DDP, beside fp32 gradients.
    """
    trained = parameters if trained is None else trained
    weights, gradients, optimizer = (ranks if zero_stage >= stage else 1 for stage in (3, 2, 1))
    return ModelMemory(
        weights=(WEIGHT_BYTES * trained + frozen_bytes * (parameters - trained)) / weights,
        gradients=GRADIENT_BYTES * trained / gradients,
        optimizer=ADAM_BYTES * trained / optimizer,
        buckets=BUCKET_BYTES * trained if buckets else 0,
    )
