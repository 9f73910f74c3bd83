import math
import random
from statistics import fmean, stdev
from typing import Any

import pytest

from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.metric import GATED, PEAK_MEMORY, TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric
from perfsuite.results.run import Run
from perfsuite.verdict.noise import (
    PROBE_CORRECTED,
    ClassNoise,
    Pair,
    against,
    at_one_level,
    class_noise,
    pooled_over_sessions,
    probe_corrected,
    probe_exponent,
)
from perfsuite.verdict.paired_comparison import Differences, paired_exponent
from perfsuite.verdict.robust import SCALE_EFFICIENCY
from perfsuite.verdict.sequential import MAX_LAUNCHES, SIGMA_FLOOR, Noise, pooled_noise
from tests.benchmarks.simulated_gate import in_turn
from tests.samples import known, make_launches

SPEEDS = (1.0, 1.03, 0.98, 1.01, 0.97, 1.02, 0.99, 1.04, 0.96, 1.005)
ONE = from_runs(make_launches(*SPEEDS))


def drifting(seed: int, *, own: float = 0.003, launches: int = 5, **figures: Any) -> list[Run]:
    """Return launches whose cost varies by 5% together with the probe, and in addition by `own`."""
    rng = random.Random(seed)
    runs = []
    for _ in range(launches):
        machine = rng.lognormvariate(0, 0.05)
        case = rng.lognormvariate(0, own)
        probe = 0.01 * machine * rng.lognormvariate(0, 0.003)
        runs += make_launches(1 / (machine * case), **{"probe_s_p50": probe, **figures})
    return runs


def noise_of(*groups: list[Run]) -> ClassNoise:
    """Return the noise of a hardware class. Each group of launches is one baseline."""
    return class_noise([from_runs(group) for group in groups])


def noise_for(noise: ClassNoise, metric: Metric = TOKENS_PER_S, *, corrected: bool = True) -> Noise:
    estimate = noise.of(metric, corrected=corrected)
    assert estimate is not None
    return estimate


def degrees_of(noise: ClassNoise, metric: Metric = TOKENS_PER_S) -> float:
    """Return the degrees of freedom that the estimate would have without clipping.

    Each baseline adds its number of launches minus one.
    """
    return round(noise_for(noise, metric).degrees_of_freedom / SCALE_EFFICIENCY, 9)


def of_speed(*baselines: Baseline) -> Noise:
    """Return the noise of tokens/s on a hardware class with these baselines."""
    return noise_for(class_noise(baselines))


def with_figures(run: Run, **figures: float | None) -> Run:
    return run.replace(figures=run.figures.replace(**figures))


def without_probes(runs: list[Run]) -> list[Run]:
    return [with_figures(run, probe_s_p50=None) for run in runs]


GROUPS = [drifting(seed) for seed in range(4)]


@pytest.mark.parametrize(
    "few", [[], [[1.0]], [[1.0, 1.02]], [[speed] for speed in SPEEDS]], ids=["none", "one", "two", "one each"]
)
def test_few_launches_show_no_noise(few: list[list[float]]) -> None:
    noise = noise_of(*(make_launches(*speeds) for speeds in few))
    assert noise == ClassNoise(by_metric={}, probe_exponent=0.0)
    assert [noise.of(metric) for metric in GATED] == [None] * len(GATED)


@pytest.mark.parametrize(
    ("speeds", "degrees"),
    [
        ([[1.0, 1.03, 0.97]], 2),
        ([[1.0, 1.02], [1.0, 0.99]], 2),  # only both baselines together show a noise
        ([SPEEDS, [speed / 40 for speed in SPEEDS]], 18),  # differences between baselines are not noise
        ([SPEEDS, [0.001]], 9),  # a baseline of one launch changes nothing
    ],
    ids=["three launches", "two baselines", "two speeds", "a lone launch"],
)
def test_as_many_degrees_of_freedom_show_a_noise(speeds: list[list[float]], degrees: int) -> None:
    noise = noise_of(*(make_launches(*session_speeds) for session_speeds in speeds))
    assert {degrees_of(noise, metric) for metric in GATED} == {degrees}
    assert 0.008 < noise_for(noise).sigma < 0.06
    assert noise_for(noise, PEAK_MEMORY).sigma == SIGMA_FLOOR
    assert degrees == 2 or noise_for(noise).sigma == pytest.approx(of_speed(ONE).sigma, rel=1e-3)


