"""Test the verdict on a case in a session that also launched a reference."""

import math
from typing import Any

import pytest

from perfsuite.results.baseline import Acceptance, Baseline, from_runs
from perfsuite.results.metric import CPU_S_PER_STEP, PEAK_MEMORY, TOKENS_PER_S
from perfsuite.results.outcome import AgainstReference, Check
from perfsuite.results.rank_report import Observed
from perfsuite.results.run import Run
from perfsuite.verdict.judge import judge
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import Noise
from perfsuite.verdict.tonight import (
    AS_THE_REFERENCE,
    CanaryRuns,
    Tonight,
    looks_slower,
    machine_changes,
    machine_environment,
    other_than_baseline,
)
from perfsuite.verdict.variance import Component
from tests.samples import known, make_launches, make_run, metric_check
from tests.verdict.judging import H100, USUAL, check_of

CODE = "0123456789ab"
COMMIT = "0123abcd" * 5
SESSIONS = ["a"] * 5 + ["b"] * 5
QUIET_CASES = Component(observed=0.002**2, explained=1e-7, degrees=30)
LOUD_CASES = Component(observed=0.05**2, explained=1e-7, degrees=30)
BASELINE = from_runs(make_launches(*USUAL[:10], machine=H100), sessions=SESSIONS)
ONE_SESSION = from_runs(make_launches(*USUAL[:10], machine=H100), sessions=["a"] * 10)


def noise_of(session_sigma: float = 0.02, of_case: Component | None = QUIET_CASES) -> ClassNoise:
    """Return the noise of a class whose sessions differ by 2% and whose launches scatter by 0.3%."""
    noise = Noise(sigma=0.003, degrees_of_freedom=60, session_sigma=session_sigma, of_case=of_case)
    return ClassNoise(by_metric={"tokens_per_s": noise, "tokens_per_s_mean": noise})


def on_gpu(speed: float, **figures: Any) -> list[Run]:
    """Return the launches of a night on GPUs with this speed, relative to the baseline."""
    return make_launches(*(speed * usual for usual in USUAL), machine=H100, **figures)


def tonight(*speeds: float, baseline: Baseline = BASELINE) -> Tonight:
    """Return a reference with one canary for each speed. Speeds are relative to the baseline."""
    return Tonight(
        canaries={
            f"canary{number}": CanaryRuns(baseline=baseline, runs=make_launches(speed, machine=H100))
            for number, speed in enumerate(speeds)
        }
    )


SLOW_NIGHT = tonight(0.961, 0.96, 0.959, 0.9605, 0.9595)
USUAL_NIGHT = tonight(1.001, 1.0, 0.999, 1.0005, 0.9995)


def speed_of(
    runs: list[Run],
    reference: Tonight | None,
    noise: ClassNoise | None = None,
    baseline: Baseline = BASELINE,
) -> Check:
    """Launch until there is a verdict, and return the check of tokens/s."""
    for used in range(1, len(runs) + 1):
        verdict = judge(runs[:used], baseline, noise or noise_of(), Policy(), reference)
        if verdict.outcome != "undecided":
            break
    return check_of(verdict, "tokens_per_s")


def test_a_case_as_slow_as_the_reference_passes() -> None:
    check = speed_of(on_gpu(0.96), SLOW_NIGHT)
    assert speed_of(on_gpu(0.96), None).outcome == "inconclusive"
    assert check.outcome == "passed"
    assert check.change == pytest.approx(-0.04, abs=0.002)
    assert known(check.against_reference).change == pytest.approx(0, abs=0.002)


def test_a_change_beyond_the_reference_is_of_the_code() -> None:
    check = speed_of(on_gpu(0.925), SLOW_NIGHT)
    assert speed_of(on_gpu(0.925), None).outcome == "inconclusive"
    assert check.outcome == "regressed"
    assert known(check.against_reference).change == pytest.approx(0.925 / 0.96 - 1, abs=0.002)


