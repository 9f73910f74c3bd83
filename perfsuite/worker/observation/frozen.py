"""Find objects that `gc.freeze` hides from Python's garbage collector. Imports no torch."""

import contextlib
import gc
from collections.abc import Iterator

_not_by_training = 0  # number of objects that were frozen before the training began, or by `unfrozen`


def watch() -> None:
    """Record the number of objects that are frozen before the training begins."""
    global _not_by_training
    _not_by_training = gc.get_freeze_count()


def has_training_frozen() -> bool:
    """Return whether the training itself has called `gc.freeze`.

    This only compares two numbers: the number of all frozen objects, and the number of objects that were
    frozen before the training or by `unfrozen`. If n of the objects in the second number have been freed
    since, the training can freeze up to n objects unnoticed.
    """
    return gc.get_freeze_count() > _not_by_training


@contextlib.contextmanager
def unfrozen(*, collects: bool) -> Iterator[None]:
    """Unfreeze all objects inside the `with` block, if any are frozen.

    Afterwards, all objects are frozen, because Python cannot freeze only some of them. With `collects`,
    garbage is collected before the objects are frozen, because frozen garbage would never be freed.
    """
    global _not_by_training
    before = gc.get_freeze_count()
    if before == 0:
        yield
        return
    gc.unfreeze()
    try:
        yield
    finally:
        if collects:
            gc.collect()
        gc.freeze()
        _not_by_training += max(0, gc.get_freeze_count() - before)
