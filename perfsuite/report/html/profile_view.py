"""Prepares the profile of one case of the HTML page: tables of text. Pure.

Imports neither torch nor pytest. Text is escaped where it becomes HTML: in the template.
"""

from __future__ import annotations

from perfsuite.report.table import NONE, Table
from perfsuite.results.profile import LaunchProfile, Profile, RankProfile, TakenProfile
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.profiled import most_different

MOST_ROWS = 20
"""Kernels or operators that are shown: those that take longest on either side."""


def profile_tables(result: Measurement) -> list[Table]:
    """Return the parts of a step and its longest kernels or operators, each beside what it was before.

    None without a profile. Ranks that make the same calls share a profile. Of several profiles the one that
    differs most from before is shown, or the first if none can be compared.
    """
    now, earlier = _launch(result.profile), _launch(result.profile_before)
    if now is None:
        return []
    most = None if earlier is None else most_different(earlier, now)
    entry, before = (now.ranks[0], None) if most is None else most
    name = result.verdict.against or "baseline"
    return [_parts(before, entry, name), _longest(before, entry.profile, name)]


def _launch(taken: TakenProfile | None) -> LaunchProfile | None:
    return None if taken is None else taken.profile


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
        f"Where the time of a step goes: the mean of {now.steps} steps of one launch, ranks {entry.name}. "
        "What is hidden runs behind computation and is part of no sum."
    )
    headers = ("part", f"{against}, ms", "now, ms", "change")
    return Table(caption=caption, headers=headers, rows=rows)


def _split(profile: Profile) -> dict[str, float]:
    hidden = {f"{kind} hidden": us for kind, us in profile.split.hidden_us.items()}
    return {**profile.split.parts(), "step": profile.split.step_us, **hidden}


def _longest(before: Profile | None, now: Profile, against: str) -> Table:
    timed = now.kernels or now.operators
    earlier = () if before is None else before.kernels or before.operators
    then, today = ({work.name: work for work in works} for works in (earlier, timed))
    longest = sorted(
        {**then, **today}, key=lambda name: -max(each[name].us for each in (then, today) if name in each)
    )
    rows = [
        (
            name,
            *(f"{each[name].calls:g}" if name in each else NONE for each in (then, today)),
            *(_ms(each[name].us if name in each else None) for each in (then, today)),
        )
        for name in longest[:MOST_ROWS]
    ]
    what = "kernels" if now.kernels else "operators, without what they call"
    caption = f"The longest {what}: calls and time of a step. All of them are in results.json."
    headers = ("name", f"calls, {against}", "calls now", f"{against}, ms", "now, ms")
    return Table(caption=caption, headers=headers, rows=rows)


def _ms(us: float | None) -> str:
    return NONE if us is None else f"{us / 1e3:.2f}"
