"""Test that the machine is named as the cause if nothing else changed since the baseline."""

from typing import Any

import pytest

from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.outcome import BY_THE_MACHINE, CountCheck, Outcome, Verdict
from perfsuite.results.rank_report import LOADER, Observed
from perfsuite.results.run import Run
from perfsuite.verdict.overall import with_counts
from perfsuite.verdict.unchanged import changes, unless_unchanged
from tests.samples import metric_check
from tests.twin_counts import baseline_of, counts, launch

SEEN = Observed(
    settings={"wrapper": "DDP"},
    environment={"torch": "2.13.0+cpu", "transformers": "5.23.0", "NCCL_ALGO": "Ring"},
    code="0123456789ab",
)
RUN = launch(observed=SEEN)
BASELINE = from_runs([RUN] * 5)
SAME_WORK = CountCheck(outcome="passed")


def timed(outcome: Outcome, metric: str = "tokens_per_s", **fields: Any) -> Verdict:
    """Return a verdict with unchanged counts. Its only check has the same outcome as the verdict."""
    checks = (metric_check(outcome=outcome, metric=metric),)
    return Verdict(**{"outcome": outcome, "launches": 3, "checks": checks, "counts": SAME_WORK, **fields})


def after(run: Run, verdict: Verdict | None = None, baseline: Baseline = BASELINE) -> Outcome:
    """Return the outcome of a session whose last launch is `run`."""
    return unless_unchanged(verdict or timed("regressed"), [RUN, run], baseline).outcome


@pytest.mark.parametrize(
    "metric", ["tokens_per_s", "tokens_per_s_mean", "cpu_s_per_step", "seconds of start-up"]
)
def test_slower_unchanged_session_is_unhealthy(metric: str) -> None:
    verdict = unless_unchanged(timed("regressed", metric), [RUN], BASELINE)
    assert verdict.outcome == "unhealthy"
    assert [(check.outcome, check.note) for check in verdict.checks] == [("inconclusive", BY_THE_MACHINE)]
    assert verdict.reasons[0].startswith(
        "nothing that is recorded changed since the baseline: code, versions"
    )
    assert "So the machine is slower, not the code." in verdict.reasons[0]
    assert "perfsuite baseline accept --sessions 3" in verdict.reasons[0]


def test_faster_unchanged_session_only_passes() -> None:
    verdict = unless_unchanged(timed("improved"), [RUN], BASELINE)
    assert (verdict.outcome, [check.outcome for check in verdict.checks]) == ("passed", ["passed"])
    assert "So the machine is faster, not the code." in verdict.reasons[0]


CHANGED = {
    "setting": RUN.replace(observed=SEEN.replace(settings={"wrapper": "FSDP"})),
    "new setting": RUN.replace(observed=SEEN.replace(settings={"wrapper": "DDP", "threads": "2"})),
    "version": RUN.replace(observed=SEEN.replace(environment={**SEEN.environment, "torch": "2.14.0"})),
    "variable": RUN.replace(observed=SEEN.replace(environment={**SEEN.environment, "NCCL_ALGO": "Tree"})),
    "new variable": RUN.replace(observed=SEEN.replace(environment={**SEEN.environment, "OMP_X": "1"})),
    "code": RUN.replace(observed=SEEN.replace(code="ba9876543210")),
    "unknown code": RUN.replace(observed=SEEN.replace(code=None)),
    "nothing observed": RUN.replace(observed=None),
    "case": RUN.replace(case=RUN.case.replace(micro_batch=7)),
    "dtypes": RUN.replace(dtypes={"parameter": {"float32": 7}}),
    "hardware class": RUN.replace(machine=RUN.machine.replace(hardware_class="cpu-another")),
    "injected fault": RUN.replace(inject="slow"),
}
"""Launches that each differ from the baseline in one field."""


SAME = {
    "time limit": RUN.replace(case=RUN.case.replace(timeout_s=1800)),
    "hardware": RUN.replace(case=RUN.case.replace(hardware=("h100", "h200"))),
}
"""Launches that differ from the baseline in a field of the case that does not change the work."""


