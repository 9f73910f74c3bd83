from perfsuite.frameworks.common.own_list import OwnList, tracked_elements


def test_own_elements_are_tracked_ones() -> None:
    kept = OwnList[object]()
    thing: list[int] = []
    kept.append(thing)
    kept.append(1.5)
    assert [each is thing for each in tracked_elements() if each is thing or each == 1.5] == [True]
    del kept
    assert not any(each is thing for each in tracked_elements())