def test_noise_is_that_of_the_cost() -> None:
    noise = noise_of([run for size in (1.0, 1.1, 1.5) for run in make_launches(size, peak_memory_bytes=size)])
    assert noise_for(noise) == pooled_noise([[1 / 1000, 1 / 1100, 1 / 1500]])
    assert noise_for(noise, PEAK_MEMORY) == pooled_noise([[1.0, 1.1, 1.5]])


@pytest.mark.parametrize("lacking", [None, 0])
def test_other_baselines_supply_a_missing_metric(lacking: float | None) -> None:
    """On a CPU, a tiny model can have a peak memory of 0 bytes, which gives no noise."""
    bare = make_launches(*SPEEDS, peak_memory_bytes=lacking)
    assert noise_of(bare).of(PEAK_MEMORY) is None
    noise = noise_of(bare, make_launches(*SPEEDS[:4]))
    assert (degrees_of(noise, PEAK_MEMORY), degrees_of(noise)) == (3, 12)
    corrected = noise_of(*GROUPS[:3], drifting(3, tokens_per_s_mean=lacking))
    assert corrected.probe_exponent > 0.95
    assert (degrees_of(corrected, TOKENS_PER_S_MEAN), degrees_of(corrected)) == (11, 15)
    # Fitting the exponent to the same launches costs one degree of freedom.
    full = [drifting(seed, tokens_per_s_mean=lacking) for seed in range(3)]
    few, more = (noise_of(*full, drifting(9, launches=launches)) for launches in (3, 4))
    assert (few.probe_exponent > 0.95, few.of(TOKENS_PER_S_MEAN)) == (True, None)
    assert degrees_of(more, TOKENS_PER_S_MEAN) == 2


@pytest.mark.parametrize(
    ("sizes", "knows"),
    [([], False), ([10, 10], False), ([10] * 3, True), ([21], True), ([20], False)],
    ids=str,
)
def test_zero_exponent_needs_20_degrees_of_freedom(sizes: list[int], knows: bool) -> None:
    noise = noise_of(*(make_launches(*(SPEEDS * 3)[:size], probe_s_p50=0.01) for size in sizes))
    assert (noise.probe_exponent, noise.knows_exponent) == (0, knows)


def test_followed_probe_corrects_only_the_speeds() -> None:
    raw = noise_of(*map(without_probes, GROUPS))
    noise = noise_of(*GROUPS)
    assert PROBE_CORRECTED == (TOKENS_PER_S, TOKENS_PER_S_MEAN)
    assert (noise.probe_exponent > 0.95, noise.knows_exponent, raw.probe_exponent) == (True, True, 0)
    assert noise_for(raw).sigma > 0.03
    for metric in PROBE_CORRECTED:
        assert noise_for(noise, metric).sigma < noise_for(raw, metric).sigma / 5
        assert (degrees_of(noise, metric), degrees_of(raw, metric)) == (15, 16)
    for metric in GATED:
        assert (
            noise_for(noise, metric, corrected=False)
            == noise_for(raw, metric, corrected=False)
            == noise_for(raw, metric)
        )
    assert noise_for(noise, PEAK_MEMORY) == noise_for(raw, PEAK_MEMORY)


def test_ignores_a_probe_unlike_the_speed() -> None:
    probes = (1.0, 0.9, 1.1, 1.0, 0.9, 1.1, 1.0, 1.1, 0.9, 1.0)
    runs = make_launches(*SPEEDS)
    noise = noise_of([with_figures(run, probe_s_p50=probe) for run, probe in zip(runs, probes, strict=True)])
    assert (noise.probe_exponent, noise_for(noise)) == (0, of_speed(ONE))


@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf])
def test_ignores_figures_that_have_no_size(value: float | None) -> None:
    for groups in (GROUPS, [*map(without_probes, GROUPS)]):
        group, *others = groups
        bad = with_figures(group[2], **{metric.name: value for metric in GATED})
        less = noise_of([*group[:2], *group[3:]], *others)
        assert noise_of([*group[:2], bad, *group[3:]], *others) == less


