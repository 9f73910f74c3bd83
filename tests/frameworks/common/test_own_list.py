import pytest

from perfsuite.frameworks.common import own_list
from perfsuite.frameworks.common.own_list import OwnList, tracked_elements


def test_only_elements_that_the_collector_tracks_are_own() -> None:
    kept = OwnList[object]()
    thing: list[int] = []
    kept.append(thing)
    kept.append(1.5)
    assert [each is thing for each in tracked_elements() if each is thing or each == 1.5] == [True]
    del kept
    assert not any(each is thing for each in tracked_elements())


@pytest.mark.parametrize("has_values", [True, False])
def test_a_dry_run_keeps_no_values(has_values: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_list, "has_values", has_values)
    kept = OwnList[float]()
    kept.keep(1.5)
    assert kept == ([1.5] if has_values else [])