def test_a_fast_machine_does_not_hide_a_regression() -> None:
    check = speed_of(on_gpu(1.0), tonight(1.061, 1.06, 1.059, 1.0605, 1.0595))
    assert check.outcome == "regressed"
    assert known(check.against_reference).change == pytest.approx(-0.057, abs=0.002)


def test_a_canary_that_regressed_itself_is_found() -> None:
    """The case is itself a canary. Its launches with tonight's code do not count for the reference."""
    reference = Tonight(canaries={**SLOW_NIGHT.canaries, BASELINE.case.id: SLOW_NIGHT.canaries["canary0"]})
    assert speed_of(on_gpu(0.91), reference).outcome == "regressed"


def test_says_that_the_machine_moved() -> None:
    noise = noise_of(session_sigma=0.0)
    assert speed_of(on_gpu(0.96), None, noise, ONE_SESSION).outcome == "regressed"
    check = speed_of(on_gpu(0.96), tonight(*[0.96] * 5, baseline=ONE_SESSION), noise, ONE_SESSION)
    assert (check.outcome, check.note) == ("passed", AS_THE_REFERENCE)


def test_a_case_that_did_not_change_needs_no_note() -> None:
    assert speed_of(on_gpu(1.0), USUAL_NIGHT).note is None


def test_memory_is_never_corrected() -> None:
    verdict = judge(on_gpu(1.0, peak_memory_bytes=70e6)[:3], BASELINE, noise_of(), Policy(), SLOW_NIGHT)
    check = check_of(verdict, PEAK_MEMORY.name)
    assert (check.outcome, check.against_reference) == ("regressed", None)


def test_cases_that_vary_too_much_are_judged_as_measured() -> None:
    noise = noise_of(session_sigma=0.005, of_case=LOUD_CASES)
    check = speed_of(on_gpu(1.0), USUAL_NIGHT, noise)
    assert check.outcome == speed_of(on_gpu(1.0), None, noise).outcome == "passed"


def test_a_change_that_a_weak_reference_refutes_is_not_certain() -> None:
    noise = noise_of(session_sigma=0.005, of_case=LOUD_CASES)
    check = speed_of(on_gpu(0.93), SLOW_NIGHT, noise)
    assert speed_of(on_gpu(0.93), None, noise).outcome == "regressed"
    assert check.outcome == "inconclusive"
    assert "perfsuite compare" in str(check.note)
    assert "inconclusive compared with tonight's reference" in str(check.note)


def test_one_canary_of_one_session_changes_no_verdict() -> None:
    noise = noise_of(session_sigma=0.0, of_case=None)
    reference = tonight(0.96, baseline=ONE_SESSION)
    check = speed_of(on_gpu(0.96), reference, noise, ONE_SESSION)
    assert check == speed_of(on_gpu(0.96), None, noise, ONE_SESSION)


def test_a_baseline_of_other_sessions_is_judged_as_measured() -> None:
    noise = noise_of(session_sigma=0.0)
    other = from_runs(make_launches(*USUAL[:10], machine=H100), sessions=["z"] * 10)
    reference = tonight(*[0.96] * 5, baseline=ONE_SESSION)
    assert speed_of(on_gpu(0.96), reference, noise, other).outcome == "regressed"


def test_the_probe_corrects_both_sides() -> None:
    """The probe shows that the machine is 20% slower, both for the reference and for the case."""
    steps = 0.8
    probed = {"probe_s_p50": 0.01}
    baseline = from_runs(make_launches(*USUAL[:10], machine=H100, **probed), sessions=SESSIONS)
    slow = {"probe_s_p50": 0.01 / steps}
    canary = CanaryRuns(baseline=baseline, runs=make_launches(steps, machine=H100, **slow))
    reference = Tonight(canaries={str(number): canary for number in range(5)})
    of_metric = noise_of().of(TOKENS_PER_S)
    assert reference.shift(TOKENS_PER_S, known(of_metric), 1.0) is not None
    corrected = known(reference.shift(TOKENS_PER_S, known(of_metric), 1.0))
    plain = known(reference.shift(TOKENS_PER_S, known(of_metric)))
    assert corrected.estimate == pytest.approx(0, abs=1e-3)
    assert plain.estimate == pytest.approx(-math.log(steps), abs=1e-3)