@pytest.mark.parametrize("run", SAME.values(), ids=SAME)
def test_a_field_without_effect_on_the_work_is_no_change(run: Run) -> None:
    assert [*changes(run, BASELINE)] == []


ALLOCATION = {"cores": "0-3,8-11", "CUDA_VISIBLE_DEVICES": "0,1", "NVIDIA_VISIBLE_DEVICES": "GPU-8f3a-11"}


@pytest.mark.parametrize(
    ("now", "is_same"),
    [
        ({"cores": "4-7,12-15"}, True),
        ({"cores": "0-3"}, False),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, True),
        ({"CUDA_VISIBLE_DEVICES": "2"}, False),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5d2c-01,GPU-77aa-02"}, True),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-91cc-22"}, True),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, False),
    ],
    ids=str,
)
def test_other_gpus_and_cores_of_a_node_are_no_change(now: dict[str, str], is_same: bool) -> None:
    """A scheduler can give a job other GPUs each night. If their number differs, that is a change."""
    before = SEEN.replace(environment={**SEEN.environment, **ALLOCATION})
    after = SEEN.replace(environment={**before.environment, **now})
    found = [*changes(launch(observed=after), from_runs([launch(observed=before)] * 5))]
    assert (found == []) == is_same


def test_other_gpus_are_named_as_a_possible_cause() -> None:
    before, after = (
        launch(observed=SEEN.replace(environment={"CUDA_VISIBLE_DEVICES": gpus})) for gpus in ("0,1", "2,3")
    )
    verdict = unless_unchanged(timed("regressed"), [after], from_runs([before] * 5))
    assert verdict.outcome == "unhealthy"
    said = "The job got other GPUs or cores of the node: CUDA_VISIBLE_DEVICES: 0,1 -> 2,3"
    assert verdict.reasons[0].endswith(said)


@pytest.mark.parametrize("run", CHANGED.values(), ids=CHANGED)
def test_any_change_may_be_the_cause(run: Run) -> None:
    assert [*changes(RUN, BASELINE)] == []
    assert len([*changes(run, BASELINE)]) == 1
    assert after(run) == "regressed"
    assert after(run, timed("improved")) == "improved"


COMPARED = {"case", "dtypes", "inject", "machine", "observed"}
MEASURED = {
    *("figures", "step_s", "probe_s", "cpu_s", "data_wait_s", "spans", "loss", "window", "slopes", "memory"),
    *("flops", "counts", "other_threads", "hidden", "dry_facts", "notes", "failure", "duration_s"),
}
OF_THE_MACHINE = {"health", "nodes", "device_probe", "rank_probes", "autotuned"}
OF_THE_FILE = {"schema_version", "started_at", "dry"}


def test_each_field_of_a_launch_is_compared_or_left_out() -> None:
    assert set(Run.model_fields) == COMPARED | MEASURED | OF_THE_MACHINE | OF_THE_FILE


def test_says_why_the_machine_is_not_blamed() -> None:
    unknown = RUN.replace(observed=SEEN.replace(code=None))
    verdict = unless_unchanged(timed("regressed"), [unknown], BASELINE)
    assert verdict.reasons == ("the machine might be the cause, but it is unknown whether the same code ran",)
    known = unless_unchanged(timed("regressed"), [CHANGED["version"]], BASELINE)
    assert known.reasons == (), "the change is listed, and is the likely cause"


@pytest.mark.parametrize("other", [None, "ba9876543210"], ids=["unknown", "another"])
def test_all_launches_of_the_baseline_need_one_code(other: str | None) -> None:
    older = from_runs([RUN.replace(observed=SEEN.replace(code=other)), RUN])
    assert [*changes(RUN, older)] == ["it is unknown whether the same code ran"]
    assert after(RUN, baseline=older) == "regressed"


