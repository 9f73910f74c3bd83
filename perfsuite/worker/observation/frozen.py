"""Find objects that `gc.freeze` hides from Python's garbage collector. Imports no torch."""

import contextlib
import gc
from collections.abc import Iterator

_not_by_training = 0  # objects that were frozen before the training began, or by `unfrozen`


def watch() -> None:
    """Note how many objects are frozen before the training begins."""
    global _not_by_training
    _not_by_training = gc.get_freeze_count()


def has_training_frozen() -> bool:
    """Return whether the training itself has frozen objects.

    It has if more are frozen than there were before the training, plus those that `unfrozen` froze.

    A few objects frozen by the training go unnoticed if as many of the others have died since.
    """
    return gc.get_freeze_count() > _not_by_training


@contextlib.contextmanager
def unfrozen(*, collects: bool) -> Iterator[None]:
    """Unfreeze all objects for a while, if any are frozen.

    Afterwards all objects are frozen, because Python cannot freeze only some. With `collects`, garbage is
    collected first, because frozen garbage would stay forever.
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
