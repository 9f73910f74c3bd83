"""Finds objects of a script by their class, wherever it keeps them. Worker side; imports no torch."""

from __future__ import annotations

import gc
from typing import TypeVar

T = TypeVar("T")


def living(kind: type[T]) -> list[T]:
    """Return every living object of a class, also those that `gc.freeze` hides from Python's collector.

    What was frozen is frozen again, with what came after it.
    """
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    # `type`: `isinstance` would run the `__class__` of whatever there is.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    if is_frozen:
        gc.collect()  # or garbage would stay for ever
        gc.freeze()
    return found
