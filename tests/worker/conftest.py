import gc
import sys
from collections.abc import Iterator

import pytest

from perfsuite.worker.spans import phases
from tests.worker.fake_gpu import FakeAllocator, FakeGPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return FakeAllocator(monkeypatch)


@pytest.fixture
def new_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `living` ignore the objects that tests/conftest.py froze. They do not belong to any test."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)


@pytest.fixture
def no_profiler() -> Iterator[None]:
    """Leave no profiler behind if a test fails, and restore the profiler of the suite."""
    before = sys.getprofile()
    sys.setprofile(None)
    yield
    sys.setprofile(before)


@pytest.fixture(autouse=True)
def _nothing_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the recorder, the import finders and the collector's callbacks that a test leaves behind."""
    monkeypatch.setattr(phases, "spans", None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    collector_callbacks = [*gc.callbacks]
    yield
    gc.callbacks[:] = collector_callbacks  # the collector reads only this list
