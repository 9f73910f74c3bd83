"""Report what the reference of a session shows about the machine and about the code. Pure."""

import math
from collections.abc import Iterable, Mapping

from perfsuite.report.text import between, cut, percent, plural
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.session_file import MachineChange, Measurement, SessionReference
from perfsuite.verdict.common_change import CommonChange
from perfsuite.verdict.robust import relative

MOST_CASES = 5  # maximum number of sentences that each compare one case with the reference
MACHINE = "the machine, not the code"
NO_CHANGE = (
    "The reference is as fast tonight as its baselines, as far as {canaries} can show: tokens/s {change} "
    "(99% interval {interval})."
)
UNCERTAIN = (
    "does not show whether the machine is the cause: launch more cases with the reference (--perf-canaries)"
)
NOT_THE_MACHINE = "it is not the machine alone. The cases changed together, so look for one cause"
ALONE = (
    "are left out, because the speed of this case changed differently from that of the other canaries: look "
    "at this case on this machine"
)


def machine_changes(reference: SessionReference | None) -> Mapping[str, MachineChange]:
    """Return the machine's change of tokens/s by hardware class; empty if it is unknown."""
    changes = () if reference is None else reference.changes
    return {change.hardware_class: change for change in changes if change.metric == TOKENS_PER_S.name}


def beside_reference(machine: MachineChange, cases: int, common: CommonChange | None, cause: str) -> str:
    """Compare the common change of the cases of a hardware class with the change of the reference.

    `cases` is the number of cases, and `common` is None if the cases share no change. `cause` is a sentence
    about what else changed in all cases with this common change, such as a version.
    """
    if common is None and machine.is_certain:
        return f"The reference is {_how(machine.change)} tonight {_range(machine)}: {MACHINE}."
    if common is None:
        return NO_CHANGE.format(
            change=percent(machine.change),
            interval=between(machine.interval),
            canaries=plural(len(machine.canaries), "case"),
        )
    change = TOKENS_PER_S.change(relative(common.estimate))
    low, high = (TOKENS_PER_S.change(relative(end)) for end in common.interval)
    # Half of the 99% interval of the difference between the two changes, as if they were independent.
    reach = math.hypot(_half((low, high)), _half(machine.interval))
    agrees = abs(change - machine.change) <= reach
    cases_are = f"{len(common.cases)} of {plural(cases, 'case')} are {_how(change)} tonight"
    if agrees and machine.is_certain:
        return f"{cases_are}, and so is the reference {_range(machine)}: {MACHINE}."
    if agrees:
        return f"{cases_are}. The reference {_range(machine)} {UNCERTAIN}. {cause}."
    reference_is = f"but the reference is {_how(machine.change)} {_range(machine)}"
    return f"{cases_are}, {reference_is}, so {NOT_THE_MACHINE}. {cause}."


def _half(interval: tuple[float, float]) -> float:
    low, high = interval
    return abs(high - low) / 2


def about(reference: SessionReference | None, results: Iterable[Measurement]) -> list[str]:
    """Return sentences on cases that differ from the reference, and on what the reference cannot show."""
    if reference is None:
        return []
    differing = [sentence for sentence in map(_differs, results) if sentence is not None]
    unused = [
        f"The launches of {canary.case_id} with the reference are not used: {canary.unused}."
        for canary in reference.canaries
        if canary.unused is not None
    ]
    apart = dict.fromkeys(case_id for change in reference.changes for case_id in change.apart)
    alone = [f"The launches of {case_id} with the reference {ALONE}." for case_id in apart]
    problems = [f"Reference: {problem}." for problem in reference.problems]
    return [*cut(differing, MOST_CASES), *unused, *alone, *problems]


def _differs(result: Measurement) -> str | None:
    """Say how much faster or slower than the reference a case is, if its tokens/s regressed or improved."""
    check = result.verdict.check(TOKENS_PER_S.name)
    if check is None or check.against_reference is None or check.outcome not in ("regressed", "improved"):
        return None
    return f"{result.case_id} is {_how(check.against_reference.change)} than tonight's reference."


def _how(change: float) -> str:
    """Return a change of tokens/s in words, such as `1.1% slower`."""
    return f"{abs(change):.1%} {'slower' if change < 0 else 'faster'}"


def _range(machine: MachineChange) -> str:
    """Return the size of the machine's change with its 99% interval, such as `(1.0%, 0.7 to 1.3)`.

    A size is positive in the direction of the change: for a slower machine, 1.0% means 1.0% slower.
    """
    sign = -1 if machine.change < 0 else 1
    low, high = sorted(sign * end for end in machine.interval)
    return f"({sign * machine.change:.1%}, {100 * low:.1f} to {100 * high:.1f})"
