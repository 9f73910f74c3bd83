from __future__ import annotations

import gc

from perfsuite.worker.living import living


class Thing:
    pass


class Special(Thing):
    pass


def test_living_objects_are_found_by_their_class() -> None:
    things = [Thing(), Special()]
    assert set(living(Thing)) == set(things)
    assert living(Special) == things[1:]


def test_objects_that_are_frozen_are_found_and_stay_frozen() -> None:
    thing = Special()
    gc.freeze()
    try:
        assert living(Special) == [thing]
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
