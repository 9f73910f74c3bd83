"""Finds the best batch size of cases that differ in nothing else. Pure; imports neither torch nor pytest."""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.errors import CaseError
from perfsuite.results.outcome import UNMEASURED
from perfsuite.results.session_file import Measurement


def best_batch(results: Sequence[Measurement]) -> Measurement | None:
    """Return the case with most tokens/s whose allocator never had to retry. None if there is none.

    An allocator that has to free its cache to serve a request slows the step, and the next larger batch
    fails. Of equal speeds the smallest batch is best. A case that failed, was unhealthy, or counts no retries
    (on a CPU) is never best. Raises `CaseError` if the cases differ in more than `micro_batch`.
    """
    others = {result.runs[0].case.replace(micro_batch=1).id for result in results if result.runs}
    if len(others) > 1:
        raise CaseError(f"cases of a sweep differ only in micro_batch, got {' and '.join(sorted(others))}")
    fitting = [result for result in results if _fits(result)]
    return max(fitting, key=_tokens_per_s_then_smallest, default=None)


def _fits(result: Measurement) -> bool:
    return (
        result.outcome not in UNMEASURED
        and result.figures.tokens_per_s is not None
        and all(run.figures.alloc_retries == 0 for run in result.healthy_runs)
    )


def _tokens_per_s_then_smallest(result: Measurement) -> tuple[float, int]:
    return result.figures.tokens_per_s or 0, -result.runs[0].case.micro_batch
