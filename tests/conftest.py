"""For all tests here."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """What imported libraries hold never dies: full collections, which many tests make, may skip it."""
    gc.freeze()
