"""Accept and show baselines of counts for `perfsuite baseline`."""

from collections.abc import Sequence
from dataclasses import replace

from perfsuite.dry.machine import telling_ranks
from perfsuite.errors import PerfsuiteError
from perfsuite.report import counts as count_report
from perfsuite.report.console import console
from perfsuite.report.text import plural
from perfsuite.results.amounts import amount
from perfsuite.results.baseline import Acceptance
from perfsuite.results.count_baseline import DRY, CountBaseline, from_runs, versions_of
from perfsuite.results.counts import Counts, are_alike, of_rank
from perfsuite.results.quantities import (
    COMPILED,
    GRAPHS_LEFT,
    GROWTH,
    HOST_READS,
    IN_CYCLES,
    KEPT_GRAPHS,
    KERNELS,
    PEAK,
    SAVED,
    Unit,
    quantities,
)
from perfsuite.results.run import Run
from perfsuite.results.store import BaselineFiles
from perfsuite.session.review import computed
from perfsuite.session.review.times import Refused, Shown
from perfsuite.verdict import exact
from perfsuite.verdict.computation import Computed, other_computation
from perfsuite.verdict.count_findings import ranks_in
from perfsuite.verdict.evidence import counted
from perfsuite.verdict.loss import common_factor, steadily_differ

OLD = "the old baseline"
LOST = "not counted in the newest session, although the baseline contains these counts. Count them first"


def _listed(recorded: CountBaseline) -> dict[str, float | None]:
    counts = recorded.counts[0].counts  # counts of the first rank
    return {
        "collective_bytes": count_report.moved(counts),
        "flop": count_report.flops(counts),
        "kernel_calls": count_report.kernels(counts),
        "peak_live_bytes": count_report.peak(counts),
        "launches": recorded.launches,
    }


def _cells(recorded: CountBaseline) -> list[str]:
    *figures, launches = _listed(recorded).values()
    units: tuple[Unit, ...] = ("bytes", "FLOP", "calls", "bytes")
    cells = [
        "not counted" if figure is None else amount(figure, unit)
        for figure, unit in zip(figures, units, strict=True)
    ]
    return [*cells, str(launches)]


def can_be_accepted(run: Run) -> bool:
    """Return whether a launch was counted, and no fault was injected.

    A dry run without rank 0 cannot be accepted: it was only a look at other ranks (`--rank`).
    """
    only_looks = run.dry and of_rank(run.counts, 0) is None
    return bool(counted([run])) and run.inject is None and not only_looks


def _is_whole(run: Run) -> bool:
    needed: tuple[int, ...]
    try:
        needed = telling_ranks(run.case)
    except PerfsuiteError:  # the framework is not installed here
        needed = (0,)
    return all(of_rank(run.counts, rank) is not None for rank in needed)


def accepted(
    reviewed: BaselineFiles[CountBaseline], newest_session: Sequence[Run], acceptance: Acceptance
) -> CountBaseline | None:
    """Make the counts of the newest session's launches a baseline, and show how it differs from the old one.

    Earlier sessions are left out, because they might have run different code. Some counts could then differ
    between the launches, and such counts are never judged. Launches whose counting method or versions differ
    from those of the newest launch are also left out. Returns None if no launch was counted. Raises `Refused`
    if the reviewed baseline has counts that the launches lack. Without a reason, also raises `Refused` if a
    step does more work or computes something else than in the reviewed baseline.
    """
    launches = [run for run in newest_session if can_be_accepted(run)]
    if not launches:
        return None
    newest = launches[-1]
    if newest.dry and not _is_whole(newest):
        raise Refused("the newest dry run counted only some ranks: run it again without --rank")

    def way(run: Run) -> object:
        return {entry.counts.method for entry in run.counts}, versions_of(run)

    now = from_runs([run for run in launches if way(run) == way(newest)], accepted=acceptance)
    stored = reviewed.find(now.target, now.case)
    before = stored.baseline if stored else None
    if stored is not None and before is not None:
        lost = exact.missing_ranks(before, now)
        if lost:
            raise Refused(f"{lost} {LOST}")
        lost_quantities = _lost_quantities(before, now)
        if lost_quantities:
            names = ", ".join(lost_quantities)
            raise Refused(f"{names}: {LOST}, or delete {stored.file}")
    console().print(COUNTS.before_after(before, now))
    if before is not None and not acceptance.reason:
        _require_reason(before, now)
    return now


