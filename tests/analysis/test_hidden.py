from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite.analysis.collect import collect
from perfsuite.analysis.hidden import hidden
from perfsuite.case.case import Case
from perfsuite.frameworks.script import Script
from perfsuite.results.counts import Collective, Counts
from perfsuite.results.rank_report import Evidence, Flops, RankReport
from tests.samples import make_case, make_machine, make_report, write_launch
from tests.twin_counts import collective

FLOPS = Flops(formula="palm-1", per_token=18.0, parameters=3, matmul_parameters=2)
"""Of 2 weights and an attention of 2 FLOPs a token in forward: 6 in all."""
FORWARD = make_report(0).tokens_per_step * 6 // 2
"""FLOPs of one of two ranks in forward."""
EVIDENCE = Evidence(data_parallel=2, collectives=99, replicated={"w": (1.0, 2.0)}, replicated_bytes=4_000_000)
"""Of a parameter of 4 MB that both ranks hold, and that training moved."""


def sent(size: int, ranks: int = 2) -> Collective:
    return collective("all_reduce", ranks=ranks, count=1, bytes=size)


FULL = Counts(collectives=(sent(4_000_000),), flops={"forward": FORWARD, "backward": 2 * FORWARD})
"""All of it."""
ALONE = FULL.replace(collectives=())


def launch(counts: Counts = FULL, **changes: Any) -> list[RankReport]:
    """The reports of two ranks."""
    values: dict[str, Any] = {"counts": counts, "flops": FLOPS, "evidence": EVIDENCE}
    return [make_report(rank, **{**values, **changes}) for rank in range(2)]


def why(reports: list[RankReport], case: Case | None = None) -> tuple[str, ...]:
    return hidden(reports, case or make_case())


def test_a_step_that_shows_all_its_work_hides_nothing() -> None:
    assert why(launch()) == ()
    nearly = Counts(collectives=(sent(400),), flops={"forward": int(0.91 * FORWARD)})
    assert why(launch(nearly)) == ()


def test_what_a_rank_found_is_told_with_its_rank() -> None:
    first, second = launch(hidden=("a CUDA graph was replayed",))
    assert why([first, second]) == ("a CUDA graph was replayed",)
    assert why([first, second.replace(hidden=("b",))]) == ("rank 0: a CUDA graph was replayed", "rank 1: b")


def test_fewer_flops_than_the_formula_of_the_model() -> None:
    (told,) = why(launch(FULL.replace(flops={"backward": 2 * FORWARD})))
    assert told == (
        "all ranks together were seen to compute 0 FLOP in forward, which takes "
        f"{2 * FORWARD:.4g} by the formula palm-1"
    )
    frozen = FLOPS.replace(per_token=14.0, trained_parameters=0)  # multiplied in forward as others
    assert why(launch(flops=frozen)) == ()
    assert why(launch(FULL.replace(flops={"forward": FORWARD // 2}), flops=frozen))


def test_flops_that_nobody_knows_are_not_compared() -> None:
    none, varying = FULL.replace(flops={}), make_case(framework=Script(path="t.py", tokens="vary"))
    assert why(launch(none))
    assert why(launch(none, flops=None)) == why(launch(none), varying) == ()
    assert why(launch(none.replace(without_flops={"flash_attn._flash_attn_forward": 4}))) == ()


def test_ranks_that_train_one_model_and_send_next_to_nothing() -> None:
    norm_only = FULL.replace(collectives=(sent(4), sent(4_000_000, ranks=1)))
    (told,) = why(launch(norm_only))
    assert told == (
        "the ranks train one model, whose gradients have 4,000,000 bytes, and were seen to send 4: "
        "gradients were exchanged out of sight, or all ranks are given the same data"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"data_parallel": 1},
        {"replicated": {}, "replicated_bytes": 0},
        {"replicated": {"w": (1.0, 1.0)}},
        {"collectives": None},
        {"collectives": 2},
    ],
    ids=["one part of the data", "sharded", "nothing moved", "not known", "averaged now and then"],
)
def test_ranks_that_need_not_exchange_gradients_in_each_step(changes: dict[str, Any]) -> None:
    assert why(launch(ALONE))
    assert why(launch(ALONE, evidence=EVIDENCE.replace(**changes))) == ()


def test_replicas_that_differ_and_ranks_without_counts() -> None:
    assert why(launch(ALONE), make_case(framework=Script(path="t.py", replicas="differ"))) == ()
    first, second = launch(ALONE)
    assert why([first, second.replace(counts=None)]) == ()
    assert why([first, second.replace(evidence=None)]) == ()


def test_a_launch_with_hidden_work_has_no_counts(tmp_path: Path) -> None:
    def run_of(reports: list[RankReport], name: str) -> Any:
        files = write_launch(tmp_path / name, *reports, case=make_case())
        return collect(files, make_machine(), started_at="", duration_s=1, failure=None)

    told = ("a CUDA graph was replayed",)
    run = run_of(launch(hidden=told), "hidden")
    assert run.failure is None
    assert (run.counts, run.hidden) == ((), told)
    seen = run_of(launch(), "seen")
    assert seen.counts
    assert seen.hidden == ()
    assert run.window == seen.window  # the step was counted all the same: it is no measured one