@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf])
def test_ignores_a_probe_that_has_no_size(value: float | None) -> None:
    *kept, last = GROUPS[3]
    bad = with_figures(last, probe_s_p50=value)
    noise, less = (noise_of(*GROUPS[:3], group) for group in ([*kept, bad], kept))
    assert noise.probe_exponent == less.probe_exponent > 0.95
    assert [noise_for(noise, metric) for metric in PROBE_CORRECTED] == [
        noise_for(less, m) for m in PROBE_CORRECTED
    ]
    assert [degrees_of(noise, metric) for metric in (*PROBE_CORRECTED, PEAK_MEMORY)] == [14, 14, 16]


@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf])
def test_pairs_speeds_with_probes_of_the_same_launch(value: float | None) -> None:
    # One launch has no speed, and another has no probe. The lists of speeds and probes are equally long, but
    # their items do not belong to the same launches.
    first, second, *rest = GROUPS[0]
    lacking = [with_figures(first, tokens_per_s=value), with_figures(second, probe_s_p50=value)]
    noise = noise_of([*lacking, *rest], *GROUPS[1:])
    less = noise_of(rest, *GROUPS[1:])
    assert (noise.probe_exponent, noise_for(noise)) == (less.probe_exponent, noise_for(less))


def of_sessions(*speeds: tuple[float, ...], names: str = "abcdefgh") -> Baseline:
    """Return a baseline of several sessions. Each tuple has the speeds of one session's launches."""
    by_name = [(speed, name) for held, name in zip(speeds, names, strict=False) for speed in held]
    return from_runs(make_launches(*(speed for speed, _ in by_name)), sessions=[name for _, name in by_name])


LAUNCHES = (1.0, 1.01, 0.99, 1.005, 0.995)
SLOWER = tuple(0.95 * speed for speed in LAUNCHES)
ALIKE = from_runs(make_launches(*LAUNCHES))


NAMED = from_runs(make_launches(*SPEEDS), sessions=["a"] * len(SPEEDS))


@pytest.mark.parametrize(
    "baselines",
    [[ONE], [NAMED], [ONE, NAMED], [NAMED, of_sessions(SLOWER, names="b")]],
    ids=["unnamed", "named", "both", "two baselines"],
)
def test_session_noise_needs_two_sessions(baselines: list[Baseline]) -> None:
    assert of_speed(*baselines).session_sigma == 0


def test_session_noise_stays_out_of_launch_noise() -> None:
    """One session of three is 5% slower. Memory never varies, so the noise of memory is the floor."""
    pooled = class_noise([of_sessions(LAUNCHES, SLOWER, LAUNCHES)])
    noise = noise_for(pooled)
    assert noise.sigma == pytest.approx(of_speed(ALIKE).sigma, rel=0.01)
    assert degrees_of(pooled) == 12
    between = -math.log(0.95) / math.sqrt(3)
    explained = noise.sigma**2 / 5
    assert noise.session_sigma == pytest.approx(math.sqrt(7.49 * between**2 - explained), rel=1e-3)
    assert noise.session_sigma > 0.05
    assert noise_for(pooled, PEAK_MEMORY).session_sigma == pytest.approx(SIGMA_FLOOR * math.sqrt(6.49 / 5))
    bad = (*LAUNCHES[:4], 0.5)
    assert of_speed(of_sessions(LAUNCHES, bad, LAUNCHES)).session_sigma < 0.02, (
        "one slow launch does not make a slow session"
    )


@pytest.mark.parametrize(("sessions", "limit"), [(2, 40.4), (5, 3.28), (20, 2.0)])
def test_few_agreeing_sessions_prove_less(sessions: int, limit: float) -> None:
    noise = of_speed(of_sessions(*[LAUNCHES] * sessions, names="abcdefghijklmnopqrst"))
    assert noise.session_sigma == pytest.approx(noise.sigma * math.sqrt((limit - 1) / 5))


