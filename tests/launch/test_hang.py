from __future__ import annotations

from perfsuite.launch.hang import HANG_S, LONGEST_STEPS, LONGEST_WARM_UPS, HangDetector
from perfsuite.worker.rank import LEAVE_S, WAIT_S


def test_the_bounds() -> None:
    """As the documentation tells them; a rank that waits for the others at its end is none that hangs."""
    assert (HANG_S, LONGEST_STEPS, LONGEST_WARM_UPS) == (120, 20, 3)
    assert HANG_S > WAIT_S + LEAVE_S


def test_a_hang_is_longer_than_any_step_before() -> None:
    detector = HangDetector()

    def after(now: float, steps: int, reports: int = 0, *, is_training: bool = True) -> float | None:
        return detector.quiet_s(now, is_training=is_training, steps=steps, reports=reports)

    assert after(0, 0, is_training=False) is None
    assert after(10_000, 0, is_training=False) is None, "loading a model is no step"
    assert after(10_001, 0) is None
    assert after(20_000, 0) is None, "nor is the first step, in which a model is compiled, a hang"
    assert after(30_000, 1) is None
    assert after(40_000, 1) is None, "nor the second, in which it may be compiled again"
    detector = HangDetector()
    assert after(0, 0) is None
    assert after(90, 1) is None, "compiled"
    assert after(180, 2) is None, "again, for what changed its shape"
    assert after(180 + LONGEST_WARM_UPS * 90, 2) is None
    assert after(181 + LONGEST_WARM_UPS * 90, 2) == LONGEST_WARM_UPS * 90 + 1
    assert after(460, 3) is None
    assert after(460 + LONGEST_STEPS * 280, 3) is None, "what it waited there is a step like others"
    detector = HangDetector()
    assert after(0, 0) is None
    for step in range(6):
        assert after(125 * step + 124, step) is None, "each step takes longer than what any job is allowed"
        assert after(125 * step + 125, step + 1) is None
    detector = HangDetector()
    assert after(0, 0) is None
    assert after(90, 1) is None
    assert after(91, 2) is None
    assert after(91 + LONGEST_WARM_UPS * 90, 2) is None
    assert after(92 + LONGEST_WARM_UPS * 90, 2) == LONGEST_WARM_UPS * 90 + 1
    detector = HangDetector()
    assert after(0, 0) is None
    assert after(5, 1) is None
    assert after(5 + HANG_S, 1) is None
    assert after(6 + HANG_S, 1) == HANG_S + 1, "progress is told twice a second: later steps may be unseen"
    detector = HangDetector()
    assert after(0, 0) is None
    assert after(1, 2) is None
    assert after(31, 3) is None
    assert after(31 + LONGEST_STEPS * 30, 3) is None, "an evaluation"
    assert after(32 + LONGEST_STEPS * 30, 3) == LONGEST_STEPS * 30 + 1
    assert after(33 + LONGEST_STEPS * 30, 3, 1) is None, "a report is a sign of life"
    detector = HangDetector()
    assert after(0, 1) is None
    assert after(1, 1, reports=1) is None
    assert after(2 + HANG_S, 1, reports=1) == HANG_S + 1, "who reported waits for nobody to compile"


def test_the_first_look_teaches_nothing() -> None:
    detector = HangDetector()
    assert detector.quiet_s(1000, is_training=True, steps=5, reports=0) is None
    assert detector.allowed_s == HANG_S


def test_a_hang_before_training_is_no_measure_of_a_step() -> None:
    detector = HangDetector()
    detector.quiet_s(0, is_training=False, steps=0, reports=0)
    detector.quiet_s(10_000, is_training=True, steps=0, reports=0)
    detector.quiet_s(10_100, is_training=True, steps=1, reports=0)
    assert detector.allowed_s == LONGEST_WARM_UPS * 100, "loading took 10,000 s, the first step 100"


def test_a_report_without_a_step_is_watched() -> None:
    """A rank that failed before training leaves the others waiting."""
    detector = HangDetector()
    assert detector.quiet_s(0, is_training=False, steps=0, reports=1) is None
    assert detector.quiet_s(HANG_S, is_training=False, steps=0, reports=1) is None
    assert detector.quiet_s(HANG_S + 0.5, is_training=False, steps=0, reports=1) == HANG_S + 0.5


def test_the_longest_step_counts_not_the_last() -> None:
    detector = HangDetector()
    for at, steps in ((0, 2), (50, 3), (60, 4), (61, 5)):
        assert detector.quiet_s(at, is_training=True, steps=steps, reports=0) is None
    assert detector.allowed_s == LONGEST_STEPS * 50
    warming_up = HangDetector()
    for at, steps in ((0, 0), (90, 1), (100, 2)):
        assert warming_up.quiet_s(at, is_training=True, steps=steps, reports=0) is None
    assert warming_up.allowed_s == LONGEST_WARM_UPS * 90


def test_after_the_warm_up_its_length_counts_no_more() -> None:
    detector = HangDetector()
    for at, steps in ((0, 0), (1000, 1), (2000, 2)):
        detector.quiet_s(at, is_training=True, steps=steps, reports=0)
    assert detector.allowed_s == LONGEST_WARM_UPS * 1000
    detector.quiet_s(2010, is_training=True, steps=3, reports=0)
    assert detector.allowed_s == LONGEST_STEPS * 10
