"""Tests of the checks of one metric against a baseline: probe, memory, spans, data wait, missing values."""

import math
import random
from collections import Counter
from dataclasses import replace
from statistics import fmean, median

import pytest

from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Check, Outcome
from perfsuite.results.run import Run
from perfsuite.verdict.checks import NO_LOADER
from perfsuite.verdict.metric_checks import (
    NOT_HELPED,
    ONE_SESSION,
    TOO_FEW_LAUNCHES,
    UNUSABLE,
    SequentialCheck,
    without_verdict,
)
from perfsuite.verdict.noise import ClassNoise, class_noise
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import MAX_LAUNCHES, Noise
from perfsuite.verdict.shift import Correction
from tests.packages import Packages
from tests.samples import DISTURBED, make_figures, make_launches, make_run
from tests.verdict.judging import (
    BASELINE,
    BASELINE_H100,
    H100,
    IMPORTS,
    MIB,
    NAMES,
    NO_SPAN,
    OF_IMPORTS,
    OF_SPANS,
    PROBED,
    QUIET,
    USUAL,
    check_of,
    gpu,
    judged,
    lasting,
    noise_of,
    of_sessions,
    on_machine,
    outcomes,
    run_with,
    session,
    usual,
    with_stack,
)

KNOWN = ClassNoise(by_metric={**QUIET.by_metric, "cpu_s_per_step": QUIET.by_metric["tokens_per_s"]})
WITHOUT_LOSS = make_run(machine=H100, loss=())


def stalling(rng: random.Random, share: float) -> Run:
    """Return a run of 50 steps. The noise is 1% between steps and 0.5% between runs.

    `share` is the share of steps that take twice as long.
    """
    speed = rng.lognormvariate(0, 0.005)
    steps = [speed * rng.lognormvariate(0, 0.01) * (2 if rng.random() < share else 1) for _ in range(50)]
    figures = make_figures(tokens_per_s=1000 / median(steps), tokens_per_s_mean=1000 / fmean(steps))
    return WITHOUT_LOSS.replace(figures=figures)


OF_ONE_SESSION = of_sessions(1.0)
OF_THREE_SESSIONS = of_sessions(1.0, 0.98, 1.01)


@pytest.mark.parametrize(
    ("speed", "noise", "outcome", "blind"),
    [
        (0.975, OF_ONE_SESSION, "regressed", False),
        (0.975, OF_THREE_SESSIONS, "inconclusive", True),
        (0.8, OF_THREE_SESSIONS, "regressed", True),
    ],
    ids=["one session", "three sessions", "much slower"],
)
def test_slowness_of_other_sessions_is_allowed(
    speed: float, noise: Baseline, outcome: str, blind: bool
) -> None:
    """Sessions of unchanged code differ by 2%.

    With a baseline of only one session, a session that is 2.5% slower is called a regression.
    """
    check = check_of(session(gpu(speed), noise, class_noise([noise])), "tokens_per_s")
    assert (check.outcome, check.blind) == (outcome, blind)


@pytest.mark.parametrize("metric", ["tokens_per_s", "cpu_s_per_step"])
def test_sessions_apart_are_no_noise_of_launches(metric: str) -> None:
    """`QUIET` has no noise between sessions. So sessions that differ must not change what is detectable."""

    def least(*factors: float) -> float | None:
        before = [launch for factor in factors for launch in usual(factor, cpu_s_per_step=1 / factor)[:5]]
        names = [str(number) for number in range(len(factors)) for _ in range(5)]
        baseline = from_runs(before, sessions=names)
        noise = replace(
            QUIET, by_metric=dict.fromkeys([*QUIET.by_metric, metric], QUIET.by_metric["tokens_per_s"])
        )
        checked = session(usual(cpu_s_per_step=1.0), baseline, noise, min_launches=3)
        return check_of(checked, metric).minimum_detectable

    assert least(1.0, 0.9, 1.1) == pytest.approx(least(1.0, 1.0, 1.0), rel=0.01)


