from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.analysis.hang import calls_of, explain
from perfsuite.results.collective_calls import CollectiveCall, CollectiveCallsFile, GroupCalls
from perfsuite.results.run_dir import RunDir

Calls = Sequence[CollectiveCall]
WORLD = (0, 1, 2, 3)


def done(number: int, name: str = "all_reduce", **changes: Any) -> CollectiveCall:
    return CollectiveCall(**{"number": number, "name": name, "is_done": True, "age_s": 130, **changes})


def waits(number: int, name: str = "all_reduce", **changes: Any) -> CollectiveCall:
    return done(number, name, **{"is_done": False, "age_s": 118.2, "place": "train.py:22", **changes})


def group(ranks: Sequence[int] = WORLD, name: str = "default_pg", **fields: Any) -> GroupCalls:
    return GroupCalls(backend="nccl", name=name[:2], description=name, ranks=tuple(ranks), **fields)


def files(*of_ranks: Sequence[GroupCalls], world_size: int = 4) -> dict[int, CollectiveCallsFile]:
    return {
        rank: CollectiveCallsFile(rank=rank, world_size=world_size, groups=tuple(groups))
        for rank, groups in enumerate(of_ranks)
    }


def said(*of_ranks: Calls) -> str | None:
    """Return the explanation of a hang in which the ranks made these calls in the default group."""
    return explain(files(*([group(calls=calls)] for calls in of_ranks)))


IN_57 = (done(56), waits(57))
IN = "of group default_pg"


def test_names_the_rank_that_lacks_a_collective() -> None:
    assert said(IN_57, IN_57, IN_57, [done(56)]) == (
        f"rank 3 has not called all_reduce 57 {IN}, in which ranks 0 to 2 have waited for 118 s (train.py:22)"
    )
    # On a GPU, the ranks might have called further collectives after the one that does not complete.
    ahead = (*IN_57, waits(58, "broadcast"))
    assert str(said(ahead, [done(56)], ahead, [done(55)])).startswith(
        f"ranks 1 and 3 have not called all_reduce 57 {IN}, in which ranks 0 and 2 have waited"
    )


def test_a_rank_without_any_call_lacks_the_first() -> None:
    first = [waits(1, "broadcast", place=None)]
    assert explain(files([group((0, 1), calls=first)], [], world_size=2)) == (
        f"rank 1 has not called broadcast 1 {IN}, in which rank 0 has waited for 118 s"
    )


def test_a_rank_without_a_record_is_not_blamed() -> None:
    records = files(*([group(calls=IN_57)] for _ in range(3)))
    assert explain(records) == (
        f"ranks 0 to 2 have waited for 118 s in all_reduce 57 {IN} (train.py:22); "
        "the calls of rank 3 are unknown"
    )
    records[2] = files([], [], [group(calls=[done(56)])])[2]
    assert str(explain(records)).startswith("rank 2 has not called all_reduce 57"), (
        "the calls of this rank are known"
    )


def test_names_the_rank_that_calls_something_else() -> None:
    other = (done(56), waits(57, "all_gather", place="train.py:30"))
    assert said(IN_57, other, IN_57, IN_57) == (
        "rank 1 calls all_gather (train.py:30) where ranks 0, 2 and 3 call all_reduce (train.py:22), "
        f"as collective 57 {IN}"
    )


def test_names_the_rank_with_other_sizes() -> None:
    def sized(*size: int, dtype: str = "Float", name: str = "all_reduce") -> Calls:
        return [waits(57, name, sizes=(size,), dtypes=(dtype,), place=None)]

    assert said(sized(8, 2), sized(8, 2), sized(7, 2), sized(8, 2)) == (
        "rank 2 calls all_reduce with Float [7, 2] where ranks 0, 1 and 3 call all_reduce with Float [8, 2], "
        f"as collective 57 {IN}"
    )
    assert "with Half [8]" in str(said(sized(8), sized(8), sized(8), sized(8, dtype="Half")))
    uneven = said(*(sized(size, name="all_to_all") for size in (8, 7, 8, 8)))
    assert "stalls" in str(uneven), "ranks can send unequal amounts in an all-to-all"


def test_compares_the_parts_of_a_coalesced_call() -> None:
    parts = (waits(57, "all_gather"), waits(57, "reduce_scatter"))
    explanation = str(said(parts, parts, parts[:1], parts))
    assert explanation.startswith(
        "rank 2 calls all_gather (train.py:22) where ranks 0, 1 and 3 call all_gather and "
    )


def test_the_same_call_on_all_ranks_is_a_stall() -> None:
    assert said(IN_57, IN_57, IN_57, [done(56), done(57)]) == (
        f"all ranks have called all_reduce 57 {IN} (train.py:22), but ranks 0 to 2 have waited for 118 s "
        "in it: the network or a GPU stalls"
    )


