"""Read the norm of the gradients before they are clipped, in one step that is not timed. Imports torch.

Clipping reduces every larger norm to `max_norm`. After clipping, the norm therefore does not show whether all
gradients were too large by a common factor. So the norm is read when a script or its library begins to clip,
and after each backward.

accelerate, the Trainer, Lightning and torchtitan clip with functions of `torch.nn.utils`. They use these
functions for all tensors, including the DTensors of FSDP2. FSDP1 has its own function. Libraries of
frameworks can also have their own functions (`Library.clips`), or an engine that knows the norm.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from perfsuite.errors import PrivateNameError
from perfsuite.frameworks.common.private import disable_current_modes, loss_scale, scaled_optimizers
from perfsuite.worker.hooks import calls, libraries
from perfsuite.worker.observation import scalers
from perfsuite.worker.observation.optimizers import parameters_of
from perfsuite.worker.observation.replicas import squares
from perfsuite.worker.observation.second_step import in_backward

CLIPPING = ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_")
"""Functions of `torch.nn.utils` that clip gradients. Older versions of torch do not have the second one."""
FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.clip_grad_norm_"
SAME = 1e-3  # largest relative difference that rounding can cause between two norms of the same gradients
UNREAD = "the norm of the gradients before clipping is unknown: the gradients were not available"
CHANGED = (
    "the norm of the gradients before clipping is unknown: the norm was {:.4g} after backward and {:.4g} at "
    "the optimizer's step, but none of the known clipping functions was called"
)

_reader: NormBeforeClipping | None = None  # the reader of the running step; None if no norm is read
after_backward: Callable[[], object] | None = None  # called at the end of each backward, if it is not None
_with_graph = 0  # number of running backward passes that make a graph of their own (`create_graph=True`)


class NormBeforeClipping:
    """Reads the squared norm of `optimizer`'s gradients, in the one step between `enter` and `leave`.

    `unseen` calls a function without counting it as work of the step. `others` are the parameters of other
    optimizers. Clipping their gradients does not clip those of `optimizer`.
    """

    def __init__(
        self, optimizer: Any, unseen: Callable[..., Any], others: Callable[[], Iterable[Any]] = tuple
    ) -> None:
        self.note: str | None = None  # why the norm is unknown
        self._optimizer = optimizer
        self._unseen = unseen
        self._others = others
        self._after_backward: float | None = None
        self._before_clipping: float | None = None
        self._saw_backward = False
        self._error: str | None = None
        self._is_clipped = False

    def enter(self) -> None:
        """Start reading, at the beginning of a step."""
        global _reader
        watch()
        _reader = self

    def leave(self) -> None:
        """Stop reading."""
        global _reader
        if _reader is self:
            _reader = None

    def clips(self, clipped: Any) -> None:
        """Read the norm before gradients are clipped, unless they were already clipped in this step.

        `clipped` is the first argument of the clipping function: parameters, or a module that has them.
        """
        if not self._is_clipped and not self._unseen(self._are_of_others, clipped):
            self._is_clipped = True
            self._before_clipping = self._unseen(self.read)

    def _are_of_others(self, clipped: Any) -> bool:
        """Return whether these parameters are known to belong to other optimizers."""
        ids = set(map(id, _clipped_parameters(clipped)))
        own = map(id, parameters_of(self._optimizer))
        return not ids.isdisjoint(map(id, self._others())) and ids.isdisjoint(own)

    def backward_ended(self) -> None:
        """Read the norm after a backward. After a step's last backward, the norm covers all micro-batches.

        If the norm is infinite when gradients are clipped, fp16's loss scaler skips this step. The norm is
        then read again after the next backward.
        """
        self._saw_backward = True
        if self._before_clipping is not None and not math.isfinite(self._before_clipping):
            self._before_clipping = None
            self._is_clipped = False
        if not self._is_clipped:
            self._after_backward = self._unseen(self.read)

    def failed(self, error: Exception) -> None:
        """Stop reading after an error in perfsuite."""
        self._error = f"{type(error).__name__}: {error}"
        self.leave()

    def result(self, at_step: float | None) -> float | None:
        """Return the squared norm before clipping, or None if it is unknown.

        `at_step` is the squared norm of the gradients that the optimizer gets. If a known clipping function
        was called, the result is the norm that was read before that call. If none was called, `at_step` is
        compared with the norm after backward. If the two are the same (see `SAME`), `at_step` is the result.
        If they differ, the training clips in its own way or averages the gradients only after backward, and
        the result is unknown. If neither clipping nor a backward was seen, the result is also unknown.
        """
        if self._error is not None:
            self.note = f"the norm of the gradients before clipping is unknown: {self._error}"
            return None
        if self._is_clipped:
            self.note = UNREAD if self._before_clipping is None else None
            return self._before_clipping
        if at_step is None or not self._saw_backward:
            return None
        if self._after_backward is None:
            self.note = UNREAD
            return None
        before, now = (each**0.5 for each in (self._after_backward, at_step))
        if abs(now - before) <= SAME * before:
            return at_step
        self.note = CHANGED.format(before, now)
        return None

    def read(self) -> float | None:
        """Return the squared norm of the optimizer's gradients, without the scale of fp16's loss scaler."""
        held = squares(each.grad for each in parameters_of(self._optimizer))
        scale = scale_of(self._optimizer, scalers.living)
        return held / scale**2 if held is not None and scale else None


def scale_of(optimizer: Any, known_scalers: Iterable[Any]) -> float | None:
    """Return the factor by which a loss scaler for fp16 has multiplied the gradients, or None if unknown."""
    by_itself = getattr(optimizer, "grad_scale", None)
    if by_itself is not None:  # a fused optimizer divides by the scale
        return _number(by_itself)
    try:
        used = [each for each in known_scalers if each.is_enabled() and loss_scale(each) is not None]
        states = [scaled_optimizers(each).get(id(optimizer)) for each in used]
    except PrivateNameError:
        return None
    is_unscaled = any(state is not None and state["stage"].name != "READY" for state in states)
    if is_unscaled or not used:
        return 1.0
    return _number(loss_scale(used[0])) if len(used) == 1 else None


def _number(value: Any) -> float:
    with disable_current_modes():
        return float(value)


def watch() -> None:
    """Hook backward, new loss scalers and clipping functions.

    Call this before a script imports any of them by name.
    """
    _notice_backward()
    _notice_passes_with_graph("backward", 3)
    _notice_passes_with_graph("grad", 4)
    scalers.watch_new()
    utils: Any = torch.nn.utils
    for name in CLIPPING:
        for owner in (utils, utils.clip_grad):
            _notice(owner, name)
    for function in (FSDP1, *(each for library in libraries.imported() for each in library.clips)):
        module, _, path = function.partition(":")
        *parents, name = path.split(".")
        holder: Any = sys.modules.get(module)
        for parent in parents:
            holder = getattr(holder, parent, None)
        _notice(holder, name)


def _notice(owner: Any, name: str) -> None:
    function = getattr(owner, name, None)
    if function is not None and not hasattr(function, "is_watched"):
        calls.before(owner, name, _clips)


def _clips(*args: Any, **kwargs: Any) -> None:
    clipped = args[0] if args else kwargs.get("parameters")
    _show(lambda reader: reader.clips(clipped))


def _clipped_parameters(clipped: Any) -> list[Any]:
    """Return the parameters in the argument of a clipping function. Empty if they are unknown.

    An iterator is not consumed, because the clipping function needs it. If the iterator comes
    from `Module.parameters`, it is known from which module.
    """
    if isinstance(clipped, GeneratorType) and clipped.gi_code is nn.Module.parameters.__code__:
        clipped = clipped.gi_frame.f_locals["self"] if clipped.gi_frame is not None else ()
    if isinstance(clipped, Tensor):
        return [clipped]
    if isinstance(clipped, nn.Module):
        return [*clipped.parameters()]
    return [*clipped] if isinstance(clipped, Collection) else []


def _show(look: Callable[[NormBeforeClipping], None]) -> None:
    """Call `look` with the reader, if there is one. An error ends the reading, but not the training."""
    reader = _reader
    if reader is None:
        return
    try:
        if not in_backward():
            look(reader)
    except Exception as error:
        reader.failed(error)


def makes_a_graph() -> bool:
    """Return whether the running backward pass makes a graph of its own, for gradients of higher order.

    In such a pass, gradients are enabled, as they are when activations are recomputed.
    """
    return _with_graph > 0


def _notice_passes_with_graph(name: str, position: int) -> None:
    """Hook a function of `torch.autograd` that has the argument `create_graph` at this position."""
    original: Any = getattr(torch.autograd, name)
    if hasattr(original, "counts_graphs"):
        return

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        global _with_graph
        creates = kwargs.get("create_graph", args[position] if len(args) > position else False)
        if not creates:
            return original(*args, **kwargs)
        _with_graph += 1
        try:
            return original(*args, **kwargs)
        finally:
            _with_graph -= 1

    watched.counts_graphs = True  # type: ignore[attr-defined]
    setattr(torch.autograd, name, watched)


def _notice_backward() -> None:
    """Hook the end of each backward, including `Tensor.backward`.

    This is needed because scripts and libraries can clip without calling one of the hooked clipping
    functions.
    """
    original: Any = torch.autograd.backward
    if hasattr(original, "tells_its_end"):
        return

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _show(NormBeforeClipping.backward_ended)
        if after_backward is not None:
            after_backward()
        return result

    watched.tells_its_end = True  # type: ignore[attr-defined]
    torch.autograd.backward = watched