@pytest.mark.parametrize(("less", "more", "outcome"), [(0.84, 0.82, "regressed"), (1.19, 1.22, "improved")])
def test_lone_cpu_session_allows_a_fifth(less: float, more: float, outcome: str) -> None:
    """On a real CPU, the same code once took 15% more CPU time per step an hour later."""

    def check(runs: list[Run], baseline: Baseline = BASELINE, metric: str = "tokens_per_s") -> Check:
        return check_of(session(runs, baseline, class_noise([baseline]), min_launches=3), metric)

    speed = check(usual(less))
    assert (speed.outcome, speed.note) == ("inconclusive", ONE_SESSION)
    two = from_runs(usual()[:10], sessions=["monday"] * 5 + ["tuesday"] * 5)
    sure = check(usual(more)), check(usual(less), two), check(gpu(less), of_sessions(1.0))
    assert [verdict.outcome for verdict in sure] == [outcome] * 3
    now, before = (usual(cpu_s_per_step=seconds) for seconds in (1 / less, 1.0))
    assert check(now, from_runs(before[:5]), "cpu_s_per_step").note == ONE_SESSION


@pytest.mark.parametrize("max_launches", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1, 1.3, 3.0])
def test_two_launches_are_passed_or_inconclusive(factor: float, max_launches: int) -> None:
    verdict = session(usual(factor), max_launches=max_launches)
    check = check_of(verdict, "tokens_per_s")
    expected = ("passed", 1, None) if factor == 1 else ("inconclusive", max_launches, TOO_FEW_LAUNCHES)
    assert (verdict.outcome, verdict.launches, check.note) == expected
    assert check.change == pytest.approx(factor - 1, abs=0.02 * factor)
    assert check.minimum_detectable is None


@pytest.mark.parametrize(("now", "outcome"), [(0.100, "passed"), (0.140, "regressed"), (0.070, "improved")])
@pytest.mark.parametrize("probe", [{}, {"probe_s_p50": 0.01}])
def test_judges_cpu_time_except_beside_a_gpu(probe: dict[str, float], now: float, outcome: Outcome) -> None:
    """The probe does not correct CPU time.

    A busy machine has a slower probe, but needs no more CPU time for a step.
    """
    noise = replace(KNOWN, probe_exponent=1.0, knows_exponent=True) if probe else KNOWN
    before = from_runs(usual(cpu_s_per_step=0.1, **probe)[:5])
    verdict = session(usual(cpu_s_per_step=now, **probe), before, noise)
    assert verdict.outcome == outcome
    assert outcomes(verdict) == {**dict.fromkeys(NAMES, "passed"), "cpu_s_per_step": outcome}
    assert check_of(verdict, "cpu_s_per_step").probe_exponent is None
    beside = session(gpu(cpu_s_per_step=now), from_runs(gpu(cpu_s_per_step=0.1)[:5]), KNOWN)
    assert outcomes(beside) == dict.fromkeys(NAMES, "passed")


@pytest.mark.parametrize(("now", "outcome"), [(0.04, "passed"), (0.15, "regressed")])
def test_only_more_stalls_than_usual_regress(now: float, outcome: str) -> None:
    rng = random.Random(1)
    baselines = [from_runs([stalling(rng, 0.04) for _ in range(10)]) for _ in range(10)]
    noise = class_noise(baselines)
    verdicts = Counter[str](
        session([stalling(rng, now) for _ in range(MAX_LAUNCHES)], baseline, noise).outcome
        for baseline in baselines * 10
    )
    assert verdicts[outcome] >= 95
    assert outcome == "regressed" or not verdicts["regressed"]


