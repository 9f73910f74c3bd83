from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.case import CaseFile
from perfsuite.errors import ExtensionError
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.clock.timers import SimulatedTimer
from perfsuite.worker.extra_metrics import ExtraMetrics
from perfsuite.worker.rank import Rank, empty_report
from tests.packages import Packages
from tests.samples import make_case

CODE = """
    from perfsuite.results import Metric

    CALLS = []

    class Recorder:
        def begin(self, model, rank, world_size):
            CALLS.append(("begin", model, rank, world_size))

        def boundary(self, step):
            CALLS.append(("boundary", step))

        def result(self):
            return len(CALLS)

    class Fails(Recorder):
        def boundary(self, step):
            raise RuntimeError(f"at step {step}")

    class Silent(Recorder):
        def result(self):
            return None

    def metric(name, **how):
        return Metric(name=name, label=name, unit="", better="lower", judged="shown", **how)

    called = metric("called", recorder=Recorder)
    failing = metric("failing", recorder=Fails)
    silent = metric("silent", recorder=Silent)
    length = metric("length", read=lambda run: float(len(run.step_s)))
"""
METRICS = "\n".join(f"{name} = extra_calls:{name}" for name in ("called", "failing", "silent", "length"))

Asked = list[tuple[Any, ...]]


@pytest.fixture
def calls(packages: Packages) -> Asked:
    """Install the package above, and return the calls of its recorders."""
    packages.install("extra-calls", CODE, metrics=METRICS)
    import extra_calls  # type: ignore[import-not-found]

    calls: Asked = extra_calls.CALLS
    calls.clear()
    return calls


def after_steps(steps: int, *names: str) -> dict[str, float]:
    metrics = ExtraMetrics(names, lambda: "a model", 1, 2)
    for step in range(1, steps + 1):
        metrics.boundary(step)
    return metrics.result()


def test_recorder_looks_after_each_step(calls: Asked) -> None:
    assert after_steps(3, "called") == {"called": 3}
    assert calls == [("begin", "a model", 1, 2), ("boundary", 2), ("boundary", 3)]


def test_recorder_without_a_value_leaves_no_metric(calls: Asked) -> None:
    assert after_steps(1, "silent", "length", "called") == {"called": 2}


def test_recorder_error_names_the_metric(calls: Asked) -> None:
    with pytest.raises(ExtensionError, match="recorder of metric 'failing' failed: RuntimeError: at step 2"):
        after_steps(3, "failing", "called")
    assert ("boundary", 3) not in calls  # the recorder is no longer called


def test_metric_unknown_to_the_rank_is_an_error() -> None:
    with pytest.raises(ExtensionError, match="'gone' is not installed in the environment of the ranks"):
        after_steps(0, "gone")


@pytest.mark.parametrize("metrics", [("called", "length"), ()])
def test_a_rank_reports_what_its_case_names(tmp_path: Path, calls: Asked, metrics: tuple[str, ...]) -> None:
    request = CaseFile(case=make_case(), device="cpu", metrics=metrics)
    rank = Rank(RunDir(tmp_path), request, empty_report(1, 2))
    rank.build(SimulatedTimer())
    rank.start()
    assert (rank.recorder.between_steps is None) == (not metrics)
    steps = rank.case.total_steps
    rank.workload.run(steps)
    assert rank.finish().extra == ({"called": steps} if metrics else {})
    assert calls[:1] == ([("begin", None, 1, 2)] if metrics else [])
