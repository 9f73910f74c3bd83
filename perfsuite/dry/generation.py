"""Let `generate` of transformers make as many tokens as it may. Worker side; imports torch.

Fake tokens have no values, so nothing can show that a token ends its sequence. `generate` would read an
invented True when it asks whether all sequences have ended, and would make a single token. Here, no sequence
ends before it has its maximum length.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from perfsuite.frameworks.common.patches import wrap
from perfsuite.frameworks.common.private import FakeTensor, overloadpacket

CRITERIA = "transformers.generation.stopping_criteria"
"""The module with the method that `pretend` replaces."""

_aten = torch.ops.aten
_PASS_ON = {_aten.bitwise_not: 0, _aten.bitwise_and: 1, _aten.max: 0, _aten.eq: 0}
"""The operators in `(unfinished & ~criteria(...)).max() == 0`, with which transformers asks whether all
sequences have ended. The number is the position of the argument whose mark (`_mark`) passes to the result."""


def pretend(criteria: Any) -> None:
    """Replace the check of all criteria, in the module `CRITERIA`, for the rest of this process."""
    wrap(criteria.StoppingCriteriaList, "__call__", _up_to_the_maximum)


def _up_to_the_maximum(call: Any) -> Any:
    @functools.wraps(call)
    def called(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ended = call(self, input_ids, *args, **kwargs)
        if isinstance(ended, FakeTensor) and input_ids.shape[-1] < (self.max_length or 0):
            _mark(ended)
        return ended

    return called


def follow(func: Any, args: Any, out: Any) -> None:
    """Record whether `out`, the result of an operator, says that the sequences go on."""
    position = _PASS_ON.get(overloadpacket(func))
    if position is None or not isinstance(out, FakeTensor):
        return
    if len(args) > position and go_on(args[position]):
        _mark(out)


def _mark(tensor: Any) -> None:
    tensor.sequences_go_on = True


def go_on(tensor: Any) -> bool:
    """Return whether a tensor says that the sequences go on. The host then reads it as False (not ended)."""
    return getattr(tensor, "sequences_go_on", False)