@pytest.mark.parametrize(
    ("memory", "outcome"),
    [(64, "passed"), (64.63, "passed"), (64.65, "regressed"), (63.37, "passed"), (63.35, "improved")],
)
def test_one_launch_settles_gpu_memory_to_1_percent(memory: float, outcome: str) -> None:
    runs = gpu(peak_memory_bytes=memory * MIB)
    verdict = session(runs, BASELINE_H100)
    blind = judged(runs[:1], BASELINE_H100, ClassNoise())
    assert (verdict.outcome, verdict.launches) == (outcome, 1)
    check = check_of(verdict, "peak_memory_bytes")
    assert (check.outcome, check.interval, check.blind) == (outcome, None, False)
    assert check.change == pytest.approx(memory / 64 - 1, abs=3e-6)
    assert check.minimum_detectable == check.allowed == 0.01
    assert outcomes(blind) == {**dict.fromkeys(NAMES, "inconclusive"), "peak_memory_bytes": outcome}


@pytest.mark.parametrize(
    ("memory", "outcome", "launches"), [(70, "passed", 1), (90, "regressed", 3), (45, "improved", 3)]
)
def test_on_a_cpu_memory_is_statistical(memory: float, outcome: str, launches: int) -> None:
    runs = usual(peak_memory_bytes=memory * MIB)
    verdict = session(runs)
    assert (verdict.outcome, verdict.launches) == (outcome, launches)
    check = check_of(verdict, "peak_memory_bytes")
    assert check.interval is not None
    assert check.interval[0] < memory / 64 - 1 < check.interval[1]
    assert check.allowed == 0.2
    disturbed = [run.replace(health=DISTURBED) for run in runs[:3]]
    assert session(disturbed).outcome == "unhealthy", "unhealthy launches do not enter statistics"


@pytest.mark.parametrize(
    ("baseline", "note"),
    [
        (BASELINE, "the baseline has this metric, but this run does not"),
        (None, "was not measured"),
    ],
    ids=["judged", "recorded"],
)
@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("good", [0, 2])
def test_metric_missing_in_a_launch_fails_at_once(
    metric: str, good: int, baseline: Baseline | None, note: str
) -> None:
    runs = [*usual()[:good], run_with(**{metric: None})]
    verdict = judged(runs, baseline)
    assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", "missing_metric", good + 1)
    check = check_of(verdict, metric)
    assert (check.outcome, check.measured, check.change, check.note) == ("failed", None, None, note)
    assert [name for name, outcome in outcomes(verdict).items() if outcome == "failed"] == [metric]


@pytest.mark.parametrize(
    ("metric", "outcome", "note"),
    [
        ("tokens_per_s", "failed", "the baseline lacks this metric: accept or record a baseline again"),
        ("peak_memory_bytes", "failed", "the baseline lacks this metric: accept or record a baseline again"),
        ("tokens_per_s_mean", "inconclusive", "not in the baseline: accept or record a new baseline"),
    ],
    ids=["speed", "memory", "mean speed"],
)
def test_metric_missing_in_baseline_never_passes(metric: str, outcome: str, note: str) -> None:
    verdict = judged(usual()[:1], from_runs([run_with(**{metric: None})] * 3))
    assert (verdict.outcome, check_of(verdict, metric).note) == (outcome, note)


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
@pytest.mark.parametrize(("good", "place"), [(0, 0), (2, 0), (2, 1), (2, 2)])
def test_a_figure_that_is_no_size_never_passes(metric: str, value: float, good: int, place: int) -> None:
    """A value such as 0 or NaN has no logarithm, and a median over launches would hide such a value.

    If there are several such values, the first is reported.
    """
    runs = usual()[:good]
    runs.insert(place, run_with(**{metric: value}))
    on_gpus = [run.replace(machine=H100) for run in runs]
    several = [*runs, run_with(**{metric: -2.0})]
    for now, baseline, what in (
        *((runs, reference, "measured value") for reference in (BASELINE, None)),
        *((on_gpus, BASELINE_H100, "measured value"), (several, BASELINE, "measured value")),
        (usual()[:1], from_runs(runs), "baseline's value"),
    ):
        verdict = judged(now, baseline, min_launches=3)
        assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
        assert check_of(verdict, metric).note == f"the {what} is {value}"


