"""Distinguish changes of the machine from changes of the code. Pure.

This needs launches that run a session's reference: the packages and the commit of the baseline.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import CPU_S_PER_STEP, Metric
from perfsuite.results.outcome import AgainstReference, Check
from perfsuite.results.run import Figures, Run
from perfsuite.results.session_file import MachineChange
from perfsuite.verdict import comparability
from perfsuite.verdict.noise import (
    PROBE_CORRECTED,
    ClassNoise,
    costs_by_session,
    is_size,
    pairs,
    probe_corrected,
)
from perfsuite.verdict.robust import relative
from perfsuite.verdict.sequential import Noise
from perfsuite.verdict.shift import (
    CanaryChange,
    Correction,
    Shift,
    canary_change,
    correction,
    estimated_shift,
    own_correction,
    shares,
)

MACHINE_METRICS = (*PROBE_CORRECTED, CPU_S_PER_STEP)
"""Metrics that follow the machine's speed. The others, such as memory and counts, are never corrected."""
CHANGES = ("regressed", "improved")
AS_THE_REFERENCE = (
    "tonight, this metric also changed in the launches that run the reference, so the cause is the machine, "
    "not the code"
)
NOT_BESIDE = (
    "{measured} compared with the baseline, but {beside} compared with tonight's reference. It is not known "
    "well enough how much cases vary within a session: accept a baseline of more sessions, or launch the "
    "case and its reference in pairs (perfsuite compare)"
)
MEASURE_AGAIN = ". Commit all changes, and measure and accept a baseline again"
WITH_THE_MACHINE = (
    "the machine itself changed, which affects the cases and the reference alike, so the effect is not "
    "attributed to the code. Changes of the machine: {changes}"
)


@dataclass(frozen=True, kw_only=True)
class CanaryRuns:
    """The launches of one case with the reference, and the baseline of this case."""

    baseline: Baseline
    runs: Sequence[Run]  # one or more


@dataclass(frozen=True, kw_only=True)
class Tonight:
    """The launches that run a session's reference on one hardware class, by id of the case."""

    canaries: Mapping[str, CanaryRuns] = field(default_factory=dict)
    confirming: Mapping[str, CanaryRuns] = field(default_factory=dict)
    """For each case that looked slower, by id: its launches with the reference. Because these cases were
    chosen for looking slower, their launches count for the shift only if the case is also a canary."""

    def shift(self, metric: Metric, noise: Noise, exponent: float = 0.0) -> Shift | None:
        """Return how much the machine changed the cost of a metric; None if the launches do not show it.

        `noise` is the noise of the hardware class. With an exponent, costs are corrected with the probe.
        """
        changes = {}
        for case_id, canary in self.canaries.items():
            change = _change(case_id, canary, metric, noise, exponent)
            if change is not None:
                changes[case_id] = change
        return estimated_shift(changes, noise)

    def correction(
        self, metric: Metric, noise: Noise, baseline: Baseline, exponent: float = 0.0
    ) -> Correction | None:
        """Return the correction of a case with this baseline; None if no correction is possible.

        If the case itself was launched with the reference to confirm a regression, only these launches count.
        """
        case_id = baseline.case.id
        confirming = self.confirming.get(case_id)
        if confirming is not None:
            then, now = _sides(confirming, metric, exponent)
            if then and now:
                return own_correction(noise, then, now, case_id)
        shift = self.shift(metric, noise, exponent)
        sessions = costs_by_session(baseline, metric, exponent)
        if shift is None or not sessions:
            return None
        return correction(noise, shares(sessions, case_id), shift)


def _change(
    case_id: str, canary: CanaryRuns, metric: Metric, noise: Noise, exponent: float
) -> CanaryChange | None:
    """Return the change of a canary since its baseline; None if either side lacks the metric."""
    then, now = _sides(canary, metric, exponent)
    return canary_change(now, then, noise, case_id) if now and then else None


def _sides(
    canary: CanaryRuns, metric: Metric, exponent: float
) -> tuple[dict[str | None, list[float]], list[float]]:
    """Return the costs of a canary's baseline, by session, and of its launches with the reference."""
    then = costs_by_session(canary.baseline, metric, exponent)
    figures = [run.figures for run in canary.runs]
    now = _costs(figures, metric)
    if exponent:
        before = pairs((launch.figures for launch in canary.baseline.launches), metric)
        now = probe_corrected(pairs(figures, metric), before, exponent) if before else []
    return then, now


def _costs(figures: Sequence[Figures], metric: Metric) -> list[float]:
    values = map(metric.of, figures)
    return [metric.cost(value) for value in values if is_size(value)]


