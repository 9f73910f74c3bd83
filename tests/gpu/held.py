"""Print what a part of the first day is expected to show, and afterwards whether the expectation held.

`python -m tests.gpu.held expect CHECK` prints the expectation, and `python -m tests.gpu.held CHECK FILE...`
the answer: HELD, NOT HELD, or NOT SEEN if there is nothing to judge.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.results.counts import Counts
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.rank_report import START_UP
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile

NOISE = 0.005  # largest spread of the launches of one case
SAMPLER = 0.005  # largest cost of the health sampler
CACHES = 0.03  # largest difference between cold and warm compilation
SLOWDOWN = (0.04, 0.06)  # an injected slowdown of 5%
AGENT = r"(-m |\[')perfsuite\.(node|worker)"  # in the command line of an agent, or of its ranks' server
FREE_MIB = 1024  # memory that may be in use after all processes were killed


class Answer(NamedTuple):
    """Whether an expectation held; None if nothing was seen."""

    held: bool | None
    observed: str


def results(file: Path) -> Sequence[Measurement]:
    """Return the measurements of a session; none if it wrote no results."""
    session = documents.read_or_none(file, SessionFile)
    return () if session is None else session.results


def runs(file: Path) -> list[Run]:
    """Return the launches of a session that measured their steps."""
    return [run for result in results(file) for run in result.healthy_runs if run.failure is None]


def is_recorded(file: Path) -> Answer:
    """Every case is recorded, or skipped with a reason."""
    session = documents.read_or_none(file, SessionFile)
    if session is None or not session.results:
        return Answer(None, "nothing was measured")
    measured = session.results
    others = [f"{result.case_id}: {result.outcome}" for result in measured if not result.verdict.is_recorded]
    observed = "; ".join(others) or f"{len(measured)} recorded"
    skipped = "".join(f"; skipped: {skip.case_id}: {skip.reason}" for skip in session.skipped)
    return Answer(not others, observed + skipped)


def is_quiet(file: Path) -> Answer:
    """The launches of one case differ by at most 0.5%."""
    speeds = [run.figures.tokens_per_s for run in runs(file) if run.figures.tokens_per_s]
    if len(speeds) < 3:
        return Answer(None, f"{len(speeds)} launches")
    spread = max(speeds) / min(speeds) - 1
    return Answer(spread <= NOISE, f"{spread:.2%} between {len(speeds)} launches")


def is_slower(file: Path) -> Answer:
    """A slowdown of 5% is measured as 4% to 6%."""
    return _change(file, lambda change: SLOWDOWN[0] <= -change <= SLOWDOWN[1])


def is_sampler_cheap(file: Path) -> Answer:
    """Without the health sampler (arm A), steps are at most 0.5% faster."""
    return _change(file, lambda change: abs(change) <= SAMPLER)


def _change(file: Path, is_expected: Callable[[float], bool]) -> Answer:
    checks = [result.verdict.check(TOKENS_PER_S.name) for result in results(file)]
    changes = [check.change for check in checks if check is not None and check.change is not None]
    if not changes:
        return Answer(None, "no change was estimated")
    return Answer(all(map(is_expected, changes)), ", ".join(f"tokens/s {change:+.1%}" for change in changes))


def is_as_dry(file: Path, dry: Path) -> Answer:
    """FLOPs, kernels, host reads and copies of each case are those of its dry run."""
    predicted = {result.case_id: result.counts for result in results(dry)}
    compared = 0
    differences = []
    for result in results(file):
        before = predicted.get(result.case_id, ())
        if before and result.counts:
            compared += 1
            for name, one, other in _differences(before[0].counts, result.counts[0].counts):
                differences.append(f"{result.case_id}: {name} {one} dry, {other} launched")
    return Answer(not differences if compared else None, "; ".join(differences) or f"{compared} cases alike")


def _differences(dry: Counts, launched: Counts) -> Iterator[tuple[str, object, object]]:
    for name in ("flops", "kernels", "host_reads", "device_copies"):
        one = getattr(dry, name)
        other = getattr(launched, name)
        if one is not None and one != other:
            yield name, one, other


def are_caches_alike(cold: Path, warm: Path) -> Answer:
    """Launches with cold and warm compile caches are equally fast, and warm ones start sooner."""
    speeds = []
    starts = []
    for directory in (cold, warm):
        launches = [run for file in sorted(directory.glob("*.json")) for run in runs(file)]
        speeds.append([run.figures.tokens_per_s for run in launches if run.figures.tokens_per_s])
        starts.append([seconds for run in launches for seconds in _start_up_s(run)])
    if not all((*speeds, *starts)):
        return Answer(None, "launches or their start-up are missing")
    difference = median(speeds[1]) / median(speeds[0]) - 1
    spreads = [f"{max(values) / min(values) - 1:.2%}" for values in speeds]
    observed = f"warm {difference:+.2%}; spread {spreads[0]} cold, {spreads[1]} warm; start-up "
    observed += f"{median(starts[0]):.1f} s cold, {median(starts[1]):.1f} s warm"
    return Answer(abs(difference) <= CACHES and median(starts[1]) < median(starts[0]), observed)


def _start_up_s(run: Run) -> Iterator[float]:
    for name, seconds in run.figures.spans_s.items():
        if name.endswith(START_UP):  # also `cold start-up`
            yield seconds


def ends_cleanly(file: Path) -> Answer:
    """CUDA graphs are replayed without a refusal, and no rank dies after its report."""
    measured = [result for result in results(file) if "cuda_graphs" in result.case_id]
    bad = [f"{result.case_id}: {result.outcome}" for result in measured if not result.verdict.is_recorded]
    launches = [run for result in measured for run in result.runs]
    bad += [note for run in launches for note in run.notes if "after its report" in note]
    seen = "; ".join(dict.fromkeys(reason for run in launches for reason in run.hidden))
    return Answer(not bad if measured else None, "; ".join(bad) or f"{len(measured)} recorded; {seen}")


def is_out_of_memory(file: Path) -> Answer:
    """The case runs out of memory, and is excused."""
    measured = results(file)
    kinds = [str(result.verdict.failure) for result in measured]
    return Answer(set(kinds) == {"out_of_memory"} if measured else None, ", ".join(kinds))


def is_unhealthy(file: Path) -> Answer:
    """The launch is unhealthy, and the reason names the memory of other processes."""
    return _names(file, "other processes")


def is_locked(file: Path) -> Answer:
    """The clocks are listed as changed since the baseline, or are a reason to discard the launch."""
    return _names(file, "clock")


def _names(file: Path, word: str) -> Answer:
    measured = results(file)
    reasons = [reason for result in measured for reason in (*result.verdict.reasons, *result.verdict.changed)]
    is_named = any(word in reason for reason in reasons)
    return Answer(is_named if measured else None, "; ".join(reasons) or ("no reason" if measured else ""))


def has_trends(file: Path) -> Answer:
    """Memory does not grow, the start-up is timed in parts, and the wait for data is known."""
    launches = runs(file)
    missing = []
    for run in launches:
        growing = [slope.name for slope in run.slopes if slope.unit == "bytes" and slope.interval[0] > 0]
        missing += [f"{name} grows" for name in growing]
        missing += [] if [*_start_up_s(run)] else ["no start-up"]
        missing += [] if run.figures.data_wait_s is not None else ["no wait for data"]
    return Answer(not missing if launches else None, "; ".join(missing) or f"{len(launches)} launches")


def has_no_failed_row(file: Path) -> Answer:
    """No check fails."""
    try:
        rows = json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return Answer(None, f"{file} has no rows")
    failed = [f"{row['check']}: {row['found']}" for row in rows if row["status"] == "fail"]
    return Answer(not failed, "; ".join(failed) or f"{len(rows)} checks")


def is_free(file: Path) -> Answer:
    """Six seconds after SIGKILL, less than 1 GiB is in use, and no process of perfsuite is left."""
    lines = file.read_text().splitlines() if file.exists() else []
    used = [int(line.split()[0]) for line in lines if re.fullmatch(r"\d+ MiB", line.strip())]
    left = [line for line in lines if re.search(AGENT, line)]
    if not used:
        return Answer(None, "nvidia-smi did not answer")
    return Answer(used[-1] < FREE_MIB and not left, f"{used[-1]} MiB; {'; '.join(left) or 'no process'}")


CHECKS: dict[str, Callable[..., Answer]] = {
    "rows": has_no_failed_row,
    "recorded": is_recorded,
    "as-dry": is_as_dry,
    "quiet": is_quiet,
    "slower": is_slower,
    "graphs": ends_cleanly,
    "caches": are_caches_alike,
    "sampler": is_sampler_cheap,
    "oom": is_out_of_memory,
    "unhealthy": is_unhealthy,
    "locked": is_locked,
    "trends": has_trends,
    "free": is_free,
}


def main(words: Sequence[str]) -> str:
    """Return the line to print. If a file cannot be read, nothing was seen."""
    name, *others = words
    if name == "expect":
        return f"EXPECTED ({others[0]}): {CHECKS[others[0]].__doc__}"
    try:
        answer = CHECKS[name](*map(Path, others))
    except FileError as error:
        answer = Answer(None, str(error))
    verdict = {True: "HELD", False: "NOT HELD", None: "NOT SEEN"}[answer.held]
    return f"{verdict} ({name}): {answer.observed or 'nothing was measured'}"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
