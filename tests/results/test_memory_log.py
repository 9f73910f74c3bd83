from __future__ import annotations

from perfsuite.results.memory_log import MemoryChange, MemoryLog


def test_the_peak_is_over_all_steps() -> None:
    first = (MemoryChange(1, 50, "forward"), MemoryChange(1, -50, "backward"))
    second = (
        MemoryChange(2, 20, "forward"),
        MemoryChange(0, -100, "optimizer"),
        MemoryChange(3, 90, "optimizer"),
    )
    assert MemoryLog((100,), (first, second)).peak == 150
    assert MemoryLog((100,), (second,)).peak == 120
    assert list(MemoryLog((), (first, second)).changes) == [*first, *second]


def test_without_changes_the_peak_is_the_start() -> None:
    assert MemoryLog((3, 0, 4), ()).peak == 7
