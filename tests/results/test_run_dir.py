from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from perfsuite.results.run_dir import RunDir, launches_in


@pytest.mark.parametrize(
    ("name", "number", "is_first"),
    [("launch-1", 1, True), ("launch-2", 2, False), ("launch-11", 11, False), ("run", None, True)],
)
def test_a_launch_is_numbered_by_its_directory(
    tmp_path: Path, name: str, number: int | None, is_first: bool
) -> None:
    run_dir = RunDir(tmp_path / name)
    assert (run_dir.number, run_dir.is_first) == (number, is_first)


def test_launches_are_named_and_found_by_number(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        RunDir.of_launch(tmp_path, number).path.mkdir()
    (tmp_path / "launch-old").mkdir()
    (tmp_path / "notes").mkdir()
    assert launches_in(tmp_path) == [RunDir.of_launch(tmp_path, number) for number in (1, 2, 10)]
    assert launches_in(tmp_path / "nowhere") == []


def test_each_file_has_a_name_of_its_own() -> None:
    run_dir = RunDir(Path("d"))
    files = [run_dir.case, run_dir.run, run_dir.launch, run_dir.launcher_log, run_dir.files, run_dir.progress]
    files += [run_dir.flight_recorder, run_dir.rank(0), run_dir.rank(1), run_dir.rank_log(0)]
    files += [run_dir.stacks(0, 7), run_dir.stacks(None, 7)]
    assert len(set(files)) == len(files)
    assert {file.parent for file in files} == {Path("d")}


def test_all_ranks_are_the_reports_alone(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for file in (run_dir.rank(0), run_dir.rank(1), run_dir.rank_log(0), run_dir.case):
        file.touch()
    assert sorted(run_dir.all_ranks()) == [run_dir.rank(0), run_dir.rank(1)]


def test_stacks_are_found_with_rank_and_process_those_of_no_known_rank_first(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    processes: list[tuple[int | None, int]] = [
        (10, 100),
        (2, 101),
        (2, 99),
        (2, 7),
        (2, 300),
        (2, 55),
        (0, 97),
        (None, 98),
    ]
    for rank, pid in processes:
        run_dir.stacks(rank, pid).touch()
    assert [(rank, pid) for rank, pid, _ in run_dir.all_stacks()] == [
        (None, 98),
        (0, 97),
        (2, 7),
        (2, 55),
        (2, 99),
        (2, 101),
        (2, 300),
        (10, 100),
    ]
    assert all(file == run_dir.stacks(rank, pid) for rank, pid, file in run_dir.all_stacks())


def test_a_run_dir_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RunDir(Path("d")).path = Path("e")  # type: ignore[misc]
