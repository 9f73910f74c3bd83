from perfsuite.report import slopes
from perfsuite.results.run import Slope
from tests.samples import make_run

STEP = Slope(name="step time", unit="s", per_step=2e-6, interval=(-1e-6, 5e-6))
MEMORY = Slope(name="resident memory", unit="bytes", per_step=2048, interval=(1024, 4096), rank=1)


def test_slopes_are_told_for_many_steps() -> None:
    """The sentences are about the last launch, and the table is about all launches."""
    runs = [make_run(slopes=(STEP,)), make_run(slopes=(MEMORY, STEP))]
    assert slopes.sentences(runs) == [
        "resident memory of rank 1: +1.95 MiB in 1,000 steps, +1,000.0 KiB to +3.91 MiB",
        "step time: +2.0 ms in 1,000 steps, -1.0 ms to +5.0 ms",
    ]
    assert [row[:2] for row in slopes.table(runs).rows] == [
        ("1", "step time"),
        ("2", "resident memory of rank 1"),
        ("2", "step time"),
    ]
    assert not slopes.table([make_run()])
    assert slopes.sentences([]) == []
