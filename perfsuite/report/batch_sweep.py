"""Which batch size is best: of cases that differ only in that. Pure; imports neither torch nor pytest."""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.results.outcome import UNMEASURED
from perfsuite.results.session_file import Measurement


def best_batch(results: Sequence[Measurement]) -> Measurement | None:
    """The one of most tokens/s whose allocator never had to retry, in no launch. None if there is none.

    A batch that fits only by retries is slower than it looks in memory, and the next one fails. Of equals the
    smallest batch is best. Not known (no retries are counted on a CPU), out of memory, and unhealthy are not
    best. Raises `ValueError` if the cases differ in more than `micro_batch`.
    """
    others = {result.runs[0].case.replace(micro_batch=1).id for result in results if result.runs}
    if len(others) > 1:
        raise ValueError(f"cases of a sweep differ only in micro_batch, got {' and '.join(sorted(others))}")
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
