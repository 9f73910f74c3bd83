"""For all tests here."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from perfsuite.lock import LOCK_FILE


@pytest.fixture(autouse=True, scope="session")
def _lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sessions under test, and the processes of xdist, do not queue behind each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOCK_FILE, str(tmp_path_factory.mktemp("lock") / "perfsuite.lock"))
        yield


def pytest_collection_finish() -> None:
    """What imported libraries hold never dies: full collections, which many tests make, may skip it."""
    gc.freeze()