def test_groups_that_wait_for_each_other_may_be_in_another_order() -> None:
    def rank(first: float, second: float) -> list[GroupCalls]:
        return [
            group(calls=[waits(5, age_s=first)]),
            group(name="mesh_dp", calls=[waits(3, "all_gather", age_s=second)]),
        ]

    explanation = str(explain(files(rank(9, 8), rank(8, 9), rank(9, 8), rank(9, 8))))
    assert explanation.endswith(
        "the network or a GPU stalls, or ranks start this collective and all_gather 3 of group mesh_dp of "
        "ranks 0 to 3 in different orders"
    )


def test_follows_the_wait_to_the_rank_that_is_free() -> None:
    """Rank 3 computes.

    Rank 2 waits for rank 3 in a pipeline, and has therefore not called the all-reduce of ranks 0 and 2.
    """
    data = group((0, 2), "mesh_dp", calls=[waits(9, age_s=300)])
    short = group((0, 2), "mesh_dp", calls=[done(8)])
    pipeline = group((2, 3), "mesh_pp", calls=[waits(4, "broadcast")])
    late = group((2, 3), "mesh_pp", calls=[done(3, "broadcast")])
    assert explain(files([data], [], [short, pipeline], [late])) == (
        "rank 3 has not called broadcast 4 of group mesh_pp of ranks 2 and 3, in which rank 2 has waited for "
        "118 s (train.py:22)"
    )


def test_a_rank_that_waits_for_a_message_is_not_free() -> None:
    data = group((0, 2), "mesh_dp", calls=[waits(9)])
    receives = group((2, 3), "mesh_pp", open_messages=(waits(2, "recv 0<-1", place="pipe.py:7"),))
    explanation = str(explain(files([data], [], [group((0, 2), "mesh_dp", calls=[done(8)]), receives], [])))
    assert explanation.startswith("rank 2 has not called all_reduce 9 of group mesh_dp"), (
        "no better explanation is known"
    )


def test_names_both_collectives_of_a_deadlock() -> None:
    first, second = group((0, 1), "a", calls=[waits(5, age_s=20)]), group((0, 1), "b", calls=[waits(3)])
    explanation = explain(files([first], [second], world_size=2))
    assert explanation == (
        "rank 0 has not called all_reduce 3 of group b of ranks 0 and 1, in which rank 1 has waited for "
        "118 s (train.py:22); rank 1 has not called all_reduce 5 of group a of ranks 0 and 1, in which rank "
        "0 has waited for 20 s (train.py:22)"
    )


def test_the_longest_wait_comes_first() -> None:
    short = group((0, 1), "a", calls=[waits(5, age_s=20)])
    long = group((0, 1), "b", calls=[waits(3, age_s=90)])
    explanation = str(explain(files([short, long], [], world_size=2)))
    assert explanation.startswith("rank 1 has not called all_reduce 3 of group b")


def test_names_ranks_that_wait_for_messages() -> None:
    receives = group((0, 1), open_messages=(waits(2, "recv 0<-1"), waits(3, "recv 0<-1", age_s=9)))
    sends = group((0, 1), name="undefined", open_messages=(waits(2, "send 1->0", age_s=200, place=None),))
    assert explain(files([receives], [sends], world_size=2)) == (
        "rank 1 has waited for 200 s in send 1->0 of group un of ranks 0 and 1, "
        f"rank 0 has waited for 118 s in recv 0<-1 {IN} (train.py:22)"
    )


@pytest.mark.parametrize(
    "of_ranks",
    [
        pytest.param([], id="no rank wrote its calls"),
        pytest.param([[], []], id="no groups"),
        pytest.param([[group(calls=[done(56)])]] * 4, id="nobody waits"),
        pytest.param(
            [[group(calls=[waits(57, age_s=1.9)])], [group(calls=[done(56)])]], id="ranks still train"
        ),
        pytest.param([[group(open_messages=(waits(1, age_s=1.9),))]], id="a message is on its way"),
    ],
)
def test_says_nothing_that_is_not_known(of_ranks: Sequence[Sequence[GroupCalls]]) -> None:
    assert explain(files(*of_ranks)) is None


def test_long_lists_of_ranks_are_cut() -> None:
    everyone = range(0, 40, 2)
    records = {
        rank: CollectiveCallsFile(
            rank=rank, world_size=40, groups=(group(everyone, calls=[done(1)] if rank else [waits(2)]),)
        )
        for rank in everyone
    }
    assert str(explain(records)).startswith(
        "ranks 2, 4, 6, 8, 10, 12 and 13 more have not called all_reduce 2"
    )


def test_reads_the_calls_of_this_jobs_ranks(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)

    def write(pid: int, rank: int, world_size: int = 4) -> CollectiveCallsFile:
        file = CollectiveCallsFile(rank=rank, world_size=world_size)
        documents.write(run_dir.collectives(pid), file)
        return file

    zero = write(1, 0)
    write(2, 1)
    write(3, 1)  # nobody knows which of the two processes is the rank
    write(4, 0, world_size=1)  # a helper process of a rank, which has its own group
    run_dir.collectives(5).write_text("{")
    assert calls_of(run_dir, 4) == {0: zero}
