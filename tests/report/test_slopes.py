from perfsuite.report import slopes
from perfsuite.results.rank_report import RESIDENT_MEMORY
from perfsuite.results.run import Slope
from perfsuite.results.session_file import Measurement
from tests.samples import make_compared, make_run

MIB = 2.0**20
STEP = Slope(name="step time", unit="s", per_step=2e-6, interval=(-1e-6, 5e-6))
MEMORY = Slope(name="resident memory", unit="bytes", per_step=2048, interval=(1024, 4096), rank=1)


def test_slopes_are_reported_for_many_steps() -> None:
    """The sentences are about the last launch, and the table is about all launches."""
    runs = [make_run(slopes=(STEP,)), make_run(slopes=(MEMORY, STEP))]
    assert slopes.sentences(runs) == [
        "resident memory of rank 1: +1.95 MiB in 1,000 steps, +1,000.0 KiB to +3.91 MiB"
    ]
    assert [row[:2] for row in slopes.table(runs).rows] == [
        ("1", "step time"),
        ("2", "resident memory of rank 1"),
        ("2", "step time"),
    ]
    assert not slopes.table([make_run()])
    assert slopes.sentences([]) == []


def growing(per_step: float, *, wide: float = 0.0) -> Measurement:
    """Return a comparison in which resident memory grows by 10 MiB in arm A and by `per_step` in arm B."""
    usual = Slope(name=RESIDENT_MEMORY, unit="bytes", per_step=10 * MIB, interval=(9 * MIB, 11 * MIB), rank=0)
    more = usual.model_copy(update={"per_step": per_step, "interval": (per_step - wide, per_step + wide)})
    return make_compared(1.0).replace(before=(make_run(slopes=(usual,)),), runs=(make_run(slopes=(more,)),))


def test_memory_that_grows_faster_than_in_arm_a_is_named() -> None:
    assert slopes.grows_faster(growing(20 * MIB)) == "+19.5 GiB in 1,000 steps, arm A: +9.77 GiB"
    assert slopes.grows_faster(growing(20 * MIB, wide=10 * MIB)) is None, "the intervals overlap"
    assert slopes.grows_faster(growing(11.05 * MIB)) is None, "less than 100 MiB more in 1,000 steps"
    assert slopes.grows_faster(growing(5 * MIB)) is None
    assert slopes.grows_faster(make_compared(1.0)) is None


def test_a_slope_is_shown_beside_that_of_arm_a() -> None:
    """The memory of the arms can grow most on different ranks."""
    flat = make_run(slopes=(MEMORY.model_copy(update={"per_step": 0.0, "interval": (-1.0, 1.0), "rank": 0}),))
    (sentence,) = slopes.sentences([make_run(slopes=(MEMORY,))], [flat])
    assert sentence.endswith(" to +3.91 MiB; arm A: 0 bytes")