UNKNOWN = "it is unknown how the speed depends on the probe: accept a baseline of more launches"
OTHER = (
    "the software that the probe uses differs from the baseline's: accept a new baseline if the speed is as "
    "you expect"
)
FOLLOWS = noise_of(0.005, exponent=1)
IGNORES = replace(QUIET, knows_exponent=True)


@pytest.mark.parametrize(
    ("noise", "torch", "machine", "tokens", "outcome", "said"),
    [
        (FOLLOWS, "2.13.0", 0.85, 0.85, "passed", None),  # the machine is slower, but not the code
        (FOLLOWS, "2.13.0", 1.2, 1.2, "passed", None),
        (FOLLOWS, "2.13.0", 1.0, 0.8, "regressed", None),  # the code is slower
        (FOLLOWS, "2.13.0", 0.85, 0.68, "regressed", None),  # the code and the machine are slower
        # The code is slower, but a faster machine hides this.
        (FOLLOWS, "2.13.0", 1.2, 0.96, "regressed", None),
        (FOLLOWS, "2.13.0", 0.85, 1.05, "improved", None),
        # If the software differs, a verdict has to hold both with and without the correction by the probe. In
        # the next row, the machine might be slower, or only the probe's matrix product.
        (FOLLOWS, "2.14.0", 0.7, 0.7, "inconclusive", OTHER),
        (FOLLOWS, "2.14.0", 1.2, 1, "inconclusive", OTHER),  # only the probe is faster
        *(
            (FOLLOWS, "2.14.0", machine, tokens, "regressed", None)
            for machine, tokens in ((1, 0.7), (0.9, 0.6))
        ),
        *((FOLLOWS, "2.14.0", speed, speed, "passed", None) for speed in (1, 0.97)),
        # If it is unknown how speed depends on the probe, a slow machine must not become a regression.
        (QUIET, "2.13.0", 0.82, 0.82, "inconclusive", UNKNOWN),
        *(
            (QUIET, "2.13.0", machine, tokens, "regressed", None)
            for machine, tokens in ((1, 0.8), (0.9, 0.6))
        ),
        (QUIET, "2.13.0", 0.85, 0.95, "passed", None),
        (QUIET, "2.13.0", 0.85, 0.8, "inconclusive", UNKNOWN),
        (IGNORES, "2.13.0", 0.85, 0.8, "regressed", None),
    ],
)
def test_probe_corrects_both_speeds(
    noise: ClassNoise, torch: str, machine: float, tokens: float, outcome: str, said: str | None
) -> None:
    before = from_runs([with_stack(run) for run in make_launches(*USUAL[:5], probe_s_p50=0.010)])
    runs = [with_stack(on_machine(machine, tokens=tokens), torch=torch)] * 15
    verdict = session(runs, before, noise, min_launches=3)
    assert verdict.outcome == outcome
    is_listed = any(line.startswith("probe between the steps") for line in verdict.changed)
    assert is_listed == (machine not in (1, 0.97))
    for check, usual_speed in zip(verdict.checks[:2], (1000, 990), strict=True):
        assert check.measured == pytest.approx(tokens * usual_speed)
        assert (check.note or "").partition("; ")[2] == (said or "")
        if noise is FOLLOWS and outcome != "inconclusive":
            assert check.probe_exponent == 1
            assert check.change == pytest.approx(tokens / machine - 1, abs=0.005)
    if said == UNKNOWN:
        raw = "regressed as measured, but passed when corrected for the machine's own speed; "
        assert f"{raw}{said}" == verdict.checks[0].note
    memory = check_of(verdict, "peak_memory_bytes")
    assert (memory.probe_exponent, memory.note, memory.outcome) == (None, None, "passed")


@pytest.mark.parametrize(("place", "outcome"), [(4, "inconclusive"), (0, "passed")], ids=["last", "first"])
def test_last_launch_shows_the_probes_software(place: int, outcome: str) -> None:
    before = from_runs([with_stack(on_machine(1)) for _ in range(5)])
    slower = [with_stack(on_machine(0.82, tokens=0.82)) for _ in range(4)]
    other = with_stack(slower[0], torch="2.14.0")
    runs = [*slower[:place], other, *slower[place:]]
    assert check_of(judged(runs, before, FOLLOWS), "tokens_per_s").outcome == outcome


