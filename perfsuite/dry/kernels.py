"""Operators whose kernel for CUDA a build of torch for CPUs lacks. Worker side; imports torch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

ONE_KERNEL = ("_fused_rms_norm", "_fused_rms_norm_backward", "mish_backward", "silu_backward")
"""Operators of torch's `native_functions.yaml` that are one kernel for CUDA. Where that kernel is missing,
torch makes most of them of other operators."""

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