def test_cases_of_one_session_are_one_witness() -> None:
    """Many cases of the same two sessions are only one observation of how the sessions differ."""
    (one, ten), (same_one, same_ten) = (
        [of_speed(*[of_sessions(LAUNCHES, other)] * n).session_sigma for n in (1, 10)]
        for other in (SLOWER, LAUNCHES)
    )
    assert one > 0.2
    assert ten == pytest.approx(one, rel=0.01)
    assert same_ten == pytest.approx(same_one / math.sqrt(10), rel=0.01)
    # Half of the cases are slower in the first session, and half in the second. On average, both sessions are
    # equally fast.
    noise = of_speed(*[of_sessions(LAUNCHES, SLOWER), of_sessions(SLOWER, LAUNCHES)] * 5)
    own = math.log(0.95) ** 2 / 2 * 10 / 9
    expected = own - noise.sigma**2 / 5 + 39.4 * own / 10
    assert noise.session_sigma == pytest.approx(math.sqrt(expected), rel=1e-3)


def test_cases_that_move_together_have_no_noise_of_their_own() -> None:
    noise = of_speed(*[of_sessions(LAUNCHES, SLOWER)] * 10)
    of_case = known(noise.of_case)
    assert of_case.observed == pytest.approx(0)
    assert of_case.degrees == 9
    assert of_case.explained == pytest.approx(noise.sigma**2 / 5)


def test_cases_that_move_apart_have_noise_of_their_own() -> None:
    noise = of_speed(*[of_sessions(LAUNCHES, SLOWER), of_sessions(SLOWER, LAUNCHES)] * 5)
    assert known(noise.of_case).observed == pytest.approx(math.log(0.95) ** 2 / 2 * 10 / 9, rel=1e-3)


def test_one_case_does_not_show_its_own_noise() -> None:
    assert of_speed(of_sessions(LAUNCHES, SLOWER)).of_case is None
    assert of_speed(of_sessions(LAUNCHES), of_sessions(LAUNCHES)).of_case is None


@pytest.mark.parametrize(
    ("sessions", "limit"),
    [(("ab", "cd", "ef"), 4.33), (("ab", "bc", "ac"), 7.49)],
    ids=["separate", "linked"],
)
def test_cases_of_other_sessions_add_witnesses(sessions: tuple[str, ...], limit: float) -> None:
    """Three cases of separate sessions give three observations. Three linked sessions give only two."""
    noise = of_speed(*(of_sessions(LAUNCHES, SLOWER, names=names) for names in sessions))
    half = math.log(0.95) ** 2 / 2
    assert noise.session_sigma == pytest.approx(math.sqrt(limit * half - noise.sigma**2 / 5), rel=1e-3)


def test_later_nights_add_witnesses_of_sessions() -> None:
    """The baselines have one session. Three later nights with one launch of each case scatter by 5%."""
    baselines = [of_sessions(LAUNCHES), of_sessions(LAUNCHES)]
    nights = [of_sessions((100.0,), (95.0,), (100.0,), names="xyz")] * 2
    alone = class_noise(baselines).by_metric[TOKENS_PER_S.name]
    noise = class_noise(baselines, nights).by_metric[TOKENS_PER_S.name]
    assert (alone.session_sigma, alone.of_session, alone.of_case) == (0, None, None)
    assert known(noise.of_session).degrees == 2
    assert known(noise.of_case).degrees == 2
    assert noise.session_sigma > 0.05
    assert (noise.sigma, noise.degrees_of_freedom) == (alone.sigma, alone.degrees_of_freedom)


def test_nights_are_not_compared_with_the_baseline() -> None:
    """The level of the nights can differ from that of the baseline, for example because of the driver."""
    baselines = [of_sessions(LAUNCHES, LAUNCHES)] * 2
    nights = [of_sessions((50.0,), (50.0,), names="xy")] * 2
    with_nights = class_noise(baselines, nights).by_metric[TOKENS_PER_S.name]
    assert known(with_nights.of_session).observed == pytest.approx(0)
    assert known(with_nights.of_session).degrees == 2


def test_nights_are_ignored_if_launches_have_no_known_noise() -> None:
    baseline = of_sessions(*[(speed,) for speed in LAUNCHES])
    nights = [of_sessions((100.0,), (50.0,), names="xy")]
    assert class_noise([baseline], nights) == class_noise([baseline])