def machine_changes(tonight: Tonight, noise: ClassNoise, hardware_class: str) -> list[MachineChange]:
    """Return how the machine changed the metrics that follow its speed. Unknown changes are left out."""
    changes = []
    for metric in MACHINE_METRICS:
        exponent = noise.probe_exponent if metric in PROBE_CORRECTED else 0.0
        of_metric = noise.of(metric)
        shift = None if of_metric is None else tonight.shift(metric, of_metric, exponent)
        if shift is not None:
            low, high = shift.interval
            changes.append(
                MachineChange(
                    metric=metric.name,
                    hardware_class=hardware_class,
                    change=metric.change(relative(shift.estimate)),
                    interval=metric.interval((relative(low), relative(high))),
                    case_sigma=math.sqrt(shift.case_variance),
                    canaries=shift.canaries,
                    apart=shift.apart,
                )
            )
    return changes


def other_than_baseline(run: Run, baseline: Baseline, commit: str | None) -> list[str]:
    """List how a launch that runs the reference differs from the baseline, except for changes of the machine.

    `commit` is the commit of the reference. It is None if the commit is unknown, or if there are uncommitted
    changes. The code counts as the same if its digest is the same, or if the baseline was measured at
    `commit`. The second rule is needed because packages that are installed again have another digest.
    """
    then = baseline.observed
    now = run.observed
    if then is None or now is None:
        return ["settings and versions were not observed for the baseline, for this launch, or for both"]
    settings = comparability.setting_differences(run, baseline)
    differences = [f"{name}: {before} -> {after}" for name, (before, after) in settings.items()]
    differences += [
        change for name, change in _environment_changes(run, baseline).items() if not _is_of_machine(name)
    ]
    is_same_code = then.code is not None and then.code == now.code
    measured = None if baseline.accepted is None else baseline.accepted.measured
    if not is_same_code and (commit is None or commit != measured):
        differences.append(
            f"its code is from {_shown(commit)}, but the baseline was measured at {_shown(measured)}"
            + (MEASURE_AGAIN if measured is None else "")
        )
    return differences


def _shown(commit: str | None) -> str:
    return "an unknown commit" if commit is None else f"commit {commit[:12]}"


def machine_environment(tonight: Tonight) -> list[str]:
    """Describe changes of the machine, such as a new GPU driver. They affect cases and reference alike."""
    changes = dict.fromkeys(
        change
        for canary in tonight.canaries.values()
        for name, change in _environment_changes(canary.runs[-1], canary.baseline).items()
        if _is_of_machine(name)
    )
    return [WITH_THE_MACHINE.format(changes="; ".join(changes))] if changes else []


def _environment_changes(run: Run, baseline: Baseline) -> dict[str, str]:
    """Return the changes of the recorded environment (versions, variables, machine settings), by name."""
    then = {} if baseline.observed is None else baseline.observed.environment
    now = {} if run.observed is None else run.observed.environment
    return comparability.changed_values(
        comparability.of_any_allocation(then), comparability.of_any_allocation(now)
    )


def _is_of_machine(name: str) -> bool:
    """Return whether a recorded fact describes the machine. Reference and cases share the machine."""
    name = comparability.OF_RANKS.sub("", name)
    return name in ("kernel", "driver") or name.startswith("gpu_")


def looks_slower(check: Check) -> bool:
    """Return whether the case itself should be launched with the reference, before its verdict is final.

    A metric that follows the machine's speed looks slower if it regressed, or if it is inconclusive and its
    estimated change is worse than the tolerance allows.
    """
    better = {metric.name: metric.better for metric in MACHINE_METRICS}
    change = check.judged_change
    if check.metric not in better or change is None:
        return False
    growth = -change if better[check.metric] == "higher" else change
    return check.outcome == "regressed" or (check.outcome == "inconclusive" and growth > check.allowed)


def beside_reference(measured: Check, beside: Check) -> Check:
    """Return `beside`, the check of the corrected costs, but with the change that `measured` reports.

    `measured` compares the launches with the baseline, and `beside` compares them with the reference.
    """
    low, high = measured.interval or (0.0, 0.0)
    is_of_machine = measured.outcome != "passed" and beside.outcome == "passed" and (low > 0 or high < 0)
    return beside.replace(
        change=measured.change,
        interval=measured.interval,
        against_reference=_against(beside),
        note=AS_THE_REFERENCE if is_of_machine else beside.note,
    )


def unless_refuted(measured: Check, beside: Check) -> Check:
    """Return the check of the measured costs. A change is only certain if the reference confirms it."""
    check = measured.replace(against_reference=_against(beside))
    if measured.outcome not in CHANGES or measured.outcome == beside.outcome:
        return check
    if beside.outcome == "undecided":
        return check.replace(outcome="undecided")
    note = NOT_BESIDE.format(measured=measured.outcome, beside=beside.outcome)
    return check.replace(outcome="inconclusive", note=note)


def _against(beside: Check) -> AgainstReference | None:
    if beside.change is None or beside.interval is None:
        return None
    return AgainstReference(change=beside.change, interval=beside.interval)
