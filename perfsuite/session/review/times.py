"""Show baselines of any kind, and accept baselines of times and memory with their profiles."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from rich.text import Text

from perfsuite.errors import PerfsuiteError
from perfsuite.report import summary, text
from perfsuite.report.console import console
from perfsuite.report.profile import split
from perfsuite.report.text import plural
from perfsuite.results import baseline
from perfsuite.results.amounts import amount
from perfsuite.results.baseline import MIN_ACCEPTED, Acceptance, Baseline, BaselineDocument
from perfsuite.results.dry_facts import Expected
from perfsuite.results.metric import (
    PEAK_MEMORY,
    TOKENS_PER_S,
    Metric,
    SpanSeconds,
    in_unit,
    judged_metrics,
    metrics_of,
)
from perfsuite.results.profile import LaunchProfile, ProfileBaseline
from perfsuite.results.run import Figures, Run
from perfsuite.results.store import BaselineStore
from perfsuite.session.review import computed
from perfsuite.verdict.comparability import environment_changes, launch_problems, setting_differences
from perfsuite.verdict.loss import loss_differs
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.profiled import compared

B = TypeVar("B", bound=BaselineDocument)
MAX_REGRESSION = 0.005  # largest relative regression of a baseline that is accepted without a reason


@dataclass(frozen=True, kw_only=True)
class Shown(Generic[B]):
    """How baselines of one kind are shown."""

    on: str = "on"  # the words between a case and its folder
    # Columns of the list, without the last two (date and acceptance), which every list has. Empty if
    # baselines of this kind are not listed.
    headings: Sequence[str] = ()
    # Values of a baseline in the list, after its folder and case. The names of the values include units.
    figures: Callable[[B], dict[str, float | None]] = lambda _baseline: {}
    cells: Callable[[B], list[str]] = lambda _baseline: []  # the values of `figures` as text
    # Lines with the details of a baseline, after the lines about its acceptance.
    details: Callable[[B], list[str]] = lambda _baseline: []
    # Lines about the differences between two baselines. None stands for a missing baseline.
    changes: Callable[[B | None, B | None], list[str]]

    def title(self, recorded: B) -> Text:
        """Return a title that names a baseline's case and folder."""
        return Text.assemble((recorded.case.id, "bold"), f" {self.on} {recorded.folder}")

    def before_after(self, before: B | None, now: B | None) -> Text:
        """Describe the differences between two baselines of a case. One of the two can be missing."""
        either = now or before
        assert either is not None
        return Text("\n  ").join([self.title(either), *map(Text, self.changes(before, now))])


class Launch(NamedTuple):
    """One launch in the store."""

    run: Run
    session: str
    is_healthy: bool  # whether its own session judged the launch and did not set it aside
    expected: Expected | None = None  # the time of a step that its session predicted; None: no prediction
    commit: str | None = None  # commit whose code it ran. None: unknown, or with uncommitted changes


class Refused(PerfsuiteError):
    """Raised if runs cannot become a baseline."""


def _listed(recorded: Baseline) -> dict[str, float | None]:
    medians = (TOKENS_PER_S.name, PEAK_MEMORY.name)
    figures = {in_unit(name, recorded.case.unit): recorded.median(name) for name in medians}
    return {**figures, "launches": len(recorded.launches)}


def _cells(recorded: Baseline) -> list[str]:
    speed, peak, launches = _listed(recorded).values()
    speed_text = "not measured" if speed is None else summary.speed(speed, recorded.case.unit, "tokens")
    return [speed_text, amount(peak, PEAK_MEMORY.unit), str(launches)]


def _details(recorded: Baseline) -> list[str]:
    lines = []
    for metric in metrics_of(_figures(recorded)):
        values = ", ".join(amount(value, metric.unit) for value in recorded.values(metric.name))
        label = metric.counting(recorded.case.unit).label
        lines.append(f"{label}: {values or 'not measured'}{_noise(recorded, metric)}")
    observed = recorded.observed
    if observed is not None:
        for name, entries in (("settings", observed.settings), ("environment", observed.environment)):
            lines.append(f"{name}: " + ", ".join(f"{key}={value}" for key, value in entries.items()))
    return lines


def _changes(before: Baseline | None, now: Baseline | None) -> list[str]:
    either = now or before
    assert either is not None
    lines = [f"launches: {_launches(before) if before else 'new'} -> {_launches(now) if now else 'removed'}"]
    for metric in metrics_of(_figures(before, now)):
        old, new = (side.median(metric.name) if side else None for side in (before, now))
        if (old, new) == (None, None):
            continue
        was = amount(old, metric.unit) + _noise(before, metric) if before else "new"
        now_is = amount(new, metric.unit) + _noise(now, metric) if now else "removed"
        change = f" ({text.percent(new / old - 1)})" if old and new else ""
        lines.append(f"{metric.counting(either.case.unit).label}: {was} -> {now_is}{change}")
    return lines + (list(computed.of_times(before, now)) if before and now else [])


