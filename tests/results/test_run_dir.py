from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from perfsuite.results.run_dir import RunDir, launches_in


@pytest.mark.parametrize(("name", "number"), [("launch-2", 2), ("launch-11", 11), ("run", None)])
def test_a_launch_is_numbered_by_its_directory(tmp_path: Path, name: str, number: int | None) -> None:
    assert RunDir(tmp_path / name).number == number


def test_launches_are_named_and_found_by_number(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        RunDir.of_launch(tmp_path, number).path.mkdir()
    (tmp_path / "launch-old").mkdir()
    (tmp_path / "notes").mkdir()
    assert launches_in(tmp_path) == [RunDir.of_launch(tmp_path, number) for number in (1, 2, 10)]
    assert launches_in(tmp_path / "nowhere") == []


def test_each_file_has_a_name_of_its_own() -> None:
    run_dir = RunDir(Path("d"))
    files = [run_dir.case, run_dir.run, run_dir.files, run_dir.progress, run_dir.lease, run_dir.endpoint]
    files += [run_dir.launch(0), run_dir.launch(1), run_dir.agent_log(0), run_dir.agent_log(1)]
    files += [run_dir.scheduler_log]
    files += [run_dir.flight_recorder, run_dir.rank(0), run_dir.rank(1), run_dir.rank_log(0)]
    files += [run_dir.stacks(0, 7), run_dir.stacks(None, 7), run_dir.stacks(0, 7, 1)]
    assert len(set(files)) == len(files)
    assert {file.parent for file in files} == {Path("d")}


def test_stacks_are_found_by_node_with_rank_and_process_those_of_no_known_rank_first(tmp_path: Path) -> None:
    """Two nodes may have processes of one number."""
    run_dir = RunDir(tmp_path)
    by_number = [(None, 98), (0, 97), (2, 7), (2, 55), (2, 99), (2, 101), (2, 300), (10, 100)]
    for rank, pid in reversed(by_number):
        run_dir.stacks(rank, pid).touch()
    run_dir.stacks(11, 7, 1).touch()
    found = [(rank, pid, run_dir.stacks(rank, pid)) for rank, pid in by_number]
    assert run_dir.all_stacks(0) == found
    assert run_dir.all_stacks() == [*found, (11, 7, run_dir.stacks(11, 7, 1))]


def test_a_run_dir_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RunDir(Path("d")).path = Path("e")  # type: ignore[misc]


def test_files_of_nodes_are_in_the_order_of_the_nodes(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for node in (10, 2, 0):
        run_dir.launch(node).touch()
        run_dir.agent_log(node).touch()
        run_dir.rank_log(node).touch()
    assert run_dir.all_launches(11) == {node: run_dir.launch(node) for node in (0, 2, 10)}
    assert run_dir.all_agent_logs() == [run_dir.agent_log(node) for node in (0, 2, 10)]
    for rank in (0, 1):
        run_dir.rank(rank).touch()
    assert sorted(run_dir.all_ranks()) == [run_dir.rank(0), run_dir.rank(1)]
    assert run_dir.all_rank_logs() == [run_dir.rank_log(rank) for rank in (0, 2, 10)]
