"""What DDP and FSDP1 are given; that it does what a real launch does is compared in dry/test_rank.py."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import _flat_param
from torch.nn.parallel import distributed

from perfsuite.errors import DryRunError
from perfsuite.frameworks.common import pretend


def test_dropped_torch_name_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed, "_verify_param_shape_across_processes")
    with pytest.raises(DryRunError, match=r"torch has no .*_verify_param_shape_across_processes"):
        pretend.ddp()


def test_buckets_are_those_of_the_second_step() -> None:
    """DDP turns what it gets round: the bucket of the last parameters, which have their gradients first."""
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    parameters = [nn.Parameter(nn.Linear(16, 16).weight.detach()) for _ in range(5)]  # 1024 bytes each
    buckets, sizes = pretend._as_rebuilt(assign, [2048], parameters, [1 << 20, 25 << 20], [False] * 5)
    assert buckets[::-1] == [[4, 3], [2, 1], [0]]
    assert sizes == [2048] * 3


def test_storages_stand_in_for_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_data_ptr_allocated", "_same_storage"):
        monkeypatch.setattr(_flat_param, name, None)
    pretend.fsdp1()
    is_allocated: Any = vars(_flat_param)["_data_ptr_allocated"]
    share_storage: Any = vars(_flat_param)["_same_storage"]
    whole = torch.ones(4)
    other = torch.ones(4)
    assert share_storage(whole, whole[2:])
    assert not share_storage(whole, other)
    assert is_allocated(whole)
    whole.untyped_storage().resize_(0)
    assert not is_allocated(whole)
