from collections.abc import Sequence

import pytest

from perfsuite.launch.hang import HANG_S, LONGEST_STEPS, LONGEST_WARM_UPS, HangDetector
from perfsuite.worker.rank import LEAVE_S, WAIT_S
from perfsuite.worker.spans.running import TOLD_AFTER_S


def test_a_hang_takes_as_long_as_documented() -> None:
    """The bounds are those of the documentation.

    A rank that has finished and waits for the others does not hang.
    """
    assert (HANG_S, LONGEST_STEPS, LONGEST_WARM_UPS) == (120, 20, 3)
    assert HANG_S > WAIT_S + LEAVE_S


Look = tuple[float, int] | tuple[float, int, float]
"""The time, the steps so far and, if this is a hang, how long it has lasted."""
LOADING = (0, -1)
FIRST = (0, 0)
"""One look before the training begins, and one at its beginning."""


def follow(looks: Sequence[Look], *, reports: int = 0, detector: HangDetector | None = None) -> HangDetector:
    detector = detector or HangDetector()
    for now, steps, *hang in looks:
        quiet_s = detector.quiet_s(now, is_training=steps >= 0, steps=max(steps, 0), reports=reports)
        assert [seconds for seconds in [quiet_s] if seconds is not None] == hang, (now, steps)
    return detector


@pytest.mark.parametrize(
    "looks",
    [
        # The model is loaded before the first step, and can be compiled in the first two steps.
        [LOADING, (10_000, -1), (10_001, 0), (20_000, 0), (30_000, 1), (40_000, 1)],
        # The model is compiled twice, the second time for another shape. The wait for a compilation is not a
        # hang.
        [
            FIRST,
            (90, 1),
            (180, 2),
            (450, 2),
            (451, 2, 271),
            (460, 3),
            (6060, 3),
        ],
        # Each step takes longer than the time that every job is allowed.
        [FIRST, *((125 * step + late, step + late - 124) for step in range(6) for late in (124, 125))],
        [FIRST, (90, 1), (91, 2), (361, 2), (362, 2, 271)],
        # Progress is reported only twice a second, so later steps might not have been seen yet.
        [FIRST, (5, 1), (125, 1), (126, 1, 121)],
        [FIRST, (1, 2), (31, 3), (631, 3), (632, 3, 601)],  # an evaluation takes long
        [(1000, 5), (1120, 5), (1121, 5, 121)],  # the first look does not count
        [LOADING, (10_000, 0), (10_100, 1), (10_400, 1), (10_401, 1, 301)],  # loading does not count
        # The longest step counts, not the last one.
        [(0, 2), (50, 3), (60, 4), (61, 5), (1061, 5), (1062, 5, 1001)],
        [FIRST, (1000, 1), (2000, 2), (2010, 3), (2210, 3), (2211, 3, 201)],  # the warm-up no longer counts
    ],
)
def test_a_hang_is_longer_than_any_step_before(looks: list[Look]) -> None:
    follow(looks)


def test_a_rank_in_an_event_does_not_hang() -> None:
    detector = follow([FIRST, (1, 2), (2, 3)])
    look = {"is_training": True, "steps": 3, "reports": 0}
    quiet = [detector.quiet_s(now, **look, is_in_event=True) for now in (100, 200, 1000)]  # type: ignore[arg-type]
    assert quiet == [None] * 3
    assert detector.quiet_s(1000 + HANG_S, **look) is None  # type: ignore[arg-type]
    assert detector.quiet_s(1001 + HANG_S, **look) == HANG_S + 1  # type: ignore[arg-type]


def test_a_long_event_does_not_lengthen_the_bound() -> None:
    detector = follow([FIRST, (1, 2), (2, 3)])
    for now in (500, 1000):
        detector.quiet_s(now, is_training=True, steps=3, reports=0, is_in_event=True)
    detector.quiet_s(1001, is_training=True, steps=4, reports=0)
    assert detector.allowed_s == HANG_S


def test_reports_an_event_before_a_hang() -> None:
    assert HANG_S > 2 * TOLD_AFTER_S


def test_report_is_a_watched_sign_of_life() -> None:
    detector = follow([FIRST, (1, 2), (31, 3), (632, 3, 601)])
    follow([(633, 3)], reports=1, detector=detector)
    detector = follow([(0, 1)])
    # After these steps nothing is compiled any more.
    follow([(1, 1), (122, 1, 121)], reports=1, detector=detector)
    # If a rank failed before training, the others wait for it.
    follow([LOADING, (120, -1), (120.5, -1, 120.5)], reports=1)
