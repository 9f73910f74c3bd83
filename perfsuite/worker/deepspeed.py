"""DeepSpeed: the step of its engine is the clock, and what it partitions belongs to the engine. Worker side.

ZeRO steps an optimizer of torch over flat partitions that are no module's parameters, once for each group of
parameters, and also when it is built, to make the optimizer's state. `DeepSpeedEngine._take_model_step` runs
once for each step of training: at the end of gradient accumulation. Imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

from perfsuite.errors import MismatchError

STEP = "_take_model_step"
"""The method of an engine that makes one step of training."""
NAME = "DeepSpeedEngine"


class Engines:
    """Follows each engine that steps: `before` and `after` are called around its steps from the second on,
    with the optimizer in it. (The first one is known by its optimizer, when half of it is over.)"""

    def __init__(self, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        self._before = before
        self._after = after

    def take(self, optimizer: Any) -> bool:
        """Whether the step that `optimizer` makes just now is a part of what DeepSpeed does.

        Raises `MismatchError` for a DeepSpeed that steps it elsewhere.
        """
        if "deepspeed" not in sys.modules:
            return False
        callers = _callers()
        if not callers:
            return False
        engine = next((self_ for name, self_ in callers if name == STEP), None)
        if engine is not None:
            self._follow(engine, optimizer)
        elif not any(name == "__init__" for name, _ in callers):
            raise MismatchError(
                f"DeepSpeed {importlib.metadata.version('deepspeed')} steps {type(optimizer).__name__} "
                f"outside of {NAME}.{STEP}, by {callers[0][0]}: what is one step of training is not known. "
                "Train by engine.backward and engine.step, with another version of DeepSpeed, or without it"
            )
        return True

    def _follow(self, engine: Any, optimizer: Any) -> None:
        if STEP in vars(engine):
            return
        step = getattr(engine, STEP)

        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> None:
            self._before(optimizer)
            step(*args, **kwargs)
            self._after(optimizer)

        setattr(engine, STEP, timed)


def _callers() -> list[tuple[str, Any]]:
    """DeepSpeed's functions that are running, innermost first, with their `self`."""
    found = []
    frame: Any = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("deepspeed."):
            found.append((frame.f_code.co_name, frame.f_locals.get("self")))
        frame = frame.f_back
    return found


def engine_of(optimizer: Any) -> Any:
    """The living engine that `optimizer` is in, None where there is none."""
    module: Any = sys.modules.get("deepspeed.runtime.engine")
    if module is None:
        return None
    living = (thing for thing in gc.get_objects() if issubclass(type(thing), module.DeepSpeedEngine))
    return next((engine for engine in living if optimizer in _wrapped(engine.optimizer)), None)


def _wrapped(optimizer: Any) -> list[Any]:
    """ZeRO's optimizer, and what it steps."""
    return [optimizer, getattr(optimizer, "optimizer", None)]


def sharding(engine: Any) -> str | None:
    """What an engine partitions among ranks: by its stage of ZeRO, or None."""
    stage = int(engine.zero_optimization_stage())
    return f"DeepSpeed ZeRO-{stage}" if stage else None
