"""FSDP1 around fake tensors, which have no addresses to compare. For a dry run; imports torch."""

from __future__ import annotations

from typing import Any

from perfsuite.frameworks.common.patches import module, replace


def pretend() -> None:
    """Let FSDP1 shard fake tensors, for the rest of this process."""
    flat_param = module("torch.distributed.fsdp._flat_param")
    replace(flat_param, "_data_ptr_allocated", _is_allocated)
    replace(flat_param, "_same_storage", _share_storage)


def _is_allocated(tensor: Any) -> bool:
    return bool(tensor.untyped_storage().nbytes() > 0)


def _share_storage(a: Any, b: Any) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
