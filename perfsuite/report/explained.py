"""Explains one case as data, which terminal, Markdown, the HTML page and GitHub's issue only format. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from perfsuite.case.case import Unit
from perfsuite.report import counts, profile, spans, summary
from perfsuite.report.text import plural, sentence
from perfsuite.results.amounts import amount, duration, rate
from perfsuite.results.dry_facts import DryFacts, Fit, Roofline
from perfsuite.results.outcome import CountCheck
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement

SHARED = "shared: others used the machine: counts alone are judged, figures are only shown"
MOST_TUNED = 3  # kernels that a sentence names
_size = partial(amount, unit="bytes")


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Why one case has its verdict. Each line is a sentence; a medium shows all of them or the first."""

    verdict: str  # the outcome and its evidence: `regressed after 3 launches`
    why: Sequence[str]  # why a slower case is slower, the surest cause first
    reasons: Sequence[str]  # why it failed, where no metric says it, and why launches were set aside
    decisive: Sequence[str]  # the checks that decided the verdict
    checks: Sequence[str]
    counts: str | None  # the verdict of the counts; None where they were not judged
    findings: Sequence[str]  # the counts that decided
    listed: Sequence[str]  # counts that changed and are not judged
    remarks: Sequence[str]  # what else of the counts was not judged, and why
    not_counted: Sequence[str]  # why counts say nothing, though there is a baseline of them
    excuses: Sequence[str]  # what else the verdict depends on: others, a known issue, waivers
    held: Sequence[str]  # which steps were long as they held an event
    predicted: Sequence[str]  # what a dry run predicts
    changed: Sequence[str]  # what differs in the environment since the baseline, in one line
    notes: Sequence[str]  # what a reader should know of the launches
    files: Mapping[str, str]  # where the baselines and the files of the launches are, by what they are
    traces: Sequence[str]  # which profiles to open, and with what
    tracebacks: Sequence[tuple[str, str]]  # each traceback behind the launch and the rank that it is of


def explained(result: Measurement) -> Explained:
    """Return everything that is to be said about the verdict of a case."""
    verdict = result.verdict
    by_rank = len(result.counts) > 1
    mark = "(waived) " if result.excused == "waived" else "(shadow) " if result.shadow else ""
    counted = verdict.counts or CountCheck(outcome="not counted", compared=False)
    hidden = summary.not_counted(result)
    return Explained(
        verdict=f"{verdict.outcome} {mark}{_evidence(result)}",
        why=profile.because(verdict),
        reasons=verdict.reasons,
        decisive=[sentence(check, verdict.against) for check in summary.decisive(verdict)],
        checks=[sentence(check, verdict.against) for check in verdict.checks],
        counts=None if verdict.counts is None else counts.judged(counted, verdict.against),
        findings=counts.sentences(counted, judged=True, by_rank=by_rank),
        listed=counts.sentences(counted, judged=False, by_rank=by_rank),
        remarks=counts.remarks(counted),
        not_counted=[] if hidden is None else [f"counts: {hidden}"],
        excuses=[*([SHARED] if result.shared else []), *summary.excuses(result)],
        held=spans.held(() if result.dry else result.runs),
        predicted=prediction(result.dry_facts, result.unit),
        changed=[*_changed(result), *_tuned_differently(result)],
        notes=[f"note: {note}" for note in summary.launch_notes(result)],
        files=dict(_files(result)),
        traces=profile.traces(result),
        tracebacks=[
            *_tracebacks(result.before, "arm A, launch"),
            *_tracebacks(result.runs, "arm B, launch" if result.before else "launch"),
        ],
    )


def _changed(result: Measurement) -> list[str]:
    verdict = result.verdict
    return [f"{summary.since(verdict)}: {'; '.join(verdict.changed)}"] if verdict.changed else []


