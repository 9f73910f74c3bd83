"""Lists for perfsuite's own records of each step. Their elements do not count as memory growth."""

import gc
import weakref
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

_lists: list[weakref.ref["OwnList[object]"]] = []


class OwnList(list[T]):
    """A list, for example of all losses. Its elements do not count as objects that the training keeps."""

    def __init__(self) -> None:
        super().__init__()
        _lists.append(weakref.ref(self))  # type: ignore[arg-type]


def tracked_elements() -> Iterator[object]:
    """Yield those elements of all `OwnList`s that Python's garbage collector tracks."""
    for reference in _lists:
        own = reference()
        yield from filter(gc.is_tracked, () if own is None else own)


def clear(kind: type) -> None:
    """Empty the lists whose elements have this type. Call this only if nobody reads these lists later."""
    for reference in _lists:
        own = reference()
        if own and isinstance(own[-1], kind):
            own.clear()