BARE = make_launches(0.85)[0]
SLOW = on_machine(0.85, tokens=0.85)
FOUR = make_launches(1.0, 1.003, 0.998, 1.001, probe_s_p50=0.01)
NO_SPEED = run_with(tokens_per_s=None, probe_s_p50=0.012)


@pytest.mark.parametrize(
    ("runs", "before", "follows", "exponent", "change"),
    [
        *(([SLOW], FOUR, follows, follows or None, 0.85 ** (1 - follows) - 1) for follows in (0.5, 1, 0)),
        ([on_machine(0.85)], FOUR, 0, None, 0),
        *((runs, FOUR, 1, None, 0.85 - 1) for runs in ([SLOW, BARE], [BARE, SLOW])),
        *(([SLOW], [*FOUR, run_with(probe_s_p50=none)], 1, None, 0.85 - 1) for none in (None, 0.0, math.nan)),
        # One launch has no speed, and another has no probe. The lists of speeds and probes are equally long,
        # but their items do not belong to the same launches.
        ([SLOW], [NO_SPEED, run_with(), *FOUR[:3]], 1, None, 0.85 - 1),
        ([SLOW], [NO_SPEED, *FOUR[:3]], 1, 1, 0),
    ],
)
def test_probe_corrects_as_far_as_speed_follows_it(
    runs: list[Run], before: list[Run], follows: float, exponent: float | None, change: float
) -> None:
    check = check_of(judged(runs, from_runs(before), noise_of(0.005, exponent=follows)), "tokens_per_s")
    assert check.change == pytest.approx(change, abs=0.005)
    assert check.probe_exponent == exponent


@pytest.mark.parametrize("metric", ["tokens_per_s", "tokens_per_s_mean"])
def test_uncorrected_speed_has_uncorrected_noise(metric: str) -> None:
    """Uncorrected speeds scatter more. Judging them with the noise of corrected speeds would be wrong."""
    corrected, raw = (Noise(sigma=sigma, degrees_of_freedom=30) for sigma in (0.005, 0.06))
    noise = ClassNoise(
        by_metric=dict.fromkeys(NAMES, corrected),
        probe_exponent=1,
        uncorrected=dict.fromkeys(("tokens_per_s", "tokens_per_s_mean"), raw),
    )
    probed = judged([on_machine(1)], PROBED, noise)
    bare = judged(usual()[:1], PROBED, noise)
    assert not check_of(probed, metric).blind
    assert check_of(bare, metric).minimum_detectable == pytest.approx(0.16, abs=0.015)
    assert check_of(bare, "peak_memory_bytes") == check_of(probed, "peak_memory_bytes")


@pytest.mark.parametrize("factor", [0.1, 1, 10])
def test_unknown_noise_is_inconclusive(factor: float) -> None:
    note = "the noise between launches is unknown: accept a baseline of more launches (--perf-min-launches)"
    verdict = judged(usual(factor)[:1], noise=ClassNoise())
    assert (verdict.outcome, verdict.launches, verdict.failure) == ("inconclusive", 1, None)
    assert verdict.checks
    for check in verdict.checks:
        assert (check.note, check.change, check.interval, check.blind) == (note, None, None, False)
        assert None not in (check.measured, check.baseline)


def waiting(seconds: float, *, step_s: float = 1.0) -> list[Run]:
    """Return launches on a GPU that wait about `seconds` for data. Their speed is unchanged."""
    return [
        run.replace(figures=run.figures.replace(data_wait_s=seconds * speed, step_s_mean=step_s))
        for run, speed in zip(usual(machine=H100), USUAL, strict=True)
    ]


WAITS = ClassNoise(by_metric={**QUIET.by_metric, "data_wait_s": QUIET.by_metric["tokens_per_s"]})