def test_a_canary_without_the_metric_is_left_out() -> None:
    assert known(USUAL_NIGHT.shift(TOKENS_PER_S, known(noise_of().of(TOKENS_PER_S)))).canaries == (
        *("canary0", "canary1", "canary2", "canary3", "canary4"),
    )
    assert USUAL_NIGHT.shift(CPU_S_PER_STEP, known(noise_of().of(TOKENS_PER_S))) is None


def test_reports_the_machines_change() -> None:
    change, _ = machine_changes(SLOW_NIGHT, noise_of(), "h100")
    assert (change.metric, change.hardware_class) == ("tokens_per_s", "h100")
    assert change.change == pytest.approx(-0.04, abs=0.001)
    assert change.interval[0] < change.change < change.interval[1] < 0
    assert change.canaries == tuple(SLOW_NIGHT.canaries)


def observed(code: str | None = CODE, **environment: str) -> Run:
    """Return a launch that observed this code and these versions."""
    seen = Observed(settings={}, environment={"torch": "2.13.0", **environment}, code=code)
    return make_run(observed=seen)


def accepted(run: Run, commit: str | None = COMMIT) -> Baseline:
    acceptance = Acceptance(by="somebody", date="2026-01-01", commit="e" * 40, measured=commit)
    return from_runs([run] * 5, accepted=acceptance)


BEFORE = accepted(observed())


def test_the_same_code_is_what_the_baseline_measured() -> None:
    assert other_than_baseline(observed(), BEFORE, None) == []


def test_a_reference_newer_than_the_baseline_is_named() -> None:
    newer = other_than_baseline(observed(torch="2.14.0"), BEFORE, COMMIT)
    assert newer == ["torch: 2.13.0 -> 2.14.0"]


def test_the_same_commit_with_new_packages_is_the_baseline() -> None:
    assert other_than_baseline(observed(code="ba9876543210"), BEFORE, COMMIT) == []


def test_a_reference_on_other_gpus_of_its_node_is_used() -> None:
    before = accepted(observed(CUDA_VISIBLE_DEVICES="0,1", cores="0-7"))
    assert other_than_baseline(observed(CUDA_VISIBLE_DEVICES="2,3", cores="8-15"), before, None) == []


@pytest.mark.parametrize("commit", [None, "f" * 40])
def test_other_code_at_another_commit_is_not_the_baseline(commit: str | None) -> None:
    [difference] = other_than_baseline(observed(code="ba9876543210"), BEFORE, commit)
    assert difference.startswith("its code is from ")
    assert difference.endswith("the baseline was measured at commit 0123abcd0123")


def test_unknown_code_is_never_the_same() -> None:
    local = from_runs([observed(code=None)] * 5)
    [difference] = other_than_baseline(observed(code=None), local, COMMIT)
    said = "measured at an unknown commit. Commit all changes, and measure and accept a baseline again"
    assert difference.endswith(said)


def test_unobserved_settings_are_never_the_same() -> None:
    [difference] = other_than_baseline(make_run(), BEFORE, COMMIT)
    assert difference == (
        "settings and versions were not observed for the baseline, for this launch, or for both"
    )


def test_a_new_driver_is_a_change_of_the_machine() -> None:
    run = observed(driver="580.2", gpu_power_limit_w="600")
    assert other_than_baseline(run, accepted(observed(driver="580.1")), COMMIT) == []
    reference = Tonight(canaries={"x": CanaryRuns(baseline=accepted(observed(driver="580.1")), runs=[run])})
    of_node = observed(**{"kernel of ranks 8-15": "6.8"})
    assert other_than_baseline(of_node, BEFORE, COMMIT) == [], "another node is the machine, too"
    [sentence] = machine_environment(reference)
    assert sentence.endswith("driver: 580.1 -> 580.2; gpu_power_limit_w: unset -> 600")


