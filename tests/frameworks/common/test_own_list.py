from perfsuite.frameworks.common.own_list import OwnList, tracked_elements


def test_own_elements_are_tracked_ones() -> None:
    kept = OwnList[object]()
    thing: list[int] = []
    kept.append(thing)
    kept.append(1.5)
    assert [element is thing for element in tracked_elements() if element is thing or element == 1.5] == [
        True
    ]
    del kept
    assert not any(element is thing for element in tracked_elements())
