import gc

import pytest

from tests.worker.fake_gpu import FakeAllocator, FakeGPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return FakeAllocator(monkeypatch)


@pytest.fixture
def new_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `living` pass by what tests/conftest.py has frozen: nothing of a test is there."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
