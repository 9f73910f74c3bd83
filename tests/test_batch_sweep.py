from __future__ import annotations

from typing import Any

import pytest

from bench_cases.published import best_batch
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Figures, Run
from perfsuite.results.session_file import Measurement
from tests.samples import make_case, make_figures, make_result, make_run, never_run

V100 = {1: 622.0, 2: 1358.0, 4: 2753.0, 7: 4791.0, 8: 2444.0}
"""tokens/s by batch: GPT-2 XL under FSDP on 4 x V100-16GB, where 8 fits only by retries, and 9 does not."""


def run(batch: int, tokens_per_s: float | None, retries: float | None = 0, **changes: Any) -> Run:
    figures = make_figures(tokens_per_s=tokens_per_s, alloc_retries=retries)
    return make_run(case=make_case(micro_batch=batch), figures=figures, **changes)


def measured(batch: int, tokens_per_s: float, retries: float | None = 0) -> Measurement:
    return make_result(run(batch, tokens_per_s, retries), before=None)


def out_of_memory(batch: int) -> Measurement:
    failure = Failure(kind="out_of_memory", message="OutOfMemoryError: no 2 GiB left")
    return make_result(
        run(batch, None, None, failure=failure).replace(figures=Figures()),
        before=None,
        excused="out of memory",
    )


def test_the_published_sweep_stars_the_batch_that_its_authors_starred() -> None:
    sweep = [measured(batch, speed, retries=batch // 8) for batch, speed in V100.items()]
    best = best_batch([*sweep, out_of_memory(9)])
    assert best is sweep[3]
    assert best.runs[0].case.micro_batch == 7


def test_the_fastest_is_not_best_if_the_allocator_retried() -> None:
    slow, fast = measured(4, 1000), measured(8, 2000, retries=1)
    assert best_batch([slow, fast]) is slow


def test_a_retry_in_one_launch_of_three_is_one_too_many() -> None:
    """The median of 0, 0 and 2 is 0."""
    sometimes = make_result(run(8, 2000), run(8, 2000), run(8, 2000, retries=2), before=None)
    assert sometimes.figures.alloc_retries == 0
    assert best_batch([sometimes]) is None


@pytest.mark.parametrize("order", [1, -1])
def test_of_equals_the_smallest_is_best(order: int) -> None:
    small, large = measured(4, 1000), measured(8, 1000)
    assert best_batch([small, large][::order]) is small


@pytest.mark.parametrize(
    "results",
    [
        [],
        [never_run()],
        [out_of_memory(1), out_of_memory(2)],
        [measured(1, 1000, retries=3)],
        [measured(1, 1000, retries=None)],
    ],
    ids=["empty", "never run", "out of memory", "retries", "retries unknown"],
)
def test_none_is_best(results: list[Measurement]) -> None:
    assert best_batch(results) is None


def test_an_unhealthy_machine_says_nothing() -> None:
    sound, sick = measured(1, 1000), measured(2, 9000)
    sick = sick.replace(verdict=sick.verdict.replace(outcome="unhealthy", unhealthy_launches=(1,)))
    assert best_batch([sound, sick]) is sound


def test_a_retry_in_a_launch_that_was_set_aside_does_not_count() -> None:
    result = make_result(run(8, 2000, retries=2), run(8, 2000), before=None)
    assert best_batch([result]) is None
    result = result.replace(verdict=result.verdict.replace(unhealthy_launches=(1,)))
    assert best_batch([result]) is result


def test_other_cases_are_no_sweep() -> None:
    other = make_result(make_run(case=make_case(sequence_length=32)), before=None)
    with pytest.raises(
        ValueError, match=r"differ only in micro_batch, got fake-\S+-s32-b1-\S+ and fake-\S+-s64-b1-"
    ):
        best_batch([measured(2, 1000), other])