_OF_COMPILATION = (KERNELS, PEAK, SAVED, GROWTH, IN_CYCLES, *COMPILED)
"""Quantities that are known only if the model is compiled, and quantities that are known only if it is not
compiled."""


def _lost_quantities(before: CountBaseline, now: CountBaseline) -> list[str]:
    """Return the quantities that the old baseline has, and that are unknown in the new one.

    They would never be judged again. Three kinds are left out:

    - quantities that depend on a version: Python calls, and host reads of an older counting method
    - quantities of a loader's worker, because not every launch can count them
    - kept graphs: if the kept objects are also unknown, only the kept objects are returned

    If only one side is compiled, `_OF_COMPILATION` is left out as well.
    """
    # A change of method is accepted only with --reason, and the new method can count other quantities.
    if not are_alike(before.method, now.method):
        return []
    names = dict[str, None]()
    for rank in sorted(ranks_in(before.counts)):
        then = of_rank(before.counts, rank)
        today = of_rank(now.counts, rank)
        if then is None or today is None:
            continue
        is_compiled = {_is_compiled(then), _is_compiled(today)} == {True, False}
        for quantity in quantities((then, today)):
            if is_compiled and quantity in _OF_COMPILATION:
                continue
            of_graphs = quantity in (KEPT_GRAPHS, GRAPHS_LEFT)
            depends = quantity.is_python or quantity.of_worker or of_graphs or quantity is HOST_READS
            if not depends and quantity.value(then) is not None and quantity.value(today) is None:
                names[quantity.name] = None
    return [*names]


def _is_compiled(counts: Counts) -> bool:
    return counts.compiled is not None or counts.kernels is None


def _other_values(before: CountBaseline, now: CountBaseline) -> str | None:
    """Return why the new launches compute something other than the old ones, in the words of a verdict."""
    then = Computed.of_counts(before)
    today = replace(Computed.of_counts(now), is_dry=now.target.startswith(DRY))
    others = other_computation(then, today, OLD)
    if others:
        return others[0]
    if not (then.launches and today.launches):
        return None
    return common_factor(then.launches, today.launches, OLD) or steadily_differ(then.launches, today.launches)


def _require_reason(before: CountBaseline, now: CountBaseline) -> None:
    if not are_alike(before.method, now.method):
        raise Refused(f"{_other_method(before, now)}. To accept it anyway, give --reason")
    worse = [finding for finding in exact.count_differences(before, now) if finding.outcome == "regressed"]
    if worse:
        others = f" and {plural(len(worse) - 1, 'count')} more" if len(worse) > 1 else ""
        raise Refused(
            f"a step does more work ({worse[0].sentence}{others}). To accept it anyway, give --reason"
        )
    other = _other_values(before, now)
    if other is not None:
        raise Refused(f"{other}. To accept it anyway, give --reason")


def _other_method(before: CountBaseline, now: CountBaseline) -> str:
    return (
        f"the new counts are from the method {now.method!r}, the old ones from {before.method!r}: "
        "not comparable"
    )


def _changes(before: CountBaseline | None, now: CountBaseline | None) -> list[str]:
    lines = [f"launches: {before.launches if before else 'new'} -> {now.launches if now else 'removed'}"]
    if before and now and not are_alike(before.method, now.method):
        lines.append(_other_method(before, now))
    elif before and now:
        versions = exact.changed_versions(before.versions, now.versions)
        if versions:
            lines.append(f"versions: {', '.join(versions)}")
        differences = [
            (difference.sentence, difference.ranks) for difference in exact.count_differences(before, now)
        ]
        lines += count_report.once(differences, by_rank=len(now.counts) > 1) or ["the counts are the same"]
    if before and now:
        lines += computed.of_counts(before, now)
    return lines + (_unsteady(now) if now else [])


def _details(recorded: CountBaseline) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in recorded.versions.items()) or "not observed"
    return [f"of {plural(recorded.launches, 'launch')}; versions: {versions}", *_unsteady(recorded)]


def _unsteady(recorded: CountBaseline) -> list[str]:
    return (
        [f"not judged, because the launches differ: {', '.join(recorded.unsteady)}"]
        if recorded.unsteady
        else []
    )


COUNTS = Shown(
    on="counted on",
    headings=("counts on", "case", "collectives", "FLOP", "kernels", "live tensors", "launches"),
    figures=_listed,
    cells=_cells,
    details=_details,
    changes=_changes,
)
