from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.analysis.stack_reader import MAX_LINES, MAX_PLACES, read_stacks
from perfsuite.results.run_dir import RunDir

TORCH = "/lib/torch/distributed/distributed_c10d.py"


def stack(file: str, *, address: str = "0x00007f01", depth: int = 1) -> str:
    """As faulthandler writes it: another thread first, the main thread last."""
    frames = "".join(f'  File "{file}", line {line} in waits\n' for line in range(depth))
    helper = 'Thread 0x00007fab (most recent call first):\n  File "/lib/threading.py", line 1 in helps\n'
    return f"{helper}\nCurrent thread {address} (most recent call first):\n{frames}"


def write(run_dir: RunDir, rank: int | None, pid: int, text: str) -> None:
    run_dir.stacks(rank, pid).write_text(text)


def test_the_rank_that_stands_elsewhere_comes_first(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for rank in (0, 1, 3):
        write(run_dir, rank, 100 + rank, stack(TORCH, address=f"0x0000{rank}"))
    write(run_dir, 2, 102, stack("train.py"))
    write(run_dir, None, 99, stack("launcher.py"))
    write(run_dir, None, 102, "")
    heads = [line for line in read_stacks(run_dir).splitlines() if line.endswith("stood here:")]
    assert heads == ["rank 2 stood here:", "rank 0, rank 1, rank 3 stood here:", "process 99 stood here:"]


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_of_two_ranks_the_one_that_does_not_wait_in_torch_comes_first(tmp_path: Path, elsewhere: int) -> None:
    run_dir = RunDir(tmp_path)
    for rank in (0, 1):
        write(run_dir, rank, 100 + rank, stack("train.py" if rank == elsewhere else TORCH))
    assert read_stacks(run_dir).startswith(f"rank {elsewhere} stood here:\n")


def test_the_main_thread_comes_first_and_what_is_told_is_bounded(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for rank in range(MAX_PLACES + 3):
        write(run_dir, rank, 100 + rank, stack(f"train_{rank}.py", depth=100))
    lines = read_stacks(run_dir).splitlines()
    assert lines[1:3] == ["Current thread (most recent call first):", '  File "train_0.py", line 0 in waits']
    assert len(lines) == MAX_PLACES * (MAX_LINES + 2) + 1
    assert lines[-1] == f"and 3 more places: see {tmp_path}"


def test_nothing_is_told_where_nobody_was_asked(tmp_path: Path) -> None:
    write(RunDir(tmp_path), 0, 1, "")
    assert read_stacks(RunDir(tmp_path)) == ""


def test_every_thread_is_shown_the_main_one_first(tmp_path: Path) -> None:
    write(RunDir(tmp_path), 0, 1, stack("train.py"))
    assert read_stacks(RunDir(tmp_path)) == (
        "rank 0 stood here:\n"
        "Current thread (most recent call first):\n"
        '  File "train.py", line 0 in waits\n'
        "thread (most recent call first):\n"
        '  File "/lib/threading.py", line 1 in helps'
    )


@pytest.mark.parametrize(("count", "rest"), [(40, "\nline 39"), (41, "\nline 39\n  ...")])
def test_forty_lines_of_a_stack_are_shown(tmp_path: Path, count: int, rest: str) -> None:
    write(RunDir(tmp_path), 0, 1, "\n".join(f"line {line}" for line in range(count)))
    assert read_stacks(RunDir(tmp_path)).endswith(rest)


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, "and 1 more places: see ")])
def test_eight_places_are_shown(tmp_path: Path, count: int, more: str) -> None:
    run_dir = RunDir(tmp_path)
    for rank in range(count):
        write(run_dir, rank, 100 + rank, stack(f"train_{rank}.py"))
    lines = read_stacks(run_dir).splitlines()
    assert sum(line.endswith("stood here:") for line in lines) == 8
    assert [line for line in lines if "more places" in line] == ([f"{more}{tmp_path}"] if more else [])


def test_a_place_where_a_process_without_a_rank_stands_comes_last(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for rank, file in ((None, "a.py"), (0, "a.py"), (1, "b.py"), (2, "b.py"), (3, "b.py")):
        write(run_dir, rank, 99 if rank is None else 100 + rank, stack(file))
    heads = [line for line in read_stacks(run_dir).splitlines() if line.endswith("stood here:")]
    assert heads == ["rank 1, rank 2, rank 3 stood here:", "process 99, rank 0 stood here:"]


@pytest.mark.parametrize(
    "outside",
    [
        f'Thread (most recent call first):\n  File "train.py", line 1 in hook\n  File "{TORCH}", line 2 in f',
        "Thread (most recent call first):",
    ],
)
def test_only_the_innermost_frame_tells_who_waits_in_torch(tmp_path: Path, outside: str) -> None:
    write(RunDir(tmp_path), 0, 100, stack(TORCH))
    write(RunDir(tmp_path), 1, 101, outside)
    assert read_stacks(RunDir(tmp_path)).startswith("rank 1 stood here:\n")
