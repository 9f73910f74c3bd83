"""Follow torch's loss scalers for fp16: which losses they scale, and which steps they skip. Imports torch.

A scaler is an object of torch's `GradScaler` or of a class that derives from it. FSDP1, accelerate, the
Trainer, Lightning and the `torch_autocast` mode of DeepSpeed use these classes. A scaler multiplies the loss
by its scale. If the gradients overflow, the scaler skips the optimizer's step, and lowers the scale.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perfsuite.frameworks.common.private import disable_current_modes, scaled_optimizers
from perfsuite.worker.hooks import calls
from perfsuite.worker.hooks.named import Wrap, wrap_method
from perfsuite.worker.observation.second_step import nodes_of

MARK = "perfsuite: scaled"  # key in the metadata of the autograd node that scales a loss
NODES_NEAR = 20  # maximum number of autograd nodes to search for a scaled loss, the nearest first

living: weakref.WeakSet[Any] = weakref.WeakSet()  # the scalers that were created since `watch`
has_scaled = False  # whether any scaler has scaled a loss since `watch`
_attempts: list[Attempt] = []  # calls of a scaler's `step` that are running, the outermost first
_skipped: Callable[[Any], object] = id


class Scaled(NamedTuple):
    """The origin of a scaled loss."""

    scaler: Any
    loss: Tensor | None  # the loss before it was scaled. None if it is unknown


class Attempt:
    """A call of a scaler's `step`."""

    def __init__(self) -> None:
        self.has_stepped = False  # whether the scaler has called an optimizer's step


def watch(skipped: Callable[[Any], object]) -> None:
    """Follow each scaler that is created from now on.

    After a scaler has skipped a step of an optimizer, `skipped` is called with this optimizer. `skipped` must
    not raise errors.
    """
    global _skipped, has_scaled
    _skipped = skipped
    has_scaled = False
    _attempts.clear()
    watch_new()


def watch_new() -> None:
    """From now on, add each new scaler to `living`, and follow its class."""
    if not hasattr(torch.amp.GradScaler.__init__, "is_watched"):
        calls.before(torch.amp.GradScaler, "__init__", _created)


def stepped() -> None:
    """Record that an optimizer has stepped. Call this after each step of any optimizer."""
    for attempt in _attempts:
        attempt.has_stepped = True


def before_scaling(loss: Tensor) -> Scaled | None:
    """Return how `loss` was scaled, or None if no scaler has scaled it.

    The scaled loss can have been changed afterwards, for example divided by a number of micro-batches. Then
    the value before scaling is unknown, but the scaler is known.
    """
    if not has_scaled:
        return None
    for distance, node in enumerate(islice(nodes_of(loss), NODES_NEAR)):
        scaled = node.metadata.get(MARK)
        if scaled is not None:
            return scaled if distance == 0 else Scaled(scaled.scaler, None)
    return None


def scale_of(scaler: Any, device: torch.device) -> Tensor:
    """Return the scale of a scaler, without waiting for the device."""
    with disable_current_modes():  # this work of perfsuite is not counted
        scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale


def _created(scaler: Any, *_: Any, **__: Any) -> None:
    with contextlib.suppress(Exception):  # a script's class can be unusual
        living.add(scaler)
        for kind in type(scaler).__mro__:
            _follow(kind, "scale", _following_scale)
            _follow(kind, "step", _following_step)


def _follow(kind: type, name: str, wrap: Wrap) -> None:
    method = vars(kind).get(name)
    if method is not None and not hasattr(method, "is_watched"):
        wrap_method(kind, name, wrap)


def _following_scale(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def watched(scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = scale(scaler, outputs, *args, **kwargs)
        return _marked(scaler, outputs, scaled)

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched


def _marked(scaler: Any, outputs: Any, scaled: Any) -> Any:
    """Mark losses that were scaled, and return them. Errors never reach the training."""
    try:
        if not scaler.is_enabled():
            return scaled
        if isinstance(scaled, Tensor):
            _mark(scaler, outputs, scaled)
        elif isinstance(scaled, list | tuple):
            for before, after in zip(outputs, scaled, strict=True):
                _marked(scaler, before, after)
        elif isinstance(scaled, Iterator):
            # The iterator scales the losses only later, so their unscaled values are unknown.
            return (_marked(scaler, None, after) for after in scaled)
    except Exception:  # the loss then counts as unscaled
        return scaled
    return scaled


def _mark(scaler: Any, loss: Tensor | None, scaled: Tensor) -> None:
    global has_scaled
    node: Any = scaled.grad_fn
    if node is not None:
        # If the scaler returns its input, do not store the loss. Otherwise, the loss and its autograd node
        # would keep each other alive.
        node.metadata[MARK] = Scaled(scaler, None if loss is scaled else loss)
        has_scaled = True


def _following_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def watched(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return step(scaler, optimizer, *args, **kwargs)
        attempt = Attempt()
        _attempts.append(attempt)
        try:
            result = step(scaler, optimizer, *args, **kwargs)
        finally:
            _attempts.remove(attempt)
        if not attempt.has_stepped and not _attempts and _has_overflowed(scaler, optimizer):
            _skipped(optimizer)
        return result

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched


def _has_overflowed(scaler: Any, optimizer: Any) -> bool:
    """Return whether the scaler has found an overflow in the gradients of an optimizer.

    A missing optimizer step does not prove an overflow, because an optimizer can have a `step` of its own
    that only accumulates. Reading the overflow flag does not wait for the device again, because the scaler
    has already read it to decide whether to step.
    """
    try:
        found = scaled_optimizers(scaler)[id(optimizer)]["found_inf_per_device"].values()
        with disable_current_modes():  # this work of perfsuite is not counted
            return any(value.item() for value in found)
    except Exception:  # a script's class can be unusual
        return False
