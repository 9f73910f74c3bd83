from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.worker.fake_gpu import FakeAllocator, FakeGPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return FakeAllocator(monkeypatch)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As in a worker, whose threads are shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def new_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `living` pass by what tests/conftest.py has frozen: nothing of a test is there."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
