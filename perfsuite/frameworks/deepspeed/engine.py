"""Facts about DeepSpeed for ranks: the step of its engine is the training step.

The steps of torch's optimizer cannot be counted, because ZeRO steps it several times in a training step, over
flat partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from perfsuite.frameworks.base import Engine, Library

NOT_DRY = "DeepSpeed's decisions depend on gradients and on other ranks, which a dry run does not have"


class ZeroEngine(Engine):
    """`DeepSpeedEngine`, with or without ZeRO."""

    path: ClassVar[str] = "deepspeed.runtime.engine:DeepSpeedEngine"
    step: ClassVar[str] = "_take_model_step"
    not_dry: ClassVar[str | None] = NOT_DRY

    def optimizers(self, engine: Any) -> Sequence[Any]:
        """Return ZeRO's optimizer, and the torch optimizer in it."""
        zero = engine.optimizer
        return zero, getattr(zero, "optimizer", None)

    def sharding(self, engine: Any) -> str | None:
        """Return the ZeRO stage as text, because each stage partitions different data. None for stage 0."""
        stage = int(engine.zero_optimization_stage())
        return f"DeepSpeed ZeRO-{stage}" if stage else None

    def gradient_norm(self, engine: Any) -> float | None:
        """Return the norm that the engine has kept. The gradients themselves are already gone."""
        norm = engine.get_global_grad_norm()
        return None if norm is None else float(norm)


LIBRARY = Library(
    events={
        "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint": "save checkpoint",
        "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint": "load checkpoint",
    },
    engine=ZeroEngine(),
    shard="ds_tensor",  # used by ZeRO-3
)