@pytest.mark.parametrize(
    ("now", "step_s", "outcome"),
    [
        *((0.01, 1.0, "passed"), (0.1, 1.0, "regressed"), (0.025, 1.0, "passed")),
        *((0.0107, 0.01, "passed"), (0.0115, 0.01, "regressed")),
    ],
    ids=["same", "longer", "below the floor", "below a millisecond", "above a millisecond"],
)
def test_longer_wait_above_the_floor_regresses(now: float, step_s: float, outcome: str) -> None:
    before = from_runs(waiting(0.01, step_s=step_s)[:5])
    assert outcomes(session(waiting(now, step_s=step_s), before, WAITS))["data_wait_s"] == outcome


def test_a_shorter_data_wait_improves() -> None:
    before = from_runs(waiting(0.2)[:5])
    check = check_of(session(waiting(0.01), before, WAITS), "data_wait_s")
    assert check.outcome == "improved"
    assert check.change == pytest.approx(-0.19, abs=0.01)


def test_vanished_loader_is_not_better() -> None:
    verdict = session(usual(machine=H100), from_runs(waiting(0.2)[:5]), WAITS)
    check = check_of(verdict, "data_wait_s")
    assert (verdict.outcome, check.outcome) == ("inconclusive", "inconclusive")
    assert check.note == f"the baseline has this metric, but this run does not; {NO_LOADER}"


def test_a_baseline_without_data_wait_judges_none() -> None:
    check = check_of(session(waiting(0.2), from_runs(usual(machine=H100)[:5]), WAITS), "data_wait_s")
    assert (check.outcome, check.note) == (
        "inconclusive",
        "not in the baseline: accept or record a new baseline",
    )


@pytest.mark.parametrize(
    ("before", "now", "outcome"),
    [
        (6.0, 6.0, "passed"),
        (6.0, 9.0, "regressed"),
        (6.0, 4.0, "improved"),
        (0.02, 0.2, "passed"),
        (0.02, 0.8, "regressed"),
    ],
    ids=["same", "longer", "shorter", "ten times next to nothing", "more than the floor"],
)
def test_the_seconds_of_a_span_are_judged(before: float, now: float, outcome: str) -> None:
    baseline = from_runs(lasting(IMPORTS, before)[:5])
    verdict = session(lasting(IMPORTS, now), baseline, OF_SPANS)
    assert outcomes(verdict)[OF_IMPORTS] == outcome
    assert verdict.outcome in (outcome, "inconclusive"), "nothing shows that both sides compute the same"


def test_a_change_of_a_span_is_a_share_of_it() -> None:
    baseline = from_runs(lasting(IMPORTS, 6)[:5])
    check = check_of(session(lasting(IMPORTS, 9), baseline, OF_SPANS), OF_IMPORTS)
    assert check.change == pytest.approx(0.5, abs=0.02)
    assert check.allowed == pytest.approx(0.25 + 0.25 / 6)
    assert check.label == IMPORTS
    assert check.measured == pytest.approx(9, rel=0.05)


def test_does_not_judge_a_span_new_to_the_baseline() -> None:
    verdict = session(lasting(IMPORTS, 6), from_runs(NO_SPAN[:5]), OF_SPANS)
    assert (verdict.outcome, OF_IMPORTS in outcomes(verdict)) == ("passed", False)


def test_vanished_span_is_not_better() -> None:
    verdict = session(NO_SPAN, from_runs(lasting("save", 6)[:5]), OF_SPANS)
    assert (verdict.outcome, outcomes(verdict)["seconds of save"]) == ("inconclusive", "inconclusive")


def test_metric_without_its_package_is_no_pass() -> None:
    before = usual(extra={"aa_gone": 2.0, "zz_gone": 3.0})
    assert judged(usual(), from_runs(usual())).outcome == "passed"
    verdict = judged(usual(), from_runs(before))
    assert verdict.outcome == "inconclusive"
    assert [check.metric for check in verdict.checks if check.outcome != "passed"] == ["aa_gone", "zz_gone"]
    check = check_of(verdict, "aa_gone")
    assert (check.measured, check.baseline, check.note) == (None, 2.0, UNUSABLE)


