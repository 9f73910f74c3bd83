"""Lists of perfsuite's own records of each step, which do not count as growth of the training."""

import gc
import weakref
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")

_lists: list[weakref.ref["OwnList[object]"]] = []


class OwnList(list[T]):
    """A list whose elements the census of kept objects leaves out, such as the losses of all steps."""

    def __init__(self) -> None:
        super().__init__()
        _lists.append(weakref.ref(self))  # type: ignore[arg-type]


def tracked_elements() -> Iterator[object]:
    """Yield the elements of all these lists that Python's garbage collector tracks."""
    for reference in _lists:
        own = reference()
        yield from filter(gc.is_tracked, () if own is None else own)


def clear(kind: type) -> None:
    """Empty the lists with elements of this type, where nobody will read them."""
    for reference in _lists:
        own = reference()
        if own and isinstance(own[-1], kind):
            own.clear()
