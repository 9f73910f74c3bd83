from typing import Any

import pytest
import torch

from perfsuite.frameworks.torchtitan import compat
from tests.frameworks.torchtitan.samples import MARKS

pytestmark = MARKS


def test_a_gpu_needs_fewer_patches() -> None:
    on_gpu = compat.patches("cuda")
    on_cpu = compat.patches("cpu")
    assert on_cpu.startswith(on_gpu)
    assert "set_timeout" in on_gpu
    assert "gloo" not in on_gpu


def test_a_cpu_is_one_device_without_memory_stats(titan: Any) -> None:
    from torchtitan.components.metrics import build_device_memory_monitor
    from torchtitan.tools.utils import get_local_device

    monitor = build_device_memory_monitor()
    assert monitor.device_name == "cpu"
    assert monitor.get_peak_stats().num_alloc_retries == -1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        assert get_local_device() == torch.device("cpu", 0)


def test_patches_set_timeout_only_if_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    own = vars(dist.distributed_c10d)["_set_pg_timeout"]
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    compat.before_import("cuda")
    assert vars(dist)["set_timeout"] is own
    newer = object()
    monkeypatch.setattr(dist, "set_timeout", newer)
    compat.before_import("cuda")
    assert vars(dist)["set_timeout"] is newer
