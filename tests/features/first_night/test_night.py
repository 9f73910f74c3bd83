"""Tests of the helpers that all steps of a first night use."""

import sys
from pathlib import Path

import pytest

from perfsuite.doctor.rows import unknown
from perfsuite.errors import FileError
from perfsuite.features.first_night import night as module
from perfsuite.features.first_night.night import answer_of, healthy_launches, not_run, numa_nodes, why_not
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import RunDir
from tests.features.first_night.nights import make_night
from tests.samples import make_case, make_gpu_machine, make_run


def test_a_step_begins_with_an_empty_directory() -> None:
    night = make_night()
    (night.new_directory("spread") / "old").touch()
    (night.directory("spread") / "launch-1" / "logs").mkdir(parents=True)
    (night.directory("spread") / "newest").symlink_to("launch-1")
    assert night.directory("spread") == Path("night/steps/spread")
    assert [entry.name for entry in night.new_directory("spread").iterdir()] == [module.MARKER]


def test_a_continued_step_keeps_its_files() -> None:
    continued = make_night(is_continued=True)
    assert continued.continued_directory("cases").is_dir(), "there was no earlier attempt"
    (continued.directory("cases") / "old").touch()
    assert (continued.continued_directory("cases") / "old").exists()
    assert not (make_night().continued_directory("cases") / "old").exists()


def test_never_removes_files_of_the_user() -> None:
    night = make_night(out=Path())
    thesis = night.directory("cases") / "test_mine.py"
    thesis.parent.mkdir(parents=True)
    thesis.touch()
    with pytest.raises(
        FileError, match=r"^steps/cases was not created by first-night, so its files are kept"
    ):
        night.new_directory("cases")
    Path("mine").mkdir()
    Path("mine", module.MARKER).touch()
    night.directory("spread").symlink_to(Path("mine").resolve())
    with pytest.raises(FileError, match=r"^steps/spread was not created by first-night"):
        night.new_directory("spread")
    assert thesis.exists()
    assert Path("mine", module.MARKER).exists()


def test_follows_no_link_when_it_removes_files() -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").touch()
    night = make_night()
    (night.new_directory("spread") / "link").symlink_to(Path("mine").resolve())
    night.new_directory("spread")
    assert Path("mine/thesis.tex").exists()


def test_names_what_it_cannot_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a container wrote as root, for example, cannot be removed.

    The marker file stays, so the next attempt tries to remove the files again.
    """
    night = make_night()
    kept = night.new_directory("container") / "launch-1"
    kept.mkdir()
    for number in range(4):
        (kept / str(number)).touch()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(
            FileError, match=r"cannot be removed: night/steps/container/launch-1/.* and 2 more\."
        ):
            night.new_directory("container")
    assert [entry.name for entry in night.new_directory("container").iterdir()] == [module.MARKER]


def test_a_directory_that_cannot_be_created_is_named() -> None:
    Path("night").touch()
    with pytest.raises(FileError, match=r"^night/steps/spread cannot be created: Not a directory"):
        make_night().new_directory("spread")


def test_a_check_that_did_not_run_is_unknown() -> None:
    assert not_run("image", "none") == unknown("image", "not run: none")


@pytest.mark.parametrize(
    ("code", "answer", "kept"),
    [
        ("print('GPU0')", "GPU0\n", "GPU0\n"),
        ("print('lost'); raise SystemExit(9)", None, "lost\n"),
        ("import time; time.sleep(60)", None, "no answer in 1 s\n"),
    ],
)
def test_answers_of_programs_are_kept(code: str, answer: str | None, kept: str) -> None:
    file = Path("answer.txt")
    deadline_s = 1 if "sleep" in code else 60
    assert answer_of([sys.executable, "-c", code], file, deadline_s=deadline_s) == answer
    assert file.read_text() == kept
    assert answer_of(["/nowhere"], file) is None
    assert file.read_text() == "No such file or directory\n"


def test_only_launches_that_measured_are_compared() -> None:
    case = make_case()
    directory = Path("spread")
    runs = [
        make_run(),
        make_run(failure=Failure(kind="crash", message="x")),
        make_run(case=make_case(micro_batch=7)),
    ]
    for number, run in enumerate(runs, 1):
        launch = RunDir.of_launch(directory, number)
        launch.path.mkdir(parents=True)
        launch.run.write_text(run.as_json())
    RunDir.of_launch(directory, 4).path.mkdir()
    assert healthy_launches(directory, case) == [make_run()]


def test_numa_nodes_without_cores_are_left_out(tmp_path: Path) -> None:
    for number, cores in ((0, "0-2,8"), (1, "4"), (2, "")):
        node = tmp_path / "sys/devices/system/node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
    assert numa_nodes(tmp_path) == [{0, 1, 2, 8}, {4}]


def test_a_case_that_cannot_run_says_why() -> None:
    case = make_case(hardware="h100")
    assert why_not(make_case(), make_night()) is None
    assert "this machine is cpu-test-2c" in str(why_not(case, make_night()))
    assert make_night(machine=make_gpu_machine(), wait_quiet_s=9).launching().when_shared == "wait"
    assert make_night(wait_quiet_s=9).launching().when_shared == "again"
