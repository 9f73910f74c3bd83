"""What DDP is given instead; that it does what a real launch does is compared in dry/test_rank.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import distributed

from perfsuite.errors import DryRunError
from perfsuite.frameworks.common import pretend_ddp


def test_a_name_that_torch_has_dropped_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed, "_verify_param_shape_across_processes")
    with pytest.raises(
        DryRunError,
        match=r"torch 2.* has no torch\.nn\.parallel\.distributed\._verify_param_shape_across_processes",
    ):
        pretend_ddp.pretend()


def test_buckets_are_those_of_the_second_step() -> None:
    """DDP turns what it gets round: the bucket of the last parameters, which have their gradients first."""
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    parameters = [nn.Parameter(nn.Linear(16, 16).weight.detach()) for _ in range(5)]  # 1024 bytes each
    buckets, sizes = pretend_ddp._as_rebuilt(assign, [2048], parameters, [1 << 20, 25 << 20], [False] * 5)
    assert buckets[::-1] == [[4, 3], [2, 1], [0]]
    assert sizes == [2048] * 3