def _tuned_differently(result: Measurement) -> list[str]:
    """Return which kernels were tuned differently in arm B, which may be chance; nothing without arms."""
    if not (result.before and result.runs):
        return []
    before, now = (runs[-1].autotuned for runs in (result.before, result.runs))
    both = before.keys() & now.keys()
    others = [name for name in sorted(both) if before[name] != now[name]]
    if not others:
        return []
    named = "; ".join(f"{name}: {before[name]} -> {now[name]}" for name in others[:MOST_TUNED])
    more = "; ..." if len(others) > MOST_TUNED else ""
    return [f"autotuning chose differently for {len(others)} of {len(both)} kernels: {named}{more}"]


def _evidence(result: Measurement) -> str:
    of_each = " of each arm" if result.before else ""
    if result.dry:
        return f"by a dry run{of_each} as if on {result.runs[-1].machine.device_name}"
    if result.by_counts:
        is_compared = result.verdict.counts is not None and result.verdict.counts.compared
        return f"{'by the counts of' if is_compared else 'after'} one launch{of_each}"
    pairs = f"{plural(len(result.runs), 'pair')} of launches"
    return f"after {pairs if result.before else plural(len(result.runs), 'launch')}"


def _files(result: Measurement) -> Iterator[tuple[str, str]]:
    verdict = result.verdict
    if result.baseline_file:
        differs = verdict.failure in ("unlike", "loss") and bool(result.runs) and not result.runs[-1].failure
        yield "baseline", f"{result.baseline_file}{summary.IF_MEANT if differs else ''}"
    if verdict.counts is not None and verdict.counts.baseline_file:
        yield "baseline of the counts", verdict.counts.baseline_file
    yield f"files of the {'dry run' if result.dry else 'launches'}", result.directory


def _tracebacks(runs: Sequence[Run], what: str) -> Iterator[tuple[str, str]]:
    for number, run in enumerate(runs, 1):
        if run.failure is not None and run.failure.traceback:
            rank = "" if run.failure.rank is None else f" of rank {run.failure.rank}"
            yield f"{what} {number}, traceback{rank}", run.failure.traceback.rstrip()


def prediction(facts: DryFacts, unit: Unit = "tokens") -> list[str]:
    """Return what a dry run predicts, memory and the least time of a step; `unit` is what the case counts."""
    memory = [] if facts.fit is None else _memory(facts.fit)
    return memory if facts.roofline is None else [*memory, *_speed(facts.roofline, unit)]


def _memory(fit: Fit) -> list[str]:
    outside = [f"{part.name} {_size(part.low)} to {_size(part.high)}" for part in fit.outside]
    whole = f"the model, before it is sharded {_size(fit.built)}"
    return [
        f"{fit.verdict}: rank {fit.rank} needs {_size(fit.least)} to {_size(fit.most)} of {_size(fit.card)}",
        *([whole] if fit.built > fit.allocated else []),
        f"reserved by the caching allocator {_size(fit.reserved)} ({_size(fit.reserved_expandable)} with "
        f"expandable segments), allocated {_size(fit.allocated)}, live tensors {_size(fit.live)}",
        f"outside the allocator: {', '.join(outside)}",
    ]


def _speed(limit: Roofline, unit: Unit) -> list[str]:
    compute = f"{limit.flops / 1e12:.3g} TFLOP at {limit.peak_flops / 1e12:.4g} TFLOP/s"
    known = ""
    unknown = ", whose link is unknown: not counted"
    if limit.link_bytes_per_s is not None:
        known = f" at {limit.link_bytes_per_s / 1e9:.0f} GB/s take {duration(limit.wire_s)}"
    wires = (
        (limit.wire_bytes, f"between GPUs of a machine{known or unknown}"),
        (limit.between_machines_bytes, f"between machines{unknown}"),
    )
    if not limit.is_bound:
        return [f"no bound on speed: {compute} take less time than the launches of a step's kernels"]
    return [
        f"a step takes {duration(limit.step_s)} at least, by {limit.bound_by}: at most "
        f"{rate(limit.tokens_per_s)} {unit}/s",
        f"{compute} take {duration(limit.compute_s)}",
        *(f"{_size(sent)} {how}" for sent, how in wires if sent),
    ]
