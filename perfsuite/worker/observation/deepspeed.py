"""Measure DeepSpeed: its engine's step is the clock, and the engine owns what it partitions.

ZeRO steps an optimizer of torch over flat partitions, several times in one training step.
"""

import functools
import importlib.metadata
import sys
import traceback
from collections.abc import Callable
from typing import Any

from perfsuite.errors import MismatchError
from perfsuite.worker.observation.optimizers import living

STEP = "_take_model_step"  # the method of an engine that makes one training step
NAME = "DeepSpeedEngine"


def takes(optimizer: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> bool:
    """Return whether a step of `optimizer` is part of a DeepSpeed step.

    `before` and `after` are then called with `optimizer` around the engine's steps, from the second on.
    Raises `MismatchError` if DeepSpeed steps it outside of an engine's step.
    """
    callers = _callers() if "deepspeed" in sys.modules else []
    if not callers:
        return False
    engine = next((self_ for name, self_ in callers if name == STEP), None)
    if engine is None and not any(name == "__init__" for name, _ in callers):
        raise MismatchError(
            f"DeepSpeed {importlib.metadata.version('deepspeed')} steps {type(optimizer).__name__} "
            f"outside of {NAME}.{STEP}, by {callers[0][0]}: what is one step of training is not known. "
            "Train by engine.backward and engine.step, with another version of DeepSpeed, or without it"
        )
    if engine is not None and STEP not in vars(engine):
        step = getattr(engine, STEP)

        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> None:
            before(optimizer)
            step(*args, **kwargs)
            after(optimizer)

        setattr(engine, STEP, timed)
    return True


def _callers() -> list[tuple[str, Any]]:
    """Return the running functions of DeepSpeed, innermost first, each with its `self`."""
    return [
        (frame.f_code.co_name, frame.f_locals.get("self"))
        for frame, _ in traceback.walk_stack(sys._getframe())
        if str(frame.f_globals.get("__name__", "")).startswith("deepspeed.")
    ]


def gradient_norm(optimizer: Any) -> float | None:
    """Return the gradient norm over all ranks in the last step of the engine that has `optimizer`.

    It is the norm before clipping and without fp16's scale; None without an engine, or if the engine does not
    know it.
    """
    norm = getattr(engine_of(optimizer), "get_global_grad_norm", lambda: None)()
    return None if norm is None else float(norm)


def engine_of(optimizer: Any) -> Any:
    """Return the living engine that owns `optimizer`; None if there is none."""
    module: Any = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return None
    for engine in living(module.DeepSpeedEngine):
        zero = engine.optimizer
        if optimizer in (zero, getattr(zero, "optimizer", None)):
            return engine
    return None
