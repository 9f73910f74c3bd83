"""Tests of pytest in another process. Each test writes its own `pytest.py`, which `python -m pytest` runs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.features.first_night.pytest_process import measured
from perfsuite.results.store import Store
from tests.doc_pages import ROOT
from tests.features.first_night.nights import measurement
from tests.processes import SLEEPS
from tests.samples import make_case, make_session_file

RESULTS = [measurement(make_case(micro_batch=size), "recorded") for size in (1, 2)]
STORE = Store(Path("night/steps/cases/store"))


def test_an_interrupt_lets_pytest_write_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pytest.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))

    def interrupt() -> None:
        wait_for_file("begun")
        os.kill(os.getpid(), signal.SIGUSR2)

    def end(number: int, frame: object) -> None:
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR2, end)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(SystemExit):
            [*measured([], Path("session.log"), Store(Path("store")))]
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)
    assert Path("interrupted").exists()


MEASURES = """
from pathlib import Path
from perfsuite.features.first_night.pytest_process import measured
from perfsuite.results.store import Store
[*measured([], Path("session.log"), Store(Path("store")))]
"""


def wait_for_file(name: str) -> None:
    until = time.monotonic() + 60
    while not Path(name).exists() and time.monotonic() < until:
        time.sleep(0.05)


@pytest.mark.launch
def test_a_killed_night_leaves_no_pytest_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pytest that is left behind would measure at the same time as the next first night.

    The next first night would not see the results of this pytest.
    """
    Path("pytest.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with subprocess.Popen([sys.executable, "-c", MEASURES]) as night:
        wait_for_file("begun")
        night.kill()
    wait_for_file("interrupted")
    assert Path("interrupted").exists()


def test_results_are_read_while_pytest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of an earlier session, and files that are not yet complete, are ignored."""
    Path("pytest.py").write_text("print('collected nothing')")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    documents.write(STORE.sessions / "a/results.json", make_session_file(RESULTS[0]))
    log = Path("session-1.log")
    log.with_suffix(".json").write_text("{")
    assert [*measured([], log, STORE)] == []
    assert log.read_text() == "collected nothing\n"
    documents.write(log.with_suffix(".json"), make_session_file())
    assert [*measured([], log, STORE)] == [make_session_file()]


WRITES = """
import shutil, time
from pathlib import Path
store = Path("night/steps/cases/store/runs")
(store / "b").mkdir(parents=True)
shutil.copy("one.json", store / "b/results.json")
until = time.monotonic() + 30
while not Path("seen").exists() and time.monotonic() < until:
    time.sleep(0.02)
Path("two.json").rename(store / "b/results.json")
"""


def test_results_are_yielded_while_pytest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("pytest.py").write_text(WRITES)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    numbers = []
    for number in (1, 2):
        contents = make_session_file(*RESULTS[:number])
        documents.write(Path(("one.json", "two.json")[number - 1]), contents)
    for session in measured([], Path("session-1.log"), STORE, look_s=0.02):
        numbers.append(len(session.results))
        Path("seen").touch()
    assert numbers == [1, 2]
