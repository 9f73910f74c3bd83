"""Describe DeepSpeed to ranks: the step of its engine is the clock, and the engine owns what it partitions.

ZeRO steps an optimizer of torch over flat partitions, several times in one training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from perfsuite.frameworks.base import Engine, Library

NOT_DRY = "DeepSpeed decides by values of gradients and of other ranks, which a dry run lacks"


class ZeroEngine(Engine):
    """`DeepSpeedEngine`, with or without ZeRO."""

    path: ClassVar[str] = "deepspeed.runtime.engine:DeepSpeedEngine"
    step: ClassVar[str] = "_take_model_step"
    not_dry: ClassVar[str | None] = NOT_DRY

    def optimizers(self, engine: Any) -> Sequence[Any]:
        """Return ZeRO's optimizer, and torch's in it."""
        zero = engine.optimizer
        return zero, getattr(zero, "optimizer", None)

    def sharding(self, engine: Any) -> str | None:
        """Return the stage of ZeRO. Each stage partitions different data among ranks."""
        stage = int(engine.zero_optimization_stage())
        return f"DeepSpeed ZeRO-{stage}" if stage else None

    def gradient_norm(self, engine: Any) -> float | None:
        """Return the norm that the engine keeps; it keeps no gradients."""
        norm = engine.get_global_grad_norm()
        return None if norm is None else float(norm)


LIBRARY = Library(
    events={
        "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint": "save checkpoint",
        "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint": "load checkpoint",
    },
    engine=ZeroEngine(),
    shard="ds_tensor",  # of ZeRO-3
)
