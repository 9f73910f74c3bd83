"""Explain from two profiles why a step takes longer.

A changed number of calls is a cause. A changed time is only a hint.
"""

import re
from collections.abc import Iterable, Mapping

from perfsuite.results.outcome import Profiled
from perfsuite.results.profile import LaunchProfile, Profile, RankProfile, TakenProfile, Work

MOST_CALLS = 5  # maximum number of names with changed calls that are listed, most likely cause first
MOST_TIMES = 3  # maximum number of changed times that are listed
NOT_IN_EACH_STEP = "new, but not in every step, so calls cannot be compared"  # beginning of a note
LEAST_SHARE = 0.03  # a time is listed only if it changed by at least this share of the step
_NO_WORK = re.compile(  # views, allocations and backward nodes of views: effects of other calls, listed last
    r"(aten::)?(_unsafe_view|_reshape_alias|alias|as_strided|chunk|contiguous|detach_?|empty\w*|expand(_as)?|"
    r"flatten|lift_fresh|narrow|new_empty\w*|permute|reshape|resolve_conj|resolve_neg|result_type|select|slice|"
    r"split(_with_sizes)?|squeeze|t|to|transpose|unbind|unflatten|unsqueeze|view(_as)?)|"
    r"(Alias|AsStrided|Expand|Permute|Reshape\w*|Select|Slice|Split\w*|Squeeze|T|Transpose|Unbind|UnsafeView|"
    r"Unsqueeze|View)Backward\d+"
)


def explained(before: TakenProfile | None, now: TakenProfile, against: str) -> Profiled:
    """Describe the differences between two profiles.

    In messages, the text `against`, such as `the baseline`, refers to the side `before`.
    """
    if now.profile is None:
        return Profiled(notes=(f"no profile was taken: {now.why_none}",))
    if before is None or before.profile is None:
        advice = (
            "record or accept a baseline with --perf-explain, to compare later regressions with its profile"
        )
        why = advice if before is None else before.why_none
        return Profiled(notes=(f"there is no profile of {against}: {why}",))
    return compared(before.profile, now.profile, against)


def compared(before: LaunchProfile, now: LaunchProfile, against: str) -> Profiled:
    """Describe the differences between two launches, for the ranks whose calls differ most."""
    most = most_different(before, now)
    if most is None:
        what = "has another method, device or number of ranks"
        return Profiled(notes=(f"the profile of {against} {what}, so it is not compared",))
    entry, then = most
    earlier = {work.name for work in then.all_work}
    new = [name for name in entry.profile.unsteady if name not in earlier]
    more = f" and {len(new) - MOST_CALLS} more" if len(new) > MOST_CALLS else ""
    return Profiled(
        calls=_calls(then, entry, by_rank=len(now.ranks) > 1),
        hints=_hints(then, entry.profile),
        notes=(f"{NOT_IN_EACH_STEP}: {', '.join(new[:MOST_CALLS])}{more}",) if new else (),
    )


def most_different(before: LaunchProfile, now: LaunchProfile) -> tuple[RankProfile, Profile] | None:
    """Return the ranks of `now` whose calls differ most, and their earlier profile; None if incomparable."""
    with_before = ((entry, before.of_rank(entry.ranks[0])) for entry in now.ranks)
    pairs = [(entry, then) for entry, then in with_before if then is not None]
    if before.method != now.method or not pairs or pairs[0][0].profile.device != pairs[0][1].device:
        return None
    return max(pairs, key=lambda pair: len(_changed_calls(pair[1], pair[0].profile)))


def _calls(before: Profile, entry: RankProfile, *, by_rank: bool) -> tuple[str, ...]:
    changed = _changed_calls(before, entry.profile)
    waits = _waits(before, entry.profile)
    why = ": the host waits for the device" if before.device == "cuda" else ": the host reads a value"
    lines = [
        f"{name} {then:g} -> {today:g} calls a step{why if name in waits else ''}"
        for name, (then, today) in changed[:MOST_CALLS]
    ]
    if lines and by_rank:
        lines[0] += f" (rank{'' if len(entry.ranks) == 1 else 's'} {entry.name})"
    if len(changed) > MOST_CALLS:
        lines.append(f"and {len(changed) - MOST_CALLS} more names with a changed number of calls")
    return tuple(lines)


def _changed_calls(before: Profile, now: Profile) -> list[tuple[str, tuple[float, float]]]:
    """Return the names whose number of calls changed, with both numbers. The most likely cause comes first.

    Operators and synchronisations come first, then kernels, and views and allocations come last. Within each
    group, new and removed names come first. The others are sorted by relative change of calls. If these are
    equal, synchronisations come first, then names with a larger absolute change of calls, and then names with
    a larger change of time.
    """
    times = _both(_times(before.all_work), _times(now.all_work))
    waits = _waits(before, now)
    kernels = {work.name for profile in (before, now) for work in profile.kernels} - waits
    unsteady = {*before.unsteady, *now.unsteady}
    calls = _both(before.calls(), now.calls())
    changed = [(name, both) for name, both in calls.items() if both[0] != both[1] and name not in unsteady]

    def order(call: tuple[str, tuple[float, float]]) -> tuple[int, float, bool, float, float]:
        name, (earlier, later) = call
        by = abs(later - earlier)
        kind = 2 if _NO_WORK.fullmatch(name) else int(name in kernels)
        return kind, -by / max(earlier, later), name not in waits, -by, -abs(times[name][1] - times[name][0])

    return sorted(changed, key=order)


def _waits(*profiles: Profile) -> set[str]:
    return {work.name for profile in profiles for work in profile.host_syncs}


def _hints(before: Profile, now: Profile) -> tuple[str, ...]:
    step = now.split.step_us - before.split.step_us
    least = LEAST_SHARE * before.split.step_us
    parts = _both(before.split.parts(), now.split.parts())
    lines = [_arrow(name, *times, step) for name, times in _most(parts, least)]
    first = ", ".join(lines) or f"no part of a step changed by {LEAST_SHARE:.0%} of the step"
    named = "kernels" if now.kernels else "operators"
    singly = _both(*(_times(profile.kernels or profile.operators) for profile in (before, now)))
    changed = [_arrow(name, *times) for name, times in _most(singly, least)]
    single_lines = (f"hint from times of the {named}: {', '.join(changed)}",) if changed else ()
    return f"hint from times: {first}", *single_lines


def _most(times: Mapping[str, tuple[float, float]], least: float) -> list[tuple[str, tuple[float, float]]]:
    changed = [entry for entry in times.items() if abs(entry[1][1] - entry[1][0]) >= max(least, 1e-9)]
    return sorted(changed, key=lambda entry: -abs(entry[1][1] - entry[1][0]))[:MOST_TIMES]


def _arrow(name: str, then: float, today: float, step: float | None = None) -> str:
    """Return a change, such as `all_gather exposed 12.1 -> 31.8 ms (+19.7 of +21.0 ms)`.

    The change of the whole step (`of +21.0`) is left out if its sign differs from that of the part's change,
    or if it is less than half as large as the part's change.
    """
    by = today - then
    of = "" if step is None or step * by <= 0 or abs(by) > 2 * abs(step) else f" of {step / 1e3:+.1f}"
    return f"{name} {then / 1e3:.1f} -> {today / 1e3:.1f} ms ({by / 1e3:+.1f}{of} ms)"


def _both(then: Mapping[str, float], today: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (then.get(name, 0.0), today.get(name, 0.0)) for name in {**then, **today}}


def _times(works: Iterable[Work]) -> dict[str, float]:
    return {work.name: work.us for work in works}
