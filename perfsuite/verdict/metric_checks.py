"""Judge one metric of a case's launches against the launches of its baseline. Pure.

`check_metric` decides which values are compared, and `SequentialCheck` decides with the sequential test.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import (
    PEAK_MEMORY,
    TOKENS_PER_S,
    Metric,
    PartOfStep,
    SpanSeconds,
    described,
    usable_metric,
)
from perfsuite.results.outcome import Check
from perfsuite.results.rank_report import COLD
from perfsuite.results.run import Figures, Run
from perfsuite.verdict import comparability
from perfsuite.verdict.checks import (
    NO_LOADER,
    UNSEEN_SPAN,
    disagreement,
    is_negligible,
    negligible,
    tolerance_check,
    unjudged,
)
from perfsuite.verdict.noise import (
    PROBE_CORRECTED,
    ClassNoise,
    against,
    at_one_level,
    costs_by_session,
    is_size,
    pairs,
    probe_corrected,
)
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, Z_FUTILE, Z_HOPELESS, Noise, can_pass, decide
from perfsuite.verdict.shift import Correction
from perfsuite.verdict.tonight import MACHINE_METRICS, Tonight, beside_reference, unless_refuted

UNKNOWN_NOISE = (
    "the noise between launches is unknown: accept a baseline of more launches (--perf-min-launches)"
)
TOO_FEW_LAUNCHES = (
    f"a regression in times is only reported after {FEWEST_LAUNCHES} launches or more (--perf-max-launches)"
)
SESSIONS_APART = 0.2
"""On a CPU, a time can grow this much between two sessions with the same code: once, the CPU time of a step
was 15% higher an hour later. A smaller change is reported only if baselines show how much sessions differ."""
WARM_BY = 2  # number of the launch that should start up warm, because the first one filled the compile cache
ONE_SESSION = (
    "sessions on a CPU can differ this much: accept a baseline of two sessions (perfsuite baseline accept "
    "--sessions 2)"
)
OTHER_SOFTWARE = (
    "the software that the probe uses differs from the baseline's: accept a new baseline if the speed is as "
    "you expect"
)
ONLY_COLD = "every launch was cold: none could reuse what the first one compiled"
NOW_AND_THEN = "some launches of the baseline lack this span too, so its absence is not a change"
NOT_HELPED = (
    "cases vary within a session as much as sessions differ, so the reference does not help: launch the case "
    "and its reference in pairs (perfsuite compare)"
)
UNUSABLE = "its value is unknown: install its package again, or accept a new baseline without this metric"
UNKNOWN_EXPONENT = "it is unknown how the speed depends on the probe: accept a baseline of more launches"


@dataclass(frozen=True, kw_only=True)
class SequentialCheck:
    """A metric that the sequential test decides."""

    metric: Metric
    check: Check  # not judged yet
    device: str
    policy: Policy
    sessions: Sequence[int]  # number of launches in each session of the baseline

    def decided(
        self,
        now: Sequence[float],
        then: Sequence[float],
        noise: Noise | None,
        corrects: Correction | None = None,
    ) -> Check:
        """Judge the costs of tonight's launches against those of the baseline's launches.

        If the session has a reference, the launches with this reference show how far the machine has shifted,
        and `corrects` is the correction for this shift. There are three cases:

        - The noise between sessions is known, and the correction lowers it: the corrected costs decide.
        - The noise between sessions is unknown, because every baseline is of one session. The corrected costs
          decide if their own noise is low enough for an unchanged case to pass.
        - In all other cases the measured costs decide, but a change counts only if the corrected costs show
          it too.
        """
        if noise is None:
            return self.check.replace(outcome="inconclusive", note=UNKNOWN_NOISE)
        own = against(noise, self.sessions)
        measured = self._with_noise(now, then, own)
        if corrects is None:
            return measured
        shifted = [cost / math.exp(corrects.shift) for cost in now]
        beside = self._with_noise(shifted, then, corrects.noise, z_hopeless=Z_FUTILE)
        if own.session_sigma:
            decides = corrects.noise.session_sigma < own.session_sigma
        else:
            decides = can_pass(
                tolerance=self.tolerance,
                noise=corrects.noise,
                baseline_launches=len(then),
                max_launches=max(self.policy.most, FEWEST_LAUNCHES),
            )
        if decides:
            return beside_reference(measured, beside)
        check = unless_refuted(measured, beside)
        is_unhelped = own.session_sigma and check.outcome == "inconclusive" and check.note is None
        return check.replace(note=NOT_HELPED) if is_unhelped else check

    @property
    def tolerance(self) -> float:
        """The largest relative growth of the cost that is tolerated."""
        return self.policy.tolerance_of(self.metric, self.device)

    def _with_noise(
        self, now: Sequence[float], then: Sequence[float], noise: Noise, *, z_hopeless: float = Z_HOPELESS
    ) -> Check:
        """Judge these costs. `noise` includes the noise of a new session against the baseline."""
        metric = self.metric
        most = max(self.policy.most, FEWEST_LAUNCHES)
        decision = decide(
            then, now, tolerance=self.tolerance, noise=noise, max_launches=most, z_hopeless=z_hopeless
        )
        decided = self.check.replace(
            outcome=decision.outcome,
            change=metric.change(decision.estimate),
            interval=metric.interval(decision.interval),
            minimum_detectable=metric.bound(decision.minimum_detectable_drop),
        )
        if is_negligible(metric, decision.outcome, decision.estimate):
            return decided.replace(outcome="passed", note=negligible(metric))
        is_change = decision.outcome in ("regressed", "improved")
        if is_change and not noise.session_sigma and self._is_usual_between_sessions(decision.estimate):
            return decided.replace(outcome="inconclusive", note=ONE_SESSION)
        if self.policy.most >= FEWEST_LAUNCHES:
            return decided
        # A slowdown is reported only after `FEWEST_LAUNCHES` launches, so none can be detected here.
        decided = decided.replace(minimum_detectable=None)
        if decided.outcome == "undecided" and len(now) >= self.policy.most:
            return decided.replace(outcome="inconclusive", note=TOO_FEW_LAUNCHES)
        return decided

    def _is_usual_between_sessions(self, change: float) -> bool:
        """Return whether a change of this size is usual between sessions of the same code.

        This matters only if no baseline shows how much sessions differ.
        """
        is_of_span = isinstance(self.metric, SpanSeconds)
        is_time = isinstance(self.metric, PartOfStep) or self.metric in MACHINE_METRICS
        is_of_host = self.device == "cpu" or is_of_span
        can_differ = (is_time or is_of_span) and is_of_host
        return can_differ and abs(math.log1p(change)) < math.log1p(SESSIONS_APART)


def check_metric(
    metric: Metric,
    runs: Sequence[Run],
    baseline: Baseline,
    noise: ClassNoise,
    policy: Policy,
    tonight: Tonight | None = None,
) -> Check:
    """Check one metric of healthy launches. `tonight` has the launches with the session's reference, if any.

    If the device reproduces the metric to the digit, only the tolerance decides. Other metrics are judged
    with the sequential test.
    """
    if isinstance(metric, SpanSeconds):
        return _span_check(metric, runs, baseline, noise, policy)
    unjudged_check = without_verdict(metric, runs, baseline)
    if unjudged_check.outcome == "failed" or unjudged_check.measured is None:
        return unjudged_check
    if unjudged_check.baseline is None:
        note = "not in the baseline: accept or record a new baseline"
        return unjudged_check.replace(outcome="inconclusive", note=note)
    device = runs[0].machine.device  # pragma: no mutate 0: all launches of a case have one device
    unjudged_check = unjudged_check.replace(allowed=metric.bound(policy.tolerance_of(metric, device)))
    metric = metric.against(launch.figures for launch in baseline.launches)
    if metric.judging(device) == "exact":
        return tolerance_check(metric, unjudged_check, metric.tolerance(device))
    sequential = SequentialCheck(
        metric=metric,
        check=unjudged_check,
        device=device,
        policy=policy,
        sessions=baseline.session_sizes(metric.name),
    )
    return _corrected_for_drift(sequential, runs, baseline, noise, tonight)


def unusable_checks(runs: Sequence[Run], baseline: Baseline) -> list[Check]:
    """Return an `inconclusive` check for each metric of the baseline that no usable package defines any more.

    The package says whether the metric is judged. Without it, a regression of the metric cannot be ruled out.
    """
    names = sorted({name for launch in baseline.launches for name in launch.figures.extra})
    gone = [described(name) for name in names if usable_metric(name) is None]
    return [
        # pragma: no mutate [0] to [-1]: all launches are of one case
        unjudged(metric, runs[0], [], baseline.values(metric.name), 0).replace(
            outcome="inconclusive", note=UNUSABLE
        )
        for metric in gone
    ]


def without_verdict(metric: Metric, runs: Sequence[Run], baseline: Baseline | None) -> Check:
    """Return a check that is not judged yet.

    The check is `failed` if a value is missing, not positive or not finite. For a metric that measures a part
    of the step, the check is `inconclusive` instead: its value is also missing if perfsuite does not
    recognise the data loader.
    """
    values = [metric.of(run.figures) for run in runs]
    then = baseline.values(metric.name) if baseline is not None else []
    # pragma: no mutate runs[0], to runs[-1],: all launches are of one case
    # pragma: no mutate runs[0].machine: all launches of a case have one device
    check = unjudged(metric, runs[0], values, then, metric.tolerance(runs[0].machine.device))
    wrong = [
        f"the {what} is {value}"
        for what, side in (("measured value", values), ("baseline's value", then))
        for value in side
        if not is_size(value)
    ]
    if baseline is not None and not then and metric in (TOKENS_PER_S, PEAK_MEMORY):
        wrong = ["the baseline lacks this metric: accept or record a baseline again"]
    elif None in values:
        wrong = ["the baseline has this metric, but this run does not" if then else "was not measured"]
    if wrong and isinstance(metric, PartOfStep):
        return check.replace(outcome="inconclusive", note=f"{wrong[0]}; {NO_LOADER}")
    return check.replace(outcome="failed", note=wrong[0]) if wrong else check


def _corrected_for_drift(
    sequential: SequentialCheck,
    runs: Sequence[Run],
    baseline: Baseline,
    noise: ClassNoise,
    tonight: Tonight | None,
) -> Check:
    """Decide a check. The probe of each launch is used to correct the drift of the machine.

    If the probe's software changed, the outcome must be the same with and without the correction. As long as
    the probe's exponent is unknown, a regression must show both with and without the correction.
    """
    metric = sequential.metric

    def decided(
        now: Sequence[float], then: Sequence[float], noise_of_metric: Noise | None, exponent: float = 0.0
    ) -> Check:
        corrects = None
        if tonight is not None and noise_of_metric is not None and metric in MACHINE_METRICS:
            corrects = tonight.correction(metric, noise_of_metric, baseline, exponent)
        at_level = _at_one_level(metric, then, baseline, noise_of_metric, exponent)
        return sequential.decided(now, at_level, noise_of_metric, corrects)

    figures_now = [run.figures for run in runs]
    figures_then = [launch.figures for launch in baseline.launches]
    now = _costs(metric, figures_now)
    then = _costs(metric, figures_then)
    raw = decided(now, then, noise.of(metric, corrected=False))
    probed_now = pairs(figures_now, metric)
    probed_then = pairs(figures_then, metric)
    lacks_probe = len(probed_now) < len(now) or len(probed_then) < len(then)
    if metric not in PROBE_CORRECTED or lacks_probe:
        return raw
    exponent = noise.probe_exponent or 1.0
    now = probe_corrected(probed_now, probed_then, exponent)
    then = probe_corrected(probed_then, probed_then, exponent)
    corrected = decided(now, then, noise.of(metric), exponent).replace(probe_exponent=exponent)
    if not noise.probe_exponent:
        is_certain = noise.knows_exponent or raw.outcome != "regressed"
        return raw if is_certain else _agreed(raw, corrected, UNKNOWN_EXPONENT)
    if comparability.same_stack(runs[-1], baseline):
        return corrected
    return _agreed(corrected, raw, OTHER_SOFTWARE)


def _costs(metric: Metric, launches: Iterable[Figures]) -> list[float]:
    """Return the cost of each launch that has the metric."""
    values = (metric.of(figures) for figures in launches)
    return [metric.cost(value) for value in values if value is not None]


def _at_one_level(
    metric: Metric, costs: Sequence[float], baseline: Baseline, noise: Noise | None, exponent: float = 0.0
) -> Sequence[float]:
    """Return the costs of a baseline without the differences between its sessions.

    The test has a separate term for the noise between sessions. With an exponent, the costs are corrected
    with the probe.
    """
    if noise is None or metric not in MACHINE_METRICS:
        return costs
    return at_one_level(costs_by_session(baseline, metric, exponent), noise.sigma)


def _agreed(check: Check, second_check: Check, why: str) -> Check:
    """Return `check` if `second_check` has the same outcome, and otherwise `undecided` or `inconclusive`.

    Exactly one of the two checks is corrected for drift.
    """
    if check.outcome == second_check.outcome:
        return check
    if "undecided" in (check.outcome, second_check.outcome):
        return check.replace(outcome="undecided")
    corrected, raw = (check, second_check) if check.probe_exponent is not None else (second_check, check)
    return check.replace(outcome="inconclusive", note=disagreement(raw.outcome, corrected.outcome, why))


def _span_check(
    metric: SpanSeconds, runs: Sequence[Run], baseline: Baseline, noise: ClassNoise, policy: Policy
) -> Check:
    """Check a span in the launches that have it.

    A launch that compiles, often only the first one, has a cold start-up instead of a warm one.
    """
    metric = metric.against(launch.figures for launch in baseline.launches)
    device = runs[0].machine.device  # pragma: no mutate 0: all launches of a case have one device
    values = (metric.of(run.figures) for run in runs)
    now = [value for value in values if value is not None]
    then = baseline.values(metric.name)
    # pragma: no mutate [0] to [-1]: all launches are of one case
    check = unjudged(metric, runs[0], now, then, metric.tolerance(device))
    if not now:
        cold = f"{COLD}{metric.label}"
        spans_before = [launch.figures.spans_s for launch in baseline.launches]
        if not all(metric.label in spans or cold in spans for spans in spans_before):
            return check.replace(outcome="inconclusive", note=NOW_AND_THEN)
        is_cold = all(cold in run.spans for run in runs)
        if is_cold and len(runs) < min(WARM_BY, policy.most):
            return check.replace(outcome="undecided")
        # If every start-up is cold, every launch compiles, and so would every launch of a user. Therefore,
        # after `WARM_BY` launches, this `inconclusive` check counts in the verdict, like the check of a span
        # that no launch has.
        notes = [ONLY_COLD] if is_cold else []
        notes += [] if is_cold and len(runs) < WARM_BY else [UNSEEN_SPAN]
        return check.replace(outcome="inconclusive", note="; ".join(notes))
    most = max(1, policy.most - (len(runs) - len(now)))
    sequential = SequentialCheck(
        metric=metric,
        check=check,
        device=device,
        policy=replace(policy, max_launches=most, min_launches=1),
        sessions=baseline.session_sizes(metric.name),
    )
    costs_now = [metric.cost(value) for value in now]
    costs_then = [metric.cost(value) for value in then]
    return sequential.decided(costs_now, costs_then, noise.of(metric))