def test_the_same_machine_needs_no_sentence() -> None:
    reference = Tonight(canaries={"x": CanaryRuns(baseline=BEFORE, runs=[observed()])})
    assert machine_environment(reference) == []


def confirming(speed: float, case_id: str = BASELINE.case.id) -> Tonight:
    """Return a usual night whose reference was also launched on one case."""
    runs = make_launches(*(speed * usual for usual in USUAL[:4]), machine=H100)
    own = {case_id: CanaryRuns(baseline=BASELINE, runs=runs)}
    return Tonight(canaries=USUAL_NIGHT.canaries, confirming=own)


def test_a_case_that_is_slow_with_the_old_code_did_not_regress() -> None:
    assert speed_of(on_gpu(0.95), USUAL_NIGHT).outcome == "regressed"
    check = speed_of(on_gpu(0.95), confirming(0.95))
    assert check.outcome == "passed"
    assert known(check.against_reference).change == pytest.approx(0, abs=0.002)


def test_the_old_code_confirms_a_regression() -> None:
    check = speed_of(on_gpu(0.95), confirming(1.0))
    assert check.outcome == "regressed"
    assert known(check.against_reference).change == pytest.approx(-0.05, abs=0.002)


def test_the_old_code_finds_what_varying_cases_hide() -> None:
    noise = noise_of(of_case=LOUD_CASES)
    assert speed_of(on_gpu(0.95), USUAL_NIGHT, noise).outcome == "inconclusive"
    assert speed_of(on_gpu(0.95), confirming(1.0), noise).outcome == "regressed"


def test_the_old_code_needs_no_noise_of_cases() -> None:
    noise = noise_of(of_case=None)
    assert speed_of(on_gpu(0.95), USUAL_NIGHT, noise).outcome == "regressed"
    assert speed_of(on_gpu(0.95), confirming(0.95), noise).outcome == "passed"


def test_the_reference_on_another_case_confirms_nothing() -> None:
    check = speed_of(on_gpu(0.95), confirming(0.95, "another case"))
    assert check == speed_of(on_gpu(0.95), USUAL_NIGHT)


def test_a_case_that_looked_slower_does_not_shift_the_others() -> None:
    of_metric = known(noise_of().of(TOKENS_PER_S))
    assert confirming(0.9).shift(TOKENS_PER_S, of_metric) == USUAL_NIGHT.shift(TOKENS_PER_S, of_metric)


def test_a_reference_without_the_metric_confirms_nothing() -> None:
    of_metric = known(noise_of().of(TOKENS_PER_S))
    correction = confirming(0.95).correction(CPU_S_PER_STEP, of_metric, BASELINE)
    assert correction == USUAL_NIGHT.correction(CPU_S_PER_STEP, of_metric, BASELINE)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"outcome": "regressed", "change": -0.04}, True),
        ({"outcome": "inconclusive", "change": -0.04}, True),
        ({"outcome": "inconclusive", "change": -0.02}, False),
        ({"outcome": "inconclusive", "change": 0.04}, False),
        ({"outcome": "inconclusive", "change": None}, False),
        ({"outcome": "passed", "change": -0.04}, False),
        ({"outcome": "inconclusive", "change": 0.04, "metric": CPU_S_PER_STEP.name}, True),
        ({"outcome": "regressed", "change": 0.04, "metric": PEAK_MEMORY.name}, False),
        (
            {
                "outcome": "inconclusive",
                "change": -0.04,
                "against_reference": AgainstReference(change=-0.01, interval=(-0.05, 0.03)),
            },
            False,
        ),
    ],
)
def test_a_case_looks_slower_by_more_than_its_tolerance(changes: dict[str, Any], expected: bool) -> None:
    check = metric_check(**{"metric": TOKENS_PER_S.name, "allowed": 0.03, **changes})
    assert looks_slower(check) is expected