def test_a_broken_metrics_value_is_unknown(packages: Packages) -> None:
    packages.install("extra-bad", "", metrics="aa_broken = extra_bad:Nothing")
    check = check_of(judged(usual(), from_runs(usual(extra={"aa_broken": 2.0}))), "aa_broken")
    assert (check.outcome, check.note) == ("inconclusive", UNUSABLE)


def test_occasional_span_decides_no_case() -> None:
    """Only one launch of the baseline, out of five, saved a checkpoint."""
    baseline = from_runs([*lasting("save", 6)[:1], *NO_SPAN[:4]])
    verdict = session(NO_SPAN, baseline, OF_SPANS)
    assert (verdict.outcome, outcomes(verdict)["seconds of save"]) == ("passed", "inconclusive")


def test_scattering_span_decides_no_case() -> None:
    noise = ClassNoise(by_metric={**OF_SPANS.by_metric, OF_IMPORTS: Noise(sigma=0.5, degrees_of_freedom=30)})
    baseline = from_runs(lasting(IMPORTS, 6, scatter=0.4)[:5])
    verdict = session(lasting(IMPORTS, 6, scatter=0.4), baseline, noise)
    assert (verdict.outcome, outcomes(verdict)[OF_IMPORTS]) == ("passed", "inconclusive")


def test_does_not_mix_cold_and_warm_launches() -> None:
    """The first launch compiles for a minute. Later launches find the result in a cache."""
    cold = lasting(f"cold {IMPORTS}", 60)
    warm = lasting(IMPORTS, 6)
    baseline = from_runs([cold[0], *warm[:5]])
    first = judged(cold[:1], baseline, OF_SPANS)
    last = session([cold[0], *warm], baseline, OF_SPANS)
    assert outcomes(first)[OF_IMPORTS] == "undecided", "there is no warm launch yet"
    assert outcomes(last)[OF_IMPORTS] == "passed"
    assert f"seconds of cold {IMPORTS}" not in outcomes(last)


def test_always_cold_start_up_is_inconclusive() -> None:
    cold = lasting(f"cold {IMPORTS}", 60)
    warm = lasting(IMPORTS, 6)
    verdict = session(cold, from_runs([cold[0], *warm[:5]]), OF_SPANS)
    assert (verdict.outcome, verdict.launches) == ("inconclusive", 2)


@pytest.mark.parametrize("most", [1, 3, 6])
def test_cold_launches_count_to_the_limit(most: int) -> None:
    noise = ClassNoise(by_metric={**OF_SPANS.by_metric, OF_IMPORTS: Noise(sigma=0.15, degrees_of_freedom=30)})
    cold = lasting(f"cold {IMPORTS}", 60)
    warm = lasting(IMPORTS, 6.5, 7.5, 6.8, 6.0, 7.9, 6.1)
    verdict = judged([cold[0], *warm][:most], from_runs(lasting(IMPORTS, 6)[:5]), noise, max_launches=most)
    assert outcomes(verdict)[OF_IMPORTS] in ("inconclusive", "passed")


@pytest.mark.parametrize(("case_noise", "note"), [(0.02, NOT_HELPED), (0.002, None)], ids=["loud", "quiet"])
def test_says_if_the_reference_does_not_help(case_noise: float, note: str | None) -> None:
    check = without_verdict(TOKENS_PER_S, gpu()[:1], BASELINE_H100)
    sequential = SequentialCheck(
        metric=TOKENS_PER_S, check=check, device="cuda", policy=Policy(), sessions=[5, 5]
    )
    noise = Noise(sigma=0.003, degrees_of_freedom=30, session_sigma=0.01)
    now = [1.03 * speed for speed in USUAL]
    corrects = Correction(shift=0.0, noise=replace(noise, session_sigma=case_noise))
    decided = sequential.decided(now, list(USUAL[:10]), noise, corrects)
    assert decided.note == note, decided.outcome
