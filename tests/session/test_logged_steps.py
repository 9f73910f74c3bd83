from pathlib import Path

import pytest

from perfsuite.errors import FileError, PredictionError
from perfsuite.session.logged_steps import LoggedSteps
from tests.session.test_priced import GIB, directory_of, finding, run_of

CHANGED = finding(GIB, 2 * GIB)


def test_each_log_is_read_once(tmp_path: Path) -> None:
    logs = [directory_of(tmp_path / name, GIB) for name in "ab"]
    steps = LoggedSteps((run_of(GIB), run_of(GIB)), logs)
    first = steps.step(0, CHANGED)
    logs[0].device_log(0).unlink()
    assert steps.step(0, CHANGED) is first
    assert steps.step(1, CHANGED) is not first
    with pytest.raises(FileError, match="does not exist"):
        steps.step(0, CHANGED.replace(ranks="3-5"))


def test_a_log_that_cannot_be_read_is_not_read_again(tmp_path: Path) -> None:
    log = directory_of(tmp_path / "a", GIB)
    content = log.device_log(0).read_bytes()
    log.device_log(0).write_bytes(b"")
    steps = LoggedSteps((run_of(GIB), run_of(GIB)), (log, "no log"))
    for _ in range(2):
        with pytest.raises(FileError, match="cut short or damaged"):
            steps.step(0, CHANGED)
        log.device_log(0).write_bytes(content)
    with pytest.raises(PredictionError, match="no log"):
        steps.step(1, CHANGED)
