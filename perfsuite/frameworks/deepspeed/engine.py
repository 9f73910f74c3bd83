"""Facts that ranks need about DeepSpeed. A step of DeepSpeed's engine is a training step.

To count training steps, perfsuite counts the steps of this engine, and not those of torch's optimizer. In one
training step, ZeRO steps torch's optimizer several times, each time for a flat partition of the parameters.
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
        """Return the ZeRO stage as text. The stage determines what is partitioned. None for stage 0."""
        stage = int(engine.zero_optimization_stage())
        return f"DeepSpeed ZeRO-{stage}" if stage else None

    def gradient_norm(self, engine: Any) -> float | None:
        """Return the norm that the engine has kept, because the gradients themselves are already freed."""
        norm = engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def loss_scale(self, engine: Any) -> float | None:
        """Return the scale of DeepSpeed's own loss scaler, which is 1 without fp16.

        Returns None if the optimizer has no loss scaler.
        """
        scale = getattr(engine.optimizer, "loss_scale", None)
        return None if scale is None else float(scale)


LIBRARY = Library(
    events={
        "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint": "save checkpoint",
        "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint": "load checkpoint",
    },
    engine=ZeroEngine(),
    shard="ds_tensor",  # used by ZeRO-3
)
