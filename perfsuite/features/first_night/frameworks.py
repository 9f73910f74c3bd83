"""Launch each framework once, with each kind of parallelism."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from perfsuite.case.case import Case
from perfsuite.doctor.rows import Row, failed, passed, unknown
from perfsuite.errors import CaseError
from perfsuite.features.first_night.cases import framework_cases
from perfsuite.features.first_night.night import Night, not_run, why_not
from perfsuite.launch.lock import machine_lock
from perfsuite.results.amounts import amount
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import REPLAYED
from perfsuite.results.run import Run
from perfsuite.verdict.overall import Reference
from perfsuite.verdict.policy import Policy


def framework_rows(night: Night) -> Iterator[Row]:
    """Launch each framework once, with each kind of parallelism."""
    directory = night.new_directory("frameworks")
    with machine_lock(night.say):
        for name, case, reason in framework_cases(night.machine, night.size):
            why = reason if case is None else why_not(case, night)
            if case is None or why is not None:
                yield not_run(name, str(why))
                continue
            reference = Reference(policy=Policy(record_launches=1, max_launches=1, max_unhealthy=1))
            began = time.monotonic()
            try:
                runs, verdict = night.measure(
                    case, night.machine, directory / case.id, reference, night.launching()
                )
            except CaseError as error:
                yield not_run(name, str(error))
                continue
            yield _framework_row(name, runs, verdict, time.monotonic() - began, directory / case.id)


def _replays(case: Case) -> bool:
    """Return whether a case asks for CUDA graphs, whose replays are never counted."""
    return getattr(case.framework, "disable_cuda_graphs", True) is False


def _framework_row(name: str, runs: Sequence[Run], verdict: Verdict, seconds: float, directory: Path) -> Row:
    if verdict.outcome == "failed":
        return failed(name, "; ".join(verdict.reasons), f"see {directory}")
    speed = amount(runs[-1].figures.tokens_per_s, "tokens/s")
    observed = f"{speed} tokens/s, {seconds:.0f} s in all"
    remarks = [note for note in runs[-1].notes if "after its report" in note]
    hidden = runs[-1].hidden
    if _replays(runs[-1].case) and any(reason.startswith(REPLAYED) for reason in hidden):
        observed += "; replayed steps are not counted"
    else:
        remarks += hidden
    if remarks:
        return unknown(name, f"{observed}; {'; '.join(remarks)}", "it trains, but not as it should")
    if verdict.outcome == "unhealthy":
        return unknown(
            name, f"{observed}; {'; '.join(verdict.reasons)}", "it trains, but its speed is unknown"
        )
    return passed(name, observed)
