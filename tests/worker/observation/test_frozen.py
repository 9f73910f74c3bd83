import gc
import weakref
from collections.abc import Iterator

import pytest

from perfsuite.worker.observation import frozen
from perfsuite.worker.observation.frozen import has_training_frozen, unfrozen

pytestmark = pytest.mark.unit


class Thing:
    """An object that the collector tracks."""


@pytest.fixture(autouse=True)
def _begun() -> Iterator[None]:
    """First freeze the objects of the tests (see conftest.py), which stay frozen."""
    gc.freeze()
    frozen.watch()
    yield
    frozen.watch()


def is_found(thing: Thing) -> bool:
    return any(candidate is thing for candidate in gc.get_objects())


def test_frozen_objects_are_found_meanwhile() -> None:
    thing = Thing()
    gc.freeze()
    with unfrozen(collects=False):
        assert is_found(thing)
    assert not is_found(thing)


def test_owns_only_what_the_training_freezes() -> None:
    things = [Thing()]
    with unfrozen(collects=False):
        pass
    assert not is_found(things[0])
    assert not has_training_frozen()
    things.extend(Thing() for _ in range(1000))
    gc.freeze()
    assert has_training_frozen()


@pytest.mark.parametrize("collects", [True, False])
def test_freezes_garbage_only_if_nothing_collects(collects: bool) -> None:
    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    reference = weakref.ref(thing)
    with unfrozen(collects=collects):
        del thing
    gc.collect()
    assert (reference() is None) is collects


def test_nothing_is_frozen_where_nothing_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", pytest.fail)
    monkeypatch.setattr(gc, "unfreeze", pytest.fail)
    with unfrozen(collects=True):
        pass
