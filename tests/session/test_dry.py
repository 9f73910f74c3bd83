import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.dry.guard import COMPILER
from perfsuite.errors import CaseError, MachineError
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.fsdp import FSDP
from perfsuite.launch.local import LocalLauncher
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Measurement
from perfsuite.results.store import Store
from perfsuite.session.dry import ONE_RANK, dry_session
from perfsuite.session.priced import NO_LOG_OF_BASELINE
from perfsuite.session.session import Session
from perfsuite.session.setup import DryHost
from tests.analysis.step_time.test_forecast import step
from tests.processes import executable
from tests.samples import make_case, make_figures, make_gpu_machine, make_result, make_run, make_session_file
from tests.session.making import DryRuns, make_setup

H100, A100 = (make_case(model="llama-tiny", framework=DDP(), hardware=name) for name in ("h100", "a100"))


class DrySessions(DryRuns):
    """Makes dry sessions in one repository. The dry runs are replaced."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def session(self, ranks: tuple[int, ...] | None = None, **options: Any) -> Session:
        setup = make_setup(self.directory, [], **options)
        return dry_session(setup.options, setup.progress, ranks=ranks, dry_run=self)

    def measure(self, case: Case = H100, **how: Any) -> Measurement:
        return self.session(**how).measure(case, "test")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DrySessions:
    """Return dry sessions on a machine with a compiler, so that CUDA can be faked."""
    executable(tmp_path / COMPILER)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return DrySessions(tmp_path)


def test_judges_dry_runs_by_architecture_counts(runs: DrySessions) -> None:
    assert [runs.measure(case).outcome for case in (H100, A100)] == ["recorded", "recorded"]
    kept = {file.parent.name for file in runs.directory.glob("store/baselines/counts/*/*.json")}
    assert kept == {"dry-sm80", "dry-sm90"}
    second = runs.measure(explain=True)
    assert (second.outcome, second.dry, second.profile) == ("passed", True, None), "without a profile"
    runs.flops = 200
    worse = runs.measure()
    assert worse.outcome == "regressed"
    assert worse.verdict.counts is not None
    assert [(finding.before, finding.now) for finding in worse.verdict.counts.findings] == [(100, 200)]
    assert NO_LOG_OF_BASELINE in worse.verdict.counts.findings[0].in_words(), "the price is naive"


@pytest.mark.parametrize(
    ("hardware", "selected", "pretended"),
    [
        (("cpu", "h100"), {"h100"}, "h100"),
        (("h100", "a100-40gb-sxm"), {"a100"}, "a100"),
        (("cpu", "h100"), set(), "cpu"),
        (("cpu", "h100"), {"cpu", "h100"}, "cpu"),
        (("cpu", "h100"), {"h200"}, "cpu"),
    ],
)
def test_pretends_the_selected_hardware(
    runs: DrySessions, hardware: tuple[str, ...], selected: set[str], pretended: str
) -> None:
    ours = runs.session()
    ours.setup.host = DryHost(hardware=frozenset(selected))
    (run,) = ours.measure(H100.replace(hardware=hardware), "test").runs
    assert run.machine.hardware_class.split("-")[0] == pretended


def test_a_dry_run_counts_twelve_steps_by_default(runs: DrySessions) -> None:
    runs.measure()

    assert runs.counted_steps == [12]


def test_a_dry_run_needs_no_machine_to_measure_on(runs: DrySessions) -> None:
    no_machine = Mock(side_effect=MachineError("GPU 0 is split by MIG"))
    ours = runs.session()
    ours.setup.host.launcher = Mock(spec=LocalLauncher, machine=no_machine)
    assert ours.measure(H100, "test").outcome == "recorded"
    assert ours.record.session_file("complete").machine.note == "GPU 0 is split by MIG"


def test_requires_a_count_baseline_on_request(runs: DrySessions) -> None:
    verdict = runs.measure(fail_without_baseline=True).verdict
    assert (verdict.outcome, verdict.failure) == ("failed", "no_baseline")
    (reason,) = verdict.reasons
    assert reason.startswith("no baseline of counts for dry-sm90 in ")
    assert reason.endswith(", and --perf-missing-baseline=fail is set")


def test_known_dry_case_may_not_be_skipped(runs: DrySessions) -> None:
    offloads = H100.replace(framework=FSDP(sharding_strategy="FULL_SHARD", cpu_offload=True))
    ours = runs.session(fail_without_baseline=True)
    assert str(ours.skip_reason(offloads)).startswith("a dry run cannot do this: offloading")
    file = ours.mode.reviewed_file(offloads)
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(
        CaseError, match=r"a dry run cannot do this: .*, but the case has a reviewed baseline .*dry-sm90"
    ):
        ours.skip_reason(offloads)


def test_uncounted_work_neither_passes_nor_is_recorded(runs: DrySessions) -> None:
    runs.hidden = ("the training ended after 8 of 18 steps",)
    first = runs.measure()
    assert first.outcome == "inconclusive"
    assert not list(runs.directory.glob("store/baselines/counts/*/*"))
    runs.hidden = ()
    assert runs.measure().outcome == "recorded"
    runs.hidden = ("the training ended after 8 of 18 steps",)
    second = runs.measure()
    assert second.outcome == "inconclusive"
    assert second.verdict.counts is not None
    assert second.verdict.counts.notes == runs.hidden


def test_uncounted_work_of_a_single_rank_does_not_pass(runs: DrySessions) -> None:
    runs.hidden = ("the training ended after 8 of 18 steps",)
    verdict = runs.measure(ranks=(1,)).verdict
    assert verdict.outcome == "inconclusive"
    assert verdict.counts is not None
    assert verdict.counts.notes == runs.hidden


def test_does_not_record_a_single_rank(runs: DrySessions) -> None:
    counts = runs.measure(ranks=(1,)).verdict.counts
    assert counts is not None
    assert (counts.outcome, counts.notes) == ("passed", (ONE_RANK,))
    assert not list(runs.directory.glob("store/baselines/counts/*/*"))


def test_what_failed_is_a_verdict_of_its_own(runs: DrySessions) -> None:
    runs.failure = Failure(kind="not_dry", message="it depends on values")
    reasons = ("not_dry: it depends on values",)
    expected = Verdict(outcome="failed", launches=1, failure="not_dry", reasons=reasons)
    assert runs.measure().verdict.replace(counts=None) == expected


def test_a_dry_run_is_forecast_from_measured_cases(runs: DrySessions) -> None:
    """In an earlier session in the store, another case took 1.2 times as long as expected."""
    machine = make_gpu_machine("NVIDIA H100 80GB HBM3")
    other = make_run(machine=machine, figures=make_figures(tokens_per_s=1000 / 1.2))
    result = make_result(other, before=None, prediction=DryFacts(expected=step(1)))
    session = Store(runs.directory / "store").new_session()
    documents.write(session.results, make_session_file(result))
    runs.dry_facts = DryFacts(expected=step(2))
    forecast = runs.measure().dry_facts.forecast
    assert forecast is not None
    assert forecast.low_s < 2.4 < forecast.high_s
    runs.dry_facts = DryFacts(no_expected="the model is compiled")
    assert runs.measure().dry_facts == runs.dry_facts