def test_one_launch_sessions_count_as_both_noises() -> None:
    noise = of_speed(of_sessions(*[(speed,) for speed in LAUNCHES]))
    alone = of_speed(ALIKE)
    assert (noise.sigma, noise.degrees_of_freedom) == (alone.sigma, alone.degrees_of_freedom)
    spread = stdev(math.log(speed) for speed in LAUNCHES)
    assert noise.session_sigma == pytest.approx(math.sqrt(3.28) * spread, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "times"), [([7], 2), ([5, 5], 1.5), ([2] * 5, 1.2), ([9, 1], 1.82)], ids=str
)
def test_more_sessions_lower_their_noise(sizes: list[int], times: float) -> None:
    noise = Noise(sigma=0.01, degrees_of_freedom=30, session_sigma=0.02)
    assert against(noise, sizes).session_sigma == pytest.approx(0.02 * math.sqrt(times))


def test_more_sessions_keep_the_noise_of_launches() -> None:
    noise = Noise(sigma=0.01, degrees_of_freedom=30, session_sigma=0.02)
    assert against(noise, [3]).sigma == noise.sigma


def test_probe_explained_session_is_no_noise() -> None:
    """On one of three days, both the machine and the probe are 30% slower."""

    def slowed(run: Run) -> Run:
        speed = run.figures.tokens_per_s or 0
        probe = run.figures.probe_s_p50 or 0
        return with_figures(run, tokens_per_s=speed / 1.3, probe_s_p50=probe * 1.3)

    days = ([drifting(seed + day) for day in (0, 10, 20)] for seed in range(4))
    runs = ([*first, *map(slowed, second), *third] for first, second, third in days)
    noise = class_noise([from_runs(launches, sessions=[*"aaaaabbbbbccccc"]) for launches in runs])
    assert noise.probe_exponent > 0.95
    assert noise_for(noise).session_sigma < 0.02
    assert noise_for(noise, corrected=False).session_sigma > 0.3


def test_estimates_sessions_apart_from_cases_within_them() -> None:
    """Two cases have the same two sessions, which differ by 5%. One case differs by another 1%."""
    slightly = tuple(0.99 * speed for speed in SLOWER)
    noise = of_speed(of_sessions(LAUNCHES, SLOWER), of_sessions(LAUNCHES, slightly))
    of_session = known(noise.of_session)
    of_case = known(noise.of_case)
    assert of_session.observed == pytest.approx(math.log(0.95**2 * 0.99) ** 2 / 8, rel=0.01)
    assert of_case.observed == pytest.approx(math.log(0.99) ** 2 / 4, rel=0.01)
    assert of_session.explained == pytest.approx(of_case.observed / 2)
    assert (of_session.degrees, of_case.degrees) == (1, 1)
    assert of_speed(ONE).of_session is None


def test_a_baseline_at_one_level_has_only_launch_noise() -> None:
    sessions: dict[str | None, list[float]] = {"a": [1.0, 1.01], "b": [2.0, 2.02], "c": [4.0, 4.04]}
    costs = at_one_level(sessions, 0.01)
    assert fmean(map(math.log, costs)) == pytest.approx(math.log(2) + math.log(1.01) / 2)
    assert max(costs) / min(costs) == pytest.approx(1.01 ** math.sqrt(2))


def test_the_level_of_a_baseline_is_that_of_its_launches() -> None:
    """The second session has three times as many launches, so it has three times the weight."""
    sessions: dict[str | None, list[float]] = {"a": [1.0] * 2, "b": [math.e**4] * 6}
    assert at_one_level(sessions, 0.01) == pytest.approx([math.e**3] * 8)


@pytest.mark.parametrize("sessions", [{"a": [1.0, 1.1]}, {"a": [1.0], "b": [1.1]}], ids=["together", "apart"])
def test_lone_launches_keep_their_level(sessions: dict[str | None, list[float]]) -> None:
    assert at_one_level(sessions, 0.01) == pytest.approx([1.0, 1.1])