def accepted(
    reviewed: BaselineStore, launches: Sequence[Launch], acceptance: Acceptance, *, another_machine: bool
) -> Baseline:
    """Make these launches, oldest first, a baseline of their case, and show how it differs from the old one.

    Launches that their session set aside are left out, and their number is shown. With `another_machine`,
    launches that were set aside only because the machine has changed since the baseline are included. Raises
    `Refused` if the launches cannot become a baseline, or if this needs a reason and `acceptance` has none.
    """
    newest = launches[-1].run
    stored = reviewed.find(newest.machine.hardware_class, newest.case)
    before = stored.baseline if stored else None
    left_out = Counter[str]()
    chosen = _choose(launches, before, another_machine, left_out)
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    if len(chosen) < MIN_ACCEPTED:
        raise Refused(
            f"{len(chosen)} healthy launches, but a baseline needs {MIN_ACCEPTED} "
            f"(left out: {why or 'none'}). Measure again with --perf-min-launches={MIN_ACCEPTED}. If the "
            "machine itself has changed since the baseline, give --another-machine"
        )
    runs = [launch.run for launch in chosen]
    acceptance = acceptance.replace(measured=chosen[-1].commit)
    now = baseline.from_runs(runs, sessions=[launch.session for launch in chosen], accepted=acceptance)
    out = console()
    out.print(TIMES.before_after(before, now))
    if why:
        out.print(f"  left out: {why}")
    older = (baseline.from_runs([run]) for run in runs[:-1])
    changed = dict.fromkeys(change for run in older for change in environment_changes(runs[-1], run))
    if changed:
        out.print("  changes from older launches to the newest: " + "; ".join(changed))
    if before is not None and not acceptance.reason:
        _require_reason(before, now, runs)
    return now


def _choose(
    launches: Sequence[Launch], before: Baseline | None, another_machine: bool, left_out: Counter[str]
) -> list[Launch]:
    """Return the healthy launches that are comparable with the newest healthy launch.

    Count all other launches in `left_out`, by reason.
    """
    chosen: list[Launch] = []
    for launch in reversed(launches):
        run = launch.run
        newest = baseline.from_runs([chosen[0].run]) if chosen else None
        if run.failure is not None:
            left_out["failed"] += 1
        elif run.inject is not None:
            left_out["injected"] += 1
        elif not (launch.is_healthy or another_machine):
            left_out["set aside by their session, or not judged"] += 1
        elif launch_problems(run, newest if another_machine else before):
            left_out["unhealthy"] += 1
        elif newest is not None and (unlike := setting_differences(run, newest)):
            reasons = (f"{key} is {its!r} instead of {usual!r}" for key, (usual, its) in unlike.items())
            left_out[f"unlike the newest ({'; '.join(reasons)})"] += 1
        else:
            chosen.append(launch)
    return chosen[::-1]


def _require_reason(before: Baseline, now: Baseline, runs: Sequence[Run]) -> None:
    device = runs[-1].machine.device
    for metric in judged_metrics(_figures(before, now), device):
        old = before.median(metric.name)
        new = now.median(metric.name)
        if old is None:
            continue
        label = metric.counting(now.case.unit).label
        if isinstance(metric, SpanSeconds):
            metric = metric.against(_figures(before))
            if new is None:
                raise Refused(
                    f"{label} is in the baseline, but was not seen now. To accept it anyway, give --reason"
                )
        if new is None:
            raise Refused(f"{label} is in the baseline, but was not measured now")
        allowed = MAX_REGRESSION if metric in (TOKENS_PER_S, PEAK_MEMORY) else metric.tolerance(device)
        if isinstance(metric, SpanSeconds):
            allowed = metric.bound(allowed)
        less, more = (old, new) if metric.better == "lower" else (new, old)
        if more > less * (1 + allowed):  # no division: 0 bytes is a valid value
            change = f"{amount(old, metric.unit)} -> {amount(new, metric.unit)}"
            raise Refused(f"{label} gets worse ({change}). To accept it anyway, give --reason")
    difference = loss_differs(runs, before)
    if difference is not None:
        raise Refused(f"{difference}. To accept it anyway, give --reason")


def _figures(*baselines: Baseline | None) -> list[Figures]:
    return [launch.figures for shown in baselines if shown is not None for launch in shown.launches]


def _launches(recorded: Baseline) -> str:
    sessions = len({launch.session for launch in recorded.launches})
    return f"{len(recorded.launches)} of {plural(sessions, 'session')}"


def _noise(shown: Baseline, metric: Metric) -> str:
    noise = class_noise([shown]).of(metric)
    return f" +- {noise.sigma:.1%}" if noise is not None else ""


TIMES = Shown(
    headings=("hardware class", "case", "tokens/s", "memory", "launches"),
    figures=_listed,
    cells=_cells,
    details=_details,
    changes=_changes,
)


def profile_lines(profile: LaunchProfile) -> list[str]:
    """Describe where the time of a step goes."""
    return [f"profile of ranks {entry.name}: {split(entry.profile.split)}" for entry in profile.ranks]


def _profile_changes(before: ProfileBaseline | None, now: ProfileBaseline | None) -> list[str]:
    if before is None or now is None:
        return [f"profile: {'new' if before is None else 'removed'}"]
    difference = compared(before.profile, now.profile, "the baseline")
    return [*(difference.calls or ("a step makes the same calls",)), *difference.hints, *difference.notes]


PROFILES = Shown[ProfileBaseline](on="profiled on", changes=_profile_changes)
