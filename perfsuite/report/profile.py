"""Describe the results of profiles in lines of text and in tables. Pure; imports neither torch nor pytest."""

from perfsuite.report.text import NONE, Table, plural
from perfsuite.results.outcome import Verdict
from perfsuite.results.profile import Profile, RankProfile, StepSplit
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.overall import THE_SAME
from perfsuite.verdict.profiled import NOT_IN_EACH_STEP, most_different

MOST_ROWS = 20  # maximum number of kernels or operators in a table: those that take longest in either profile


def split(shown: StepSplit) -> str:
    """Describe where the time of a step goes, such as `12.3 ms a step: compute 8.1, the rest 4.2`."""
    parts = ", ".join(f"{name} {us / 1e3:.1f}" for name, us in shown.parts().items())
    return f"{shown.step_us / 1e3:.1f} ms a step: {parts}"


def because(verdict: Verdict, longest: int | None = None) -> list[str]:
    """Explain why a case is slower, the most certain cause first: calls, then counts, then times.

    `longest` limits the sentence about a count, as in `Finding.in_words`.
    """
    profiled = verdict.profiled
    explanation = verdict.explanation(longest)
    counted = [] if explanation is None else [explanation]
    if profiled is None:
        return counted
    if profiled.calls and (verdict.explained or "").startswith(THE_SAME):
        counted = []
    others = any(note.startswith(NOT_IN_EACH_STEP) for note in profiled.notes)
    same = [] if profiled.calls or others or not profiled.hints else ["no call differs"]
    return [*profiled.calls, *counted, *same, *profiled.hints, *profiled.notes]


def traces(result: Measurement) -> list[str]:
    """Name the files to open in Perfetto; empty without a profile."""
    named = (("arm A, ", result.profile_before), ("arm B, " if result.before else "", result.profile))
    lines = []
    for arm, taken in named:
        if taken is not None and taken.traces:
            first, *others = taken.traces
            more = f", with {plural(len(others), 'other')}" if others else ""
            lines.append(f"trace of {arm}rank 0{more}: {first} (opens in https://ui.perfetto.dev)")
    return lines


def tables(result: Measurement) -> list[Table]:
    """Return tables of the parts of a step and of its longest kernels or operators, before and now.

    Returns no tables without a profile. Ranks that make the same calls share a profile. If there are several
    profiles, the tables show the profile that changed most, or the first if none can be compared.
    """
    taken = (result.profile, result.profile_before)
    now, earlier = (None if one is None else one.profile for one in taken)
    if now is None:
        return []
    most = None if earlier is None else most_different(earlier, now)
    entry, before = (now.ranks[0], None) if most is None else most
    against = result.verdict.against or "baseline"
    return [_parts(before, entry, against), _longest(before, entry.profile, against)]


def _parts(before: Profile | None, entry: RankProfile, against: str) -> Table:
    now = entry.profile
    then = {} if before is None else _split(before)
    today = _split(now)
    rows = [
        (
            part,
            _ms(then.get(part)),
            _ms(today.get(part)),
            NONE if before is None else f"{(today.get(part, 0) - then.get(part, 0)) / 1e3:+.2f}",
        )
        for part in {**then, **today}
    ]
    caption = (
        f"Where the time of a step goes: the mean of {now.steps} steps of one launch, rank {entry.ranks[0]}. "
        "Hidden time overlaps with computation and is not part of any sum."
    )
    headers = ("part", f"{against}, ms", "now, ms", "change")
    return Table(caption=caption, headers=headers, rows=rows)


def _split(profile: Profile) -> dict[str, float]:
    hidden = {f"{kind} hidden": us for kind, us in profile.split.hidden_us.items()}
    return {**profile.split.parts(), "step": profile.split.step_us, **hidden}


def _longest(before: Profile | None, now: Profile, against: str) -> Table:
    earlier = () if before is None else before.kernels or before.operators
    sides = [{work.name: work for work in works} for works in (earlier, now.kernels or now.operators)]
    names = {name: None for side in sides for name in side}
    longest = sorted(names, key=lambda name: -max(side[name].us for side in sides if name in side))
    rows = [
        (
            name,
            *(f"{side[name].calls:g}" if name in side else NONE for side in sides),
            *(_ms(side[name].us if name in side else None) for side in sides),
        )
        for name in longest[:MOST_ROWS]
    ]
    what = "kernels" if now.kernels else "operators (times exclude nested operators)"
    caption = f"The longest {what}: calls and time per step. All of them are in results.json."
    headers = ("name", f"calls, {against}", "calls now", f"{against}, ms", "now, ms")
    return Table(caption=caption, headers=headers, rows=rows)


def _ms(us: float | None) -> str:
    return NONE if us is None else f"{us / 1e3:.2f}"
