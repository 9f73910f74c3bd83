"""Finds objects that `gc.freeze` hides from Python's garbage collector. Imports no torch."""

import contextlib
import gc
from collections.abc import Iterator

_not_by_training = 0  # objects that were frozen before the training began, or by `unfrozen`


def watch() -> None:
    """Note what is frozen before the training begins."""
    global _not_by_training
    _not_by_training = gc.get_freeze_count()


def has_training_frozen() -> bool:
    """Whether more objects are frozen than were before the training, and than `unfrozen` froze.

    A few objects that the training froze are not noticed if as many of the others have died since.
    """
    return gc.get_freeze_count() > _not_by_training


@contextlib.contextmanager
def unfrozen(*, collects: bool) -> Iterator[None]:
    """Have nothing frozen for a while. Afterwards all objects are frozen: Python cannot freeze only some.

    Does nothing if nothing is frozen. With `collects` garbage is collected first, as frozen garbage stays for
    ever.
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