def false_alarms(within: float, between: float, sessions: int, *, trials: int = 2_000) -> tuple[float, float]:
    """Simulate sessions of unchanged code. Return the share that regressed, and the share with a blind gate.

    A gate is blind if it misses drops as large as its tolerance. The tolerance is 3%. Each trial estimates
    the noise from 10 cases of the same sessions, and judges the first case.
    """
    rng = random.Random(sessions)

    def launches(offset: float, count: int) -> list[float]:
        return [math.exp(offset + rng.gauss(0, within)) for _ in range(count)]

    alarms = blind = 0
    for _ in range(trials):
        offsets = {name: rng.gauss(0, between) for name in "abcde"[:sessions]}
        cases: list[dict[str | None, list[float]]] = [
            {name: launches(offset, -(-10 // sessions)) for name, offset in offsets.items()}
            for _ in range(10)
        ]
        pooled = pooled_over_sessions(cases)
        assert pooled is not None
        noise = against(pooled, [len(of_session) for of_session in cases[0].values()])
        before = [seconds for of_session in cases[0].values() for seconds in of_session]
        today = launches(rng.gauss(0, between), MAX_LAUNCHES)
        decision = in_turn(before, today, tolerance=0.03, noise=noise)
        alarms += decision.outcome == "regressed"
        blind += decision.blind
    return alarms / trials, blind / trials


FIRST_LEVEL = [1.0, 1.001]
SECOND_LEVEL = [1.1, 1.101]


@pytest.mark.parametrize(
    ("sessions", "is_split"),
    [
        ((FIRST_LEVEL, SECOND_LEVEL), True),
        ((FIRST_LEVEL, [1.1]), False),  # at least two launches must repeat a session
        ((FIRST_LEVEL, SECOND_LEVEL, [1.05]), True),
        ((FIRST_LEVEL, SECOND_LEVEL, [1.05], [1.2]), False),
    ],
    ids=["two of two", "one of two", "two of three", "two of four"],
)
def test_splits_noise_if_half_of_it_is_repeated(sessions: tuple[list[float], ...], is_split: bool) -> None:
    noise = pooled_over_sessions([{str(number): launches for number, launches in enumerate(sessions)}])
    assert noise is not None
    assert (noise.sigma < 0.005) == is_split
    assert noise.session_sigma > 0.05


@pytest.mark.simulation
@pytest.mark.parametrize("sessions", [2, 3, 5])
@pytest.mark.parametrize("within", [0.003, 0.01])
def test_sessions_1_percent_apart_rarely_alarm(within: float, sessions: int) -> None:
    """If sessions were assumed to be equal, 5% of them would give a false alarm.

    A gate that cannot find a change of 3% reports that it is blind.
    """
    alarms, blind = false_alarms(within, 0.01, sessions)
    assert alarms <= 0.009
    assert blind > 0.9


@pytest.mark.simulation
def test_alike_sessions_keep_the_gate_sharp() -> None:
    assert [false_alarms(0.003, 0, sessions, trials=200) for sessions in (3, 5)] == [(0, 0), (0, 0)]


PROBES = (1.0, 1.1, 1.2, 1.05, 1.3, 1.15)
EXACT = [(probe, probe) for probe in PROBES]


def unrelated(count: int, seed: int) -> list[Pair]:
    """Return the step time and the probe time of launches. The two scatter independently."""
    rng = random.Random(seed)
    return [(rng.lognormvariate(0, 0.003), rng.lognormvariate(0, 0.003)) for _ in range(count)]


def test_ignores_an_unrelated_probe() -> None:
    used = [probe_exponent([unrelated(5, seed)]) for seed in range(500)]
    assert sum(exponent > 0 for exponent in used) < 100
    assert (min(used), fmean(used) < 0.05) == (0, True)
    assert max(probe_exponent([unrelated(10, 10 * seed + g) for g in range(6)]) for seed in range(100)) < 0.5


@pytest.mark.parametrize(
    ("groups", "exponent"),
    [
        ([[((0.02 * p) ** 3, p) for p in PROBES]], 1),  # the exponent is at most 1
        ([[(1 / p, p) for p in PROBES]], 0),  # slower probes have faster steps
        ([[(p, 0.02) for p in PROBES]], 0),  # the probe never varies
        ([[(1 + n / 1e5, 1 + n / 1e5) for n in range(9)]], 0),  # the scatter is at the noise's floor
        *(([EXACT[:5]], 1), ([EXACT[:4]], 0)),  # 3 degrees of freedom must remain
        *(([EXACT[:3], EXACT[3:5]], 0), ([EXACT[:3], EXACT[2:5]], 1)),
    ],
    ids=[
        "steep",
        "falling",
        "constant",
        "at the floor",
        "five launches",
        "four launches",
        "3 and 2",
        "3 and 3",
    ],
)
def test_exponent_is_0_to_1_and_lowers_noise(groups: Any, exponent: float) -> None:
    assert probe_exponent(groups) == pytest.approx(exponent)
    assert probe_exponent(groups) <= 1


def test_corrects_seconds_to_the_baselines_probe() -> None:
    baseline = [(1.0, 0.02), (1.1, 0.022), (1.2, 0.024)]
    assert probe_corrected(baseline, baseline, 1.0) == pytest.approx([1.1, 1.1, 1.1])
    assert probe_corrected([(2.4, 0.024)], baseline, 1.0) == pytest.approx([2.2])
    assert probe_corrected([(2.4, 0.088)], baseline, 0.5) == pytest.approx([1.2])
    assert probe_corrected([(2.4, 0.024)], baseline, 0) == [2.4]


PARTLY = [
    [(0.3036, 0.02075), (0.3046, 0.02091), (0.2941, 0.01943), (0.3005, 0.01976)],
    [(0.3001, 0.02013), (0.3067, 0.02071), (0.2976, 0.0191), (0.3047, 0.02046), (0.3003, 0.01994)],
    [
        *[(0.3059, 0.02041), (0.3041, 0.01985), (0.3075, 0.02051)],
        *[(0.2984, 0.02008), (0.2962, 0.0191), (0.3046, 0.01942)],
    ],
]
"""Launches of three baselines. Part of their scatter follows the probe."""


def test_shrinks_a_slope_by_the_part_of_chance() -> None:
    """The expected exponent, the slope within the groups times (1 - E[F] / F), is computed step by step.

    F is the squared t statistic of the slope.
    """
    x: list[float] = []
    y: list[float] = []
    for group in PARTLY:
        for index, values in ((1, x), (0, y)):
            logs = [math.log(pair[index]) for pair in group]
            values += [value - fmean(logs) for value in logs]
    degrees = len(x) - len(PARTLY) - 1
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    residual = sum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True)) / degrees
    f = slope**2 * sum(a * a for a in x) / residual
    assert 0.2 < slope * (1 - degrees / (degrees - 2) / f) < 0.5
    assert probe_exponent(PARTLY) == pytest.approx(slope * (1 - degrees / (degrees - 2) / f))
    units = [[(1000 * seconds, 60 * probe) for seconds, probe in group] for group in PARTLY]
    assert probe_exponent(units) == pytest.approx(probe_exponent(PARTLY))


def followed(
    count: int, seed: int, *, exponent: float, effect: float = 0.0
) -> tuple[Differences, Differences]:
    """Return the differences of costs that follow a probe, and the differences of that probe."""
    rng = random.Random(seed)
    x = [rng.gauss(0, 0.1) for _ in range(2 * count - 1)]
    y = [exponent * probe + rng.gauss(0, 0.01) for probe in x]
    return Differences([cost + effect for cost in y[:count]], y[count:]), Differences(x[:count], x[count:])


def test_pair_exponent_ignores_what_an_arm_does() -> None:
    none, large, more, against = (
        paired_exponent(*followed(8, 1, exponent=exponent, effect=effect))
        for exponent, effect in ((0.5, 0.0), (0.5, 0.7), (3.0, 0.0), (-0.5, 0.0))
    )
    assert none == pytest.approx(large)
    assert none == pytest.approx(0.5, abs=0.05)
    assert (more, against) == (1, 0)
    unrelated = [paired_exponent(*followed(6, seed, exponent=0.0)) for seed in range(500)]
    assert sum(exponent > 0 for exponent in unrelated) < 150
    assert (min(unrelated), fmean(unrelated) < 0.02) == (0, True)
