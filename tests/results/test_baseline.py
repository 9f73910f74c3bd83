import json
import math
from pathlib import Path
from statistics import fmean

import pytest

from perfsuite import documents
from perfsuite.errors import CaseError
from perfsuite.results import baseline
from perfsuite.results.baseline import Acceptance, Baseline, loss_curve
from perfsuite.results.rank_report import Flops, Observed
from perfsuite.results.run import Node
from perfsuite.results.store import BaselineStore
from tests.samples import make_baseline, make_case, make_figures, make_launches, make_run

ACCEPTED = Acceptance(by="Ada", date="2026-01-03", commit="4815f77", reason="NCCL 2.28 is slower")


def test_keeps_figures_to_six_digits() -> None:
    values = [123456789.0, 0.000123456789, 1.0000004, -7.6543219, 999999.9, 0.0, None, math.inf, math.nan]
    kept = [123457000.0, 0.000123457, 1.0, -7.65432, 1000000.0, 0.0, None, math.inf, math.nan]
    made = make_baseline(*(make_run(figures=make_figures(tokens_per_s=value, mfu=value)) for value in values))
    assert [repr(launch.figures.tokens_per_s) for launch in made.launches] == list(map(repr, kept))
    assert [repr(launch.figures.mfu) for launch in made.launches] == list(map(repr, kept))


def test_keeps_losses_to_six_digits() -> None:
    falling = tuple(7 / (step + 3) for step in range(30))
    runs = [make_run(loss=loss) for loss in (falling, (1.23456789,), ())]
    first, second, third = (launch.loss for launch in baseline.from_runs(runs).launches)
    assert first == pytest.approx([fmean(falling[3 * part : 3 * part + 3]) for part in range(10)], rel=5e-6)
    assert all(len(f"{value:.10g}") <= 8 for value in first)
    assert (second, third) == ((1.23457,), ())


def test_keeps_every_launch_and_the_newest_set_up() -> None:
    runs = [
        run.replace(
            started_at=f"at {number}",
            observed=Observed(settings={"n": str(number)}, environment={}),
            flops=Flops(formula="palm-1", per_token=number, parameters=2, matmul_parameters=3),
            loss=run.loss[: 2 if number == 1 else None],
        )
        for number, run in enumerate(make_launches(1, 2, 4))
    ]
    made = baseline.from_runs(runs)
    assert [launch.figures.tokens_per_s for launch in made.launches] == [1000, 2000, 4000]
    assert [len(launch.loss) for launch in made.launches] == [10, 2, 10]
    assert (made.case, made.hardware_class, made.accepted) == (make_case(), "cpu-test-2c", None)
    assert (made.flops, made.observed, made.recorded_at) == (runs[2].flops, runs[2].observed, "at 0")
    with pytest.raises(CaseError, match=r"Baseline: launches: .*at least 1 item"):
        made.replace(launches=())


def test_launches_name_their_session() -> None:
    runs = make_launches(1, 1.01, 1.02)
    made = baseline.from_runs(runs, sessions=["a", "a", "b"])
    assert [launch.session for launch in made.launches] == ["a", "a", "b"]
    assert (made.session_sizes("tokens_per_s"), made.session_sizes("mfu")) == ([2, 1], [])
    assert make_baseline(*runs).session_sizes("tokens_per_s") == [3]
    with pytest.raises(ValueError, match="zip"):
        baseline.from_runs(runs, sessions=["a"])
    nodes = [tuple(Node(name=name) for name in names) for names in ("ab", "ab", "cd")]
    resumed = [run.replace(nodes=names) for run, names in zip(runs, nodes, strict=True)]
    assert baseline.from_runs(resumed, sessions=["a"] * 3).session_sizes("tokens_per_s") == [2, 1]


def test_file_records_acceptance(tmp_path: Path) -> None:
    made = baseline.from_runs(make_launches(1, 1.01), accepted=ACCEPTED)
    path = BaselineStore(tmp_path).write_reviewed(made)
    assert json.loads(path.read_text())["accepted"] == ACCEPTED.model_dump()
    assert documents.read(path, Baseline) == made
    for missing in ("by", "date", "commit"):
        with pytest.raises(CaseError, match=f"Acceptance: {missing}: Field required"):
            Acceptance(**{name: value for name, value in ACCEPTED.model_dump().items() if name != missing})


@pytest.mark.parametrize(
    "shorter",
    [(), (3.0,), (3.0, 2.5, 2.0), tuple(map(float, range(9)))],
    ids=["none", "one", "three", "nine"],
)
def test_loss_curve_of_few_steps_is_their_losses(shorter: tuple[float, ...]) -> None:
    assert loss_curve(shorter) == shorter


def test_loss_curve_is_ten_means() -> None:
    assert loss_curve([float(step) for step in range(100)]) == tuple(10 * part + 4.5 for part in range(10))
    assert loss_curve([1.0] * 9 + [0.0]) == (1.0,) * 9 + (0.0,)


@pytest.mark.parametrize("steps", [10, 11, 14, 19, 25, 37, 90])
def test_every_step_counts_in_one_tenth(steps: int) -> None:
    """A single high step raises exactly one mean, at the step's place in the curve."""
    for step in range(steps):
        curve = loss_curve([float(index == step) for index in range(steps)])
        [position] = [part for part, value in enumerate(curve) if value]
        assert len(curve) == 10
        assert abs(position - 10 * (step + 0.5) / steps + 0.5) <= 0.5 + 5 / steps


def test_reports_figures_as_launch_medians() -> None:
    probes = [{"matmul": 712.3456789, "copy": 3.0}, {}, {"matmul": 700.0}, {"matmul": 650.0}]
    figures = [make_figures(mfu=mfu) for mfu in (0.5, None, 0.3, 0.4)]
    runs = [
        make_run(figures=of_launch, device_probe=probe)
        for of_launch, probe in zip(figures, probes, strict=True)
    ]
    made = baseline.from_runs(runs)
    kept = [launch.device_probe for launch in made.launches]
    assert kept == [{"matmul": 712.346, "copy": 3.0}, *probes[1:]]
    assert (made.device_probe(), make_baseline().device_probe()) == ({"copy": 3.0, "matmul": 700.0}, {})
    assert (made.values("mfu"), made.median("mfu")) == ([0.5, 0.3, 0.4], 0.4)
    assert (made.values("alloc_retries"), made.median("alloc_retries")) == ([], None)
    assert made.values("tokens_per_s") == [1000] * 4
