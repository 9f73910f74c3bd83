"""What FSDP1 is given instead; that it does what a real launch does is compared in dry/test_rank.py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import _flat_param

from perfsuite.errors import DryRunError
from perfsuite.frameworks.common import pretend_fsdp


def test_names_that_torch_has_dropped_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_flat_param, "_data_ptr_allocated")
    with pytest.raises(DryRunError, match=r"has no torch\.distributed\.fsdp\._flat_param\._data_ptr_alloc"):
        pretend_fsdp.pretend()


def test_storages_stand_in_for_addresses() -> None:
    whole, other = torch.ones(4), torch.ones(4)
    assert pretend_fsdp._share_storage(whole, whole[2:])
    assert not pretend_fsdp._share_storage(whole, other)
    assert pretend_fsdp._is_allocated(whole)
    whole.untyped_storage().resize_(0)
    assert not pretend_fsdp._is_allocated(whole)
