"""Operators that are one kernel on a GPU, and in a build of torch for CPUs a chain of others. Worker side;
imports torch.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

ONE_KERNEL = ("_fused_rms_norm", "_fused_rms_norm_backward", "mish_backward", "silu_backward")
"""Operators that `native_functions.yaml` of torch gives a kernel for CUDA, and makes of others elsewhere."""

_kept: list[Any] = []
"""What is registered stays so as long as its library lives."""


def pretend() -> None:
    """Have torch know of a kernel for each of `ONE_KERNEL`, for the rest of this process.

    It is never run: a fake tensor asks for the shape of a result alone.
    """
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)
    for name in ONE_KERNEL:
        library.impl(name, _never, "CUDA")


def _never(*args: Any) -> NoReturn:
    raise AssertionError("a fake tensor has no values to compute with")
