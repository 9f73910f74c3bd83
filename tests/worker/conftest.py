from __future__ import annotations

import pytest

from tests.worker.fake_gpu import FakeAllocator, FakeGPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return FakeAllocator(monkeypatch)
