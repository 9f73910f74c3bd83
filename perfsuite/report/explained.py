"""Explain one case as data. Each report (terminal, Markdown, HTML, GitHub issue) formats this data. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from perfsuite.case.case import Unit
from perfsuite.report import counts, expected, profile, spans, summary
from perfsuite.report.text import plural, sentence
from perfsuite.results.amounts import amount, duration, rate
from perfsuite.results.dry_facts import DryFacts, Fit, Roofline
from perfsuite.results.outcome import CountCheck
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement

SHARED = (
    "shared: other jobs used the machine, so only counts are judged. Times and memory are shown without "
    "being judged"
)
MOST_TUNED = 3  # maximum number of differently tuned kernels that a sentence names
_size = partial(amount, unit="bytes")


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The explanation of a verdict. Each line is a sentence. A report shows all lines or only the first."""

    verdict: str  # the outcome and its evidence, such as `regressed after 3 launches`
    why: Sequence[str]  # causes of a regression, the most certain cause first
    reasons: Sequence[str]  # what no metric shows, such as why the case failed or why launches were set aside
    decisive: Sequence[str]  # the checks that decided the verdict
    checks: Sequence[str]
    counts: str | None  # the verdict on the counts; None: the counts were not judged
    findings: Sequence[str]  # the counts that decided the verdict
    prices: Sequence[str]  # how many of these counts have a predicted price; empty if all or none have one
    listed: Sequence[str]  # changed counts that are not judged
    remarks: Sequence[str]  # other counts that were not judged, and why
    not_counted: Sequence[str]  # why there are no counts, although there is a baseline of counts
    excuses: Sequence[str]  # circumstances: other users, injected faults, a known issue, waivers
    held: Sequence[str]  # steps that took long because of an event in them, such as saving a checkpoint
    predicted: Sequence[str]  # predictions of a dry run, and how launches compare with them
    changed: Sequence[str]  # changes in the environment since the baseline, in one line
    notes: Sequence[str]  # remarks on the launches
    files: Mapping[str, str]  # paths of the baselines and of the launches' files, by description
    traces: Sequence[str]  # the trace files of profiles, and the tool that opens them
    tracebacks: Sequence[tuple[str, str]]  # the launch and rank of each traceback, and its text


def explained(result: Measurement, longest: int | None = None) -> Explained:
    """Explain the verdict of a case.

    `longest` is the maximum length of the sentence about each changed count, in characters. The cost of the
    change is never shortened (`Finding.in_words`).
    """
    verdict = result.verdict
    by_rank = len(result.counts) > 1
    mark = "(waived) " if result.excused == "waived" else "(shadow) " if result.shadow else ""
    counted = verdict.counts or CountCheck(outcome="not counted", compared=False)
    hidden = summary.not_counted(result)
    return Explained(
        verdict=f"{verdict.outcome} {mark}{_evidence(result)}",
        why=profile.because(verdict, longest),
        reasons=verdict.reasons,
        decisive=[sentence(check, verdict.against) for check in summary.decisive(verdict)],
        checks=[sentence(check, verdict.against) for check in verdict.checks],
        counts=None if verdict.counts is None else counts.outcome_of_counts(counted, verdict.against),
        findings=counts.sentences(counted, judged=True, by_rank=by_rank, longest=longest),
        prices=counts.prices(counted),
        listed=counts.sentences(counted, judged=False, by_rank=by_rank, longest=longest),
        remarks=counts.remarks(counted),
        not_counted=[] if hidden is None else [f"counts: {hidden}"],
        excuses=[*([SHARED] if result.shared else []), *summary.excuses(result)],
        held=spans.held(() if result.dry else result.runs),
        predicted=[*prediction(result.dry_facts, result.unit), *expected.of_launches(result)],
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
    """Describe kernels that were tuned differently in arm B, possibly by chance; empty without arms."""
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
        return f"in a dry run{of_each} as if on {result.runs[-1].machine.device_name}"
    if result.by_counts:
        is_compared = result.verdict.counts is not None and result.verdict.counts.compared
        return f"{'based on the counts of' if is_compared else 'after'} one launch{of_each}"
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
    """Describe the memory use and the step times that a dry run predicts; `unit` is the case's unit."""
    return [
        *([] if facts.fit is None else _memory(facts.fit)),
        *([] if facts.roofline is None else _speed(facts.roofline, unit)),
        *expected.of_dry_run(facts, unit),
    ]


def _memory(fit: Fit) -> list[str]:
    outside = [f"{part.name} {_size(part.low)} to {_size(part.high)}" for part in fit.outside]
    whole = f"the model before it is sharded: {_size(fit.built)}"
    start = f"allocated up to the end of the first step: {_size(fit.start)}"
    later = f"live tensors in step {fit.later_step}: {_size(fit.later)}"
    nominal = " (nominal; the usable memory of this GPU is less, but unknown)" if fit.card_is_nominal else ""
    needs = f"rank {fit.rank} needs {_size(fit.least)} to {_size(fit.most)} of {_size(fit.card)}"
    return [
        f"{fit.verdict}: {needs}{nominal}",
        *([whole] if fit.built > fit.allocated else []),
        *([start] if fit.start > fit.allocated else []),
        *([later] if fit.later > fit.allocated else []),
        f"reserved by the caching allocator {_size(fit.reserved)}, at most {_size(fit.reserved_upper)} "
        f"({_size(fit.reserved_expandable)} with expandable segments), "
        f"allocated {_size(fit.allocated)}, live tensors {_size(fit.live)}",
        f"outside the allocator: {', '.join(outside)}",
    ]


def _speed(limit: Roofline, unit: Unit) -> list[str]:
    compute = f"{limit.flops / 1e12:.3g} TFLOP at {limit.peak_flops / 1e12:.4g} TFLOP/s"
    link = ""
    unknown = ", not included because the speed of the link is unknown"
    if limit.link_bytes_per_s is not None:
        link = f" at {limit.link_bytes_per_s / 1e9:.0f} GB/s take {duration(limit.wire_s)}"
    wires = (
        (limit.wire_bytes, f"between GPUs of a machine{link or unknown}"),
        (limit.between_machines_bytes, f"between machines{unknown}"),
    )
    if not limit.is_bound:
        return [f"no bound on speed: {compute} take less time than launching the kernels of a step"]
    return [
        f"a step takes at least {duration(limit.step_s)}, limited by {limit.bound_by}: at most "
        f"{rate(limit.tokens_per_s)} {unit}/s",
        f"{compute} take {duration(limit.compute_s)}",
        *(f"{_size(sent)} {how}" for sent, how in wires if sent),
    ]