@pytest.mark.parametrize("metric", ["peak_memory_bytes", "data_wait_s", "metric of another package"])
def test_no_machine_changes_other_metrics(metric: str) -> None:
    assert after(RUN, timed("regressed", metric)) == "regressed"
    both = (metric_check(outcome="regressed"), metric_check(outcome="regressed", metric=metric))
    assert after(RUN, timed("regressed", checks=both)) == "regressed"


WITH_LOADER = RUN.replace(
    observed=SEEN.replace(environment={**SEEN.environment, LOADER: "num_workers=2, batch_size=4"})
)


@pytest.mark.parametrize("outcome", ["regressed", "inconclusive"])
def test_a_known_loader_is_slowed_down_by_the_machine(outcome: Outcome) -> None:
    waits = (metric_check(outcome="regressed"), metric_check(outcome=outcome, metric="data_wait_s"))
    verdict = timed("regressed", checks=waits)
    baseline = from_runs([WITH_LOADER] * 5)
    assert unless_unchanged(verdict, [WITH_LOADER], baseline).outcome == "unhealthy"
    assert unless_unchanged(verdict, [WITH_LOADER, RUN], baseline).outcome == "regressed"
    other = WITH_LOADER.replace(
        observed=SEEN.replace(environment={**SEEN.environment, LOADER: "num_workers=1, batch_size=4"})
    )
    assert unless_unchanged(verdict, [other], baseline).outcome == "regressed"


@pytest.mark.parametrize("outcome", ["regressed", "improved", "inconclusive"])
def test_loader_must_be_as_fast_as_before(outcome: Outcome) -> None:
    """The number of loader workers can be in a configuration file. Configuration files are not recorded."""
    waits = (metric_check(outcome="regressed"), metric_check(outcome=outcome, metric="data_wait_s"))
    assert after(RUN, timed("regressed", checks=waits)) == "regressed"
    loads = (metric_check(outcome="regressed"), metric_check(outcome="passed", metric="data_wait_s"))
    assert after(RUN, timed("regressed", checks=loads)) == "unhealthy"


@pytest.mark.parametrize(
    "work",
    [None, CountCheck(outcome="passed", compared=False), CountCheck(outcome="not counted", notes=("why",))],
    ids=["nothing counted", "nothing compared", "not counted"],
)
def test_the_work_must_be_known_to_be_the_same(work: CountCheck | None) -> None:
    """The recorded code does not include configuration files that the script reads."""
    assert after(RUN, timed("regressed", counts=work)) == "regressed"


@pytest.mark.parametrize(
    ("work", "why"),
    [
        ({"one_sided": ("evaluate: not judged, not in the baseline",)}, "(evaluate: not judged, not in the"),
        ({"grown": ("host reads in forward",)}, "(host reads in forward: varies, and was never so large)"),
    ],
)
def test_names_work_that_was_not_compared(work: dict[str, Any], why: str) -> None:
    verdict = unless_unchanged(timed("regressed", counts=SAME_WORK.replace(**work)), [RUN], BASELINE)
    assert verdict.outcome == "regressed"
    assert f"the machine might be the cause, but not all work was compared {why}" in verdict.reasons[0]


@pytest.mark.parametrize("outcome", ["passed", "inconclusive", "recorded", "unhealthy", "failed"])
def test_keeps_every_other_outcome(outcome: Outcome) -> None:
    verdict = timed(outcome)
    assert unless_unchanged(verdict, [RUN], BASELINE) == verdict


def test_counts_decide_before_times() -> None:
    """Changed counts show that something changed.

    Without a baseline of times, it is unknown whether anything changed.
    """
    slow = timed("regressed", counts=None)
    assert with_counts(slow, [RUN], baseline_of(), times=BASELINE).outcome == "unhealthy"
    more = launch(counts(host_reads={"forward": 80}), observed=SEEN)
    assert with_counts(slow, [more], baseline_of(), times=BASELINE).outcome == "regressed"
    assert with_counts(slow, [RUN], baseline_of()).outcome == "regressed"
