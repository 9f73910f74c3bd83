"""Helpers for tests that need a framework whose folder can be deleted."""

import pytest

from perfsuite import extensions
from perfsuite.extensions import FRAMEWORKS

REMOVABLE = ("deepspeed", "nanotron", "torchtitan")
"""Frameworks that can be deleted: each has a folder for its code and one for its tests."""
DELETED = tuple(name for name in REMOVABLE if name not in extensions.own(FRAMEWORKS))
needs_every_framework = pytest.mark.skipif(bool(DELETED), reason=f"deleted: {', '.join(DELETED)}")


def skip_module_without(*names: str) -> None:
    """Skip the test file that is being collected if one of these frameworks was deleted."""
    missing = [name for name in names if name in DELETED]
    if missing:
        pytest.skip(f"deleted: {', '.join(missing)}", allow_module_level=True)
