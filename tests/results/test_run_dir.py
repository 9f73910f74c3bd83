import contextlib
import os
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from perfsuite.results.run_dir import RunDir, launches_in


def test_launches_are_named_and_found_by_number(tmp_path: Path) -> None:
    for name in ("launch-10", "launch-2", "launch-1", "launch-old", "notes"):
        (tmp_path / name).mkdir()
    assert launches_in(tmp_path) == [RunDir.of_launch(tmp_path, number) for number in (1, 2, 10)]
    assert [RunDir(tmp_path / name).number for name in ("launch-2", "launch-11", "run")] == [2, 11, None]
    assert launches_in(tmp_path / "nowhere") == []


def test_run_dir_files_are_distinct_and_frozen() -> None:
    run_dir = RunDir(Path("d"))
    files = [run_dir.case, run_dir.run, run_dir.files, run_dir.progress, run_dir.lease, run_dir.endpoint]
    files += [run_dir.scheduler_log, run_dir.flight_recorder, run_dir.checkpoints, run_dir.injected]
    numbered = [run_dir.launch, run_dir.agent_log, run_dir.rank, run_dir.rank_log, run_dir.profile]
    numbered += [run_dir.trace, run_dir.training]
    files += [file(number) for file in numbered for number in (0, 1)]
    files += [run_dir.stacks(0, 7), run_dir.stacks(None, 7), run_dir.stacks(0, 7, 1)]
    files += [run_dir.collectives(7), run_dir.collectives(8), run_dir.collectives(7, 1)]
    assert len(set(files)) == len(files)
    assert {file.parent for file in files} == {Path("d")}
    with pytest.raises(FrozenInstanceError):
        run_dir.path = Path("e")  # type: ignore[misc]


def test_each_process_of_each_launch_has_an_address(tmp_path: Path) -> None:
    """For the address of a socket, the kernel allows 108 bytes."""
    one, other = RunDir(tmp_path / ("x" * 200) / "launch-1"), RunDir(tmp_path / ("x" * 200) / "launch-2")
    addresses = {one.request_address(7), one.request_address(8), other.request_address(7)}
    assert len(addresses) == 3
    assert all(address.startswith("\0") and len(address) < 108 for address in addresses)
    assert one.request_address(7) == RunDir(one.path / ".." / "launch-1").request_address(7)


def test_finds_stacks_by_node_rank_and_process(tmp_path: Path) -> None:
    """Processes on two nodes can have the same number."""
    run_dir = RunDir(tmp_path)
    by_number = [(None, 98), (0, 97), (2, 7), (2, 55), (2, 99), (2, 101), (2, 300), (10, 100)]
    for rank, pid in reversed(by_number):
        run_dir.stacks(rank, pid).touch()
    run_dir.stacks(11, 7, 1).touch()
    stacks = [(rank, pid, run_dir.stacks(rank, pid)) for rank, pid in by_number]
    assert run_dir.all_stacks(0) == stacks
    assert run_dir.all_stacks() == [*stacks, (11, 7, run_dir.stacks(11, 7, 1))]


def test_orders_files_of_nodes_and_ranks(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for number in (10, 2, 0):
        for file in (run_dir.launch, run_dir.agent_log, run_dir.rank_log, run_dir.rank):
            file(number).touch()
    assert run_dir.all_launches(11) == {node: run_dir.launch(node) for node in (0, 2, 10)}
    assert run_dir.all_agent_logs() == [run_dir.agent_log(node) for node in (0, 2, 10)]
    assert run_dir.all_rank_logs() == [run_dir.rank_log(rank) for rank in (0, 2, 10)]
    assert set(run_dir.all_ranks()) == {run_dir.rank(rank) for rank in (0, 2, 10)}


def test_a_new_report_is_seen_on_a_slow_file_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, a file that was missing is not seen until its directory is opened. The test simulates this."""
    run_dir = RunDir(tmp_path)
    names: set[str] = set()

    def scandir(path: Path) -> Any:
        names.update(os.listdir(path))
        return contextlib.nullcontext()

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(Path, "exists", lambda path: path.name in names)
    run_dir.rank(0).touch()
    assert not run_dir.has_reports(2)
    run_dir.rank(1).touch()
    assert run_dir.has_reports(2)
