"""Turn the counts of a step into amounts, tables and lines of text for all reports. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from perfsuite.report.text import NONE, Table, cut, plural
from perfsuite.results.amounts import amount, signed
from perfsuite.results.counts import (
    PHASES,
    Compiled,
    Counts,
    KeptObjects,
    OfRanks,
    StepMemory,
    group_name,
    named_ranks,
    numbers,
)
from perfsuite.results.outcome import CountCheck
from perfsuite.verdict.count_sentences import held_by

UNKNOWN = "unknown"
MOST_UNSTEADY = 5  # maximum number of unsteady counts that are named
MOST_FINDINGS = 50  # maximum number of rows in the table of findings
MOST_TYPES = 10  # maximum number of types in the table of objects kept by steps


def flops(counts: Counts) -> int:
    """Return the FLOPs of a step."""
    return sum(counts.flops.values())


def moved(counts: Counts) -> int:
    """Return the bytes of all messages in a step."""
    return sum(call.bytes for call in counts.collectives)


def peak(counts: Counts) -> int | None:
    """Return the peak bytes of live tensors; None if memory was not counted."""
    return None if counts.memory is None else counts.memory.peak


def kernels(counts: Counts) -> int | None:
    """Return the calls of operators that do work; None if unknown, as in a dry run of a compiled model."""
    return None if counts.kernels is None else sum(counts.kernels.values())


def ranks(entry: OfRanks) -> str:
    """Name the ranks of an entry, such as `rank 0` or `ranks 0-3`."""
    return named_ranks(entry.ranks)


def in_short(counts: Counts) -> str:
    """Summarise a step in one line: FLOPs, bytes of collectives, peak of live tensors."""
    parts = [amount(flops(counts), "FLOP"), f"{amount(moved(counts), 'bytes')} in collectives"]
    if counts.memory is not None:
        parts.append(f"at most {amount(counts.memory.peak, 'bytes')} live")
    return ", ".join(parts)


def tables(counts: Counts) -> list[Table]:
    """Return the counts of a step as tables: collectives, work, memory, kept objects, and compilation."""
    made = [_calls_table(counts), _work_table(counts)]
    made += (
        [] if counts.memory is None else [_memory_table(counts.memory, is_fused=counts.kernels is not None)]
    )
    made += [] if counts.kept is None else [_kept_table(counts.kept)]
    made += [] if counts.compiled is None else [_compiled_table(counts.compiled)]
    return [table for table in made if table]


def _calls_table(counts: Counts) -> Table:
    rows = [
        (
            call.kind,
            group_name(call.ranks, call.apart),
            call.dtype or NONE,
            call.phase,
            amount(call.count, "calls"),
            amount(call.bytes, "bytes"),
        )
        for call in sorted(counts.collectives, key=lambda call: (-call.bytes, -call.count))
    ]
    caption = "Bytes are those of whole messages, such as the complete tensor that is gathered or reduced."
    headers = ("collective", "group", "dtype", "phase", "calls", "bytes")
    return Table(caption=caption, headers=headers, rows=rows, text_columns=4)


def _work_table(counts: Counts) -> Table:
    work: dict[str, Mapping[Any, int]] = {
        "FLOPs": counts.flops,
        **({} if counts.kernels is None else {"kernels": counts.kernels}),
        "host reads": counts.host_reads,
    }
    work |= {} if counts.python is None else {"Python calls": counts.python.calls}
    done: dict[str, list[int]] = {
        phase: [amounts.get(phase, 0) for amounts in work.values()] for phase in PHASES
    }
    done["step"] = [sum(amounts.values()) for amounts in work.values()]
    rows = [
        (name, amount(computed, "FLOP"), *(amount(number, "calls") for number in called))
        for name, (computed, *called) in done.items()
        if any((computed, *called)) or name == "step"
    ]
    caption = "FLOPs are those of matmuls, convolutions and attention. A host read waits for the device."
    if counts.python is not None and not counts.python.all_threads:
        caption += (
            " Python calls are those of the training thread. "
            "From Python 3.12 on, all threads would be counted."
        )
    if counts.kernels is None:
        caption += " The number of kernels is unknown, because a dry run generates no kernels."
    elif counts.compiled is not None:
        caption += " Kernels in compiled code are not included."
    if counts.without_flops:
        others = [f"{name} in {plural(calls, 'call')}" for name, calls in counts.without_flops.items()]
        caption += f" FLOPs do not include {', '.join(others)}, for which there is no formula."
    blocking = counts.blocking_copies or {}
    for way, count in counts.device_copies.items():
        waits = f", {blocking[way]:,} of them blocking" if way in blocking else ""
        caption += f" Copied {way} {plural(count, 'time')}{waits}."
    for function, count in (counts.stalls or {}).items():
        caption += f" {function} was called {plural(count, 'time')}."
    return Table(caption=caption, headers=("phase", *work), rows=rows)


def _memory_table(memory: StepMemory, *, is_fused: bool) -> Table:
    when = "at the start" if memory.peak_in == "start" else f"in {memory.peak_in}"
    names = {"kept": "allocated before the step"} | {phase: f"allocated in {phase}" for phase in PHASES}
    parts = Counter({names.get(part, part): size for part, size in memory.at_peak.items() if size})
    rows = [
        (f"peak, {when}", amount(memory.peak, "bytes")),
        *((f"at the peak: {part}", amount(size, "bytes")) for part, size in parts.most_common()),
        ("saved for backward", amount(memory.saved_for_backward, "bytes")),
        ("growth over the step", amount(memory.growth, "bytes")),
        ("allocations", amount(memory.allocations, "calls")),
    ]
    if memory.in_cycles is not None and memory.in_cycles.bytes:
        rows.append(("in reference cycles", amount(memory.in_cycles.bytes, "bytes")))
    caption = "Memory of live tensors. Each storage is included once, without the overhead of the allocator."
    if not is_fused:
        caption += " The peak is that of operators before they are fused, and fusion can lower it."
    return Table(caption=caption, headers=("memory", "of the step"), rows=rows)


def _kept_table(kept: KeptObjects) -> Table:
    most_first = sorted(kept.by_type.items(), key=lambda entry: (-entry[1], entry[0]))
    rows = [("all types", amount(kept.total, "objects"))]
    rows += [(name, amount(count, "objects")) for name, count in most_first[:MOST_TYPES]]
    rows += [("tensors with an autograd graph", amount(kept.graphs, "objects"))] if kept.graphs else []
    holders = held_by(kept.holders)
    caption = f"Objects that Python's garbage collector tracks and that each step leaves behind{holders}."
    return Table(caption=caption, headers=("objects", "kept per step"), rows=rows)


def _compiled_table(compiled: Compiled) -> Table:
    made = {
        "graphs": compiled.graphs,
        "recompilations": compiled.recompilations,
        "generated kernels": compiled.kernels,
        "calls of other kernels": compiled.extern_calls,
        **{f"graph break: {reason}": count for reason, count in compiled.breaks.items()},
    }
    rows = [(name, UNKNOWN if count is None else amount(count, "calls")) for name, count in made.items()]
    caption = "The output of torch.compile, over the whole launch."
    return Table(caption=caption, headers=("compiled", "number"), rows=rows)


def outcome_of_counts(check: CountCheck, against: str | None = None) -> str:
    """Return the verdict on the counts in a few words. For `against`, see `text.sentence`."""
    if not check.compared and check.outcome in ("not counted", "passed"):
        return "not judged" if check.outcome == "passed" else not_counted(check)
    if against is not None and check.compared:
        if not check.findings:
            return f"the same as in {against}"
        is_judged = any(finding.outcome != "passed" for finding in check.findings)
        return f"different from {against}" if is_judged else f"different from {against}, but not judged"
    if check.outcome != "passed":
        return check.outcome
    return "passed, with changes that are not judged" if check.findings else "the same as in the baseline"


def not_counted(check: CountCheck) -> str:
    """Explain why a step was not counted, such as `not counted: a CUDA graph was replayed ...`."""
    return f"not counted: {'; '.join(check.notes)}"


def sentences(check: CountCheck, *, judged: bool, by_rank: bool, longest: int | None = None) -> list[str]:
    """Return the judged findings, or the others if not `judged`, as sentences without duplicates (`once`).

    `longest` is the maximum length of the sentence of each finding, in characters. The cost of the change is
    never shortened (`Finding.in_words`).
    """
    of_these = [finding for finding in check.findings if (finding.outcome != "passed") == judged]
    with_ranks = (
        (f"{finding.outcome if judged else 'not judged'}: {finding.in_words(longest)}", finding.ranks)
        for finding in of_these
    )
    return once(with_ranks, by_rank=by_rank)


def prices(check: CountCheck) -> list[str]:
    """Say how many judged findings have a predicted price, if only some of them have one.

    Returns an empty list if all prices are predicted. The list is also empty if no price is predicted,
    because the sentence of each finding then gives the reason.
    """
    costs = [finding.cost for finding in check.findings if finding.outcome != "passed"]
    known = [cost for cost in costs if cost is not None and cost.most_s is not None]
    naive = sum(cost.why_naive is not None for cost in known)
    predicted = len(known) - naive
    none = len(costs) - len(known)
    if not predicted or predicted == sum(cost is not None for cost in costs):
        return []
    parts = [f"a price is predicted for {predicted} of {len(costs)} changes"]
    if naive:
        parts.append(f"for {naive}, only the time that the work takes by itself is known")
    if none:
        parts.append(f"for {none}, no price is known")
    return ["; ".join(parts)]


def once(sentences: Iterable[tuple[str, str]], *, by_rank: bool) -> list[str]:
    """Return the sentences without duplicates. With `by_rank`, add the ranks to each sentence.

    The sentences of two ranks can be equal although the exact numbers of bytes on these ranks differ, because
    the sentences show rounded numbers.
    """
    ranks_of: dict[str, set[int]] = {}
    for sentence, ranks in sentences:
        ranks_of.setdefault(sentence, set()).update(numbers(ranks) if by_rank else ())
    if not by_rank:
        return list(ranks_of)
    return [f"{sentence} ({named_ranks(sorted(of))})" for sentence, of in ranks_of.items()]


def remarks(check: CountCheck) -> list[str]:
    """List counts that were not judged, and why."""
    if check.outcome == "not counted" and not check.compared:
        return []
    unsteady = ", ".join(cut(check.unsteady, MOST_UNSTEADY))
    return [
        *([f"not judged, because the launches differ in: {unsteady}"] if unsteady else []),
        *check.notes,
    ]


def table_of_findings(check: CountCheck, against: str | None) -> Table:
    """Return the findings with their amounts as a table. For `against`, see `text.sentence`."""
    before = against or "baseline"
    rows = [
        (
            finding.field,
            "listed" if finding.outcome == "passed" else finding.outcome,
            signed(finding.now - finding.before, finding.unit),
            amount(finding.before, finding.unit),
            amount(finding.now, finding.unit),
            finding.ranks,
            finding.in_words(),
        )
        for finding in check.findings[:MOST_FINDINGS]
    ]
    caption = (
        f"Changes in the work of a step, from {before} to now. "
        'Changes with the verdict "listed" were not judged.'
    )
    left = len(check.findings) - MOST_FINDINGS
    if left > 0:
        caption += f" {left} more are in results.json."
    headers = ("count", "verdict", "change", before, "now", "ranks", "in words")
    return Table(caption=caption, headers=headers, rows=rows, text_columns=2, last_text_columns=2)
