"""Runs pairs, and writes the findings into results.json and the page: `make hindsight PAIR=name`.

Each arm is launched once (`perfsuite compare --counts --against GOOD --arm BAD`). Without a name, all pairs
without a result are run. With --again, pairs that have a result are run as well.
"""

import argparse
import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from perfsuite.errors import PerfsuiteError, error_text
from perfsuite.launch.launchers import launcher
from perfsuite.launch.lock import LOCK_FILE
from perfsuite.launch.quiet import cores, others
from perfsuite.report.progress import Progress
from perfsuite.results.session_file import Measurement
from perfsuite.session import against_arm
from perfsuite.session.setup import Options
from perfsuite.verdict.arms import BY_THE_CHANGE
from tests.benchmarks.hindsight.pairs import PAIRS, Pair
from tests.benchmarks.hindsight.results import Result, read, write, write_page

STORE = Path(".perfsuite")


def run(pair: Pair) -> Result:
    """Compare the two arms of a pair, using the counts of one launch of each arm."""
    options = Options(root=Path.cwd(), store=STORE, baselines=STORE / "hindsight")
    try:
        arms = against_arm.resolved(options, (("--against", pair.good), ("--arm", pair.bad)))
        busy = is_busy()
        began = f"{datetime.now():%Y-%m-%d %H:%M}"
        start = time.monotonic()  # the time for pip is not counted
        launches = None if pair.dry else launcher()
        session = against_arm.by_counts(options, Progress(line=print, cases=1), launches, arms)
        case = pair.measured()
        try:
            measured = session.measure(case, case.id)
        finally:
            session.setup.lock.release()
    except PerfsuiteError as error:
        first = error_text(error).splitlines()[0]
        return Result(name=pair.name, outcome="cannot run", first=first, seconds=0)
    return replace(judged(pair, measured, round(time.monotonic() - start)), busy=busy, began=began)


def is_busy() -> bool:
    """Whether other programs use this machine's cores. Watches the cores for one second."""
    before = cores()
    time.sleep(1.0)
    return bool(others(before, cores(), os.getpid()))


def judged(pair: Pair, measured: Measurement, seconds: int) -> Result:
    """Grade a comparison. The grade is `found` only if the first line names the cause."""
    verdict = measured.verdict
    why = next(iter(verdict.reasons), "")
    is_other = verdict.failure in ("loss", "unlike") or BY_THE_CHANGE in why
    if verdict.outcome == "failed" and not is_other:
        return Result(name=pair.name, outcome="cannot run", first=why, seconds=seconds)
    counts = verdict.counts
    said = [
        finding.sentence for finding in (counts.findings if counts else ()) if finding.outcome != "passed"
    ]
    said = [why, *said] if verdict.outcome == "failed" else said
    first, *others = said or ("; ".join(verdict.reasons) or "as in arm A",)
    if not pair.is_regression:
        outcome = "silent" if verdict.outcome == "passed" and not said else "false finding"
    elif verdict.outcome not in ("regressed", "failed"):
        outcome = "missed"
    elif pair.names_cause(first):
        outcome = "found"
    else:
        outcome = "found, cause later" if any(map(pair.names_cause, others)) else "missed"
    return Result(name=pair.name, outcome=outcome, first=f"{verdict.outcome}: {first}", seconds=seconds)


def main() -> None:
    """Run pairs one after another. Each result is written as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", metavar="PAIR")
    parser.add_argument("--again", action="store_true", help="also pairs that have a result")
    arguments = parser.parse_args()
    by_name = {pair.name: pair for pair in PAIRS}
    unknown = set(arguments.pairs) - set(by_name)
    if unknown:
        parser.error(f"there is no pair {', '.join(sorted(unknown))}; known are {', '.join(by_name)}")
    # Counts do not need a quiet machine, so a separate lock is enough.
    os.environ.setdefault(LOCK_FILE, str(STORE.absolute() / "hindsight.lock"))
    results = read()
    measured_names = {name for name, _ in results}
    names = arguments.pairs or [name for name in by_name if arguments.again or name not in measured_names]
    for name in names:
        pair = by_name[name]
        if pair.cannot:
            continue
        result = run(pair)
        results[name, result.busy] = result
        print(f"{result.name}: {result.outcome}, {result.seconds} s; {result.first}", flush=True)
        write(results)
    write_page(results)


if __name__ == "__main__":
    main()
