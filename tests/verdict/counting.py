"""Helpers for tests of counts: judge the counts of launches, and make counts that differ a little."""

from perfsuite.results.counts import Counts, PythonCalls, WorkerBatch
from perfsuite.results.outcome import CountCheck
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from tests.twin_counts import (
    GATHERED,
    GATHERED_AGAIN,
    REDUCED,
    baseline_of,
    collective,
    counts,
    launch,
)


def judged(*launches: Run | Counts, before: Run | Counts | None = None) -> CountCheck:
    """Compare the counts of launches with a baseline of one launch."""
    runs = [launched if isinstance(launched, Run) else launch(launched) for launched in launches]
    check = exact.check(runs, baseline_of(*[earlier for earlier in (before,) if earlier is not None]))
    assert check is not None
    return check


def findings(check: CountCheck) -> list[tuple[str, str]]:
    return [(finding.outcome, finding.field) for finding in check.findings]


def reads(forward: int, optimizer: int = 39) -> Counts:
    return counts(host_reads={"forward": forward, "optimizer": optimizer})


CALLS = GATHERED.count + GATHERED_AGAIN.count


def called(times: int) -> Counts:
    """Return counts in which `times` calls gather the usual number of bytes."""
    more = GATHERED.replace(count=times - GATHERED_AGAIN.count)
    return counts(collectives=(more, GATHERED_AGAIN, REDUCED))


def reduced(count: int, sent: int, *, ranks: int = 8) -> Counts:
    """Return counts of a step that all-reduces `sent` bytes among `ranks` ranks, in `count` calls."""
    rows = (
        [collective("all_reduce", ranks=ranks, apart=min(ranks - 1, 1), count=count, bytes=sent)]
        if count
        else []
    )
    return counts(collectives=(GATHERED, *rows))


NEW = "not judged, not in the baseline"


def worker(calls: int, kernels: int = 24, version: str = "3.11") -> Counts:
    functions = {"train.tokenize": calls - 100, "train.collate": 100}
    python = PythonCalls(version=version, calls={"forward": calls}, functions=functions)
    return counts(worker_batch=WorkerBatch(python=python, ops={"aten.stack": kernels}))
