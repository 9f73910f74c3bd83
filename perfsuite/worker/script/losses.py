"""Collect the losses of a script, which are the tensors on which it calls backward. Imports torch."""

from statistics import mode
from typing import Any

import torch
from torch import Tensor

from perfsuite.errors import MismatchError
from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.frameworks.common.private import disable_current_modes, shard_of
from perfsuite.worker.observation import engines, scalers
from perfsuite.worker.observation.optimizers import parameters_of
from perfsuite.worker.observation.second_step import in_backward, nodes_of

SEVERAL_ENGINES = (
    "the loss is unknown: several engines train, and they multiply their losses by different factors for fp16"
)


class Losses:
    """The scalars on which backward is called, summed over the micro-batches of each step.

    The losses stay on the device in fp32, so that nothing waits for them. The factor of a loss scaler for
    fp16 is removed. If the scaler skips an optimizer step, the passes since the previous step do not count.

    In the second step, the graph of each loss is searched for parameters of the clock's optimizer. If the
    graphs of some losses lead to such a parameter, only these losses count in the second step. In all other
    steps, only the losses at the same positions count. If no graph leads to such a parameter, all losses
    count. With FSDP, no graph does, because graphs do not end in the optimizer's tensors.

    If the first step has more losses than the second step, its extra losses at the beginning do not count.
    They were not part of the training.
    """

    def __init__(self) -> None:
        self._sums = OwnList[Tensor | None]()  # the loss of each step
        self._summed: list[int] = []  # number of losses in each sum
        self._first: list[Tensor] = []  # the losses of the first step
        # For each position in a step: whether the loss at this position counts. It is set in the second step.
        self._counts: list[bool] = []
        self._stepped: set[int] = set()  # ids of the timed optimizer's parameters, set after the first step
        self.were_scaled = False  # whether the factor of a loss scaler was removed from any loss
        self.unknown: str | None = None  # why the losses are unknown
        self._begin_step()

    def _begin_step(self) -> None:
        self._place = 0
        self._seen: list[Tensor] = []  # used in the first two steps. In later steps, only a sum is kept
        self._total: Tensor | None = None
        self._counted = 0

    def see(self, loss: Tensor) -> None:
        """Record a loss on which backward is about to be called."""
        value = self._value(loss)
        place = self._place
        self._place += 1
        if len(self._sums) < 2:
            self._seen.append(value)
            if len(self._sums) == 1:
                self._counts.append(_leads_to(loss, self._stepped))
        elif place >= len(self._counts) or self._counts[place]:
            self._total = value if self._total is None else self._total + value
            self._counted += 1

    def _value(self, loss: Tensor) -> Tensor:
        scaled = scalers.before_scaling(loss)
        if scaled is not None and scaled.loss is not None:
            self.were_scaled = True
            return _copied(scaled.loss)
        value = _copied(loss)
        scale = engines.loss_scale() if scaled is None else scalers.scale_of(scaled.scaler, value.device)
        if scale is None:
            self.unknown = SEVERAL_ENGINES
        elif scaled is not None or scale != 1.0:
            self.were_scaled = True
            with disable_current_modes():  # this work of perfsuite is not counted
                value /= scale
        return value

    def skip_step(self) -> None:
        """Forget the losses since the last step, because the optimizer does not step after these passes."""
        if len(self._sums) == 1:
            self._counts = []
        self._begin_step()

    def end_step(self, optimizer: Any) -> None:
        """End a step of `optimizer`."""
        match len(self._sums):
            case 0:
                self._first = self._seen
                self._stepped = set(map(id, parameters_of(optimizer)))
                self._append(self._first)
            case 1:
                if not any(self._counts):
                    self._counts = [True] * len(self._counts)
                self._sums.clear()
                self._summed.clear()
                for losses in (self._first[-len(self._counts) :], self._seen):
                    self._append(self._that_count(losses))
            case _:
                self._sums.append(self._total)
                self._summed.append(self._counted)
        self._begin_step()

    def _append(self, losses: list[Tensor]) -> None:
        self._sums.append(torch.stack(losses).sum() if losses else None)
        self._summed.append(len(losses))

    def _that_count(self, losses: list[Tensor]) -> list[Tensor]:
        if len(losses) != len(self._counts):
            return losses
        return [loss for loss, counts in zip(losses, self._counts, strict=True) if counts]

    def of_steps(self, micro_batches: int) -> tuple[float, ...]:
        """Return the loss of each step. Raises `MismatchError` for the same reasons as `check`."""
        self.check(micro_batches)
        return tuple(float(total) for total in self._sums if total is not None)

    def check(self, micro_batches: int, *, more_come: bool = False) -> None:
        """Raise `MismatchError` if a step has no loss, or if most steps do not have `micro_batches` losses.

        With `more_come`, only the first steps have ended, and a loss scaler of fp16 that perfsuite does not
        know might have skipped some of them. A wrong number of losses is then an error only if it is the same
        in all steps.
        """
        passes = self._summed
        if 0 in passes:
            raise MismatchError(
                f"loss: backward was not called on a scalar in step {passes.index(0)}. "
                "If the script's loss cannot be observed this way, give loss=None"
            )
        usual = mode(passes)
        if usual != micro_batches and not (more_come and len(set(passes)) > 1):
            raise MismatchError(
                f"gradient_accumulation: the case says {micro_batches}, but backward was called on {usual} "
                "losses per step. Correct the case, or give loss=None if the script does not call backward "
                "on one loss per micro-batch"
            )


class Passes(Losses):
    """Counts the calls of backward without keeping the losses, for a dry run."""

    def _value(self, loss: Tensor) -> Tensor:
        return torch.zeros(())


def loss_of(tensors: Any) -> Tensor | None:
    """Return the tensor (of any size) on which backward is called, or None if this call does not train.

    A call does not train if it recomputes activations inside another backward. A call on the meta device does
    not train either, because it only counts operations without data.
    """
    if isinstance(tensors, list | tuple) and len(tensors) == 1:
        tensors = tensors[0]
    is_training = isinstance(tensors, Tensor) and not tensors.is_meta and not in_backward()
    return tensors if is_training else None


def _copied(loss: Tensor) -> Tensor:
    """Return a copy of a loss in fp32, because a script might later average the loss in place.

    The copy has no dimensions. A loss can have dimensions: backward also accepts `[[0.5]]`.
    """
    local: Tensor = shard_of(loss)
    # The copy comes last, because a view of a copy would keep two tensors.
    return local.detach().reshape(()).to(torch.float32, copy=True)


def _leads_to(loss: Tensor, wanted: set[int]) -> bool:
    """Return whether backward from `loss` reaches a tensor whose id is in `wanted`."""
    if loss.grad_fn is None:
        return id(loss) in wanted
    return any(id(getattr(node, "variable", None)) in wanted for node in nodes_of(loss))
