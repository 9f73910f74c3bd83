from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from perfsuite.analysis.stack_reader import read_stacks
from perfsuite.node import stack_asker
from perfsuite.results.run_dir import RunDir


def test_only_those_that_listen_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would end any other process."""
    monkeypatch.setattr(stack_asker, "WAIT_S", 60)
    run_dir = RunDir(tmp_path)
    listens = (
        "import sys, pathlib; from perfsuite.worker import stack_writer\n"
        "from perfsuite.results.run_dir import RunDir\n"
        f"stack_writer.listen(RunDir(pathlib.Path({str(tmp_path)!r})), None)\n"
        f"stack_writer.listen(RunDir(pathlib.Path({str(tmp_path)!r})), 3)\n"
        "print(flush=True); sys.stdin.read()\n"
    )
    codes = (listens, "import sys; print(flush=True); sys.stdin.read()")
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for code in codes
    ]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()
    stack_asker.ask(run_dir, [psutil.Process(process.pid) for process in started])
    for process in started:
        process.communicate()
    assert [process.returncode for process in started] == [0, 0]
    assert read_stacks(run_dir).startswith("rank 3 stood here:")
    assert "in <module>" in read_stacks(run_dir)


def test_a_process_that_does_not_react_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_asker, "WAIT_S", 0.2)
    run_dir = RunDir(tmp_path)
    run_dir.stacks(0, os.getpid()).write_text("")
    monkeypatch.setattr(stack_asker, "STACKS_SIGNAL", signal.SIGCONT)  # which does nothing
    stack_asker.ask(run_dir, [psutil.Process()])
    assert read_stacks(run_dir) == ""


def test_who_is_gone_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(ended.pid)
    ended.wait()
    RunDir(tmp_path).stacks(0, ended.pid).write_text("")
    stack_asker.ask(RunDir(tmp_path), [process])


def test_stacks_are_waited_for_until_they_grow_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RunDir(tmp_path).stacks(0, os.getpid())
    file.write_text("")
    monkeypatch.setattr(stack_asker, "STACKS_SIGNAL", signal.SIGCONT)
    texts = ["", "Thread 1", "Thread 1\nThread 2"]

    def sleep(seconds: float) -> None:
        if texts:
            file.write_text(texts.pop(0))
        else:
            slept.append(seconds)

    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", sleep)
    stack_asker.ask(RunDir(tmp_path), [psutil.Process()])
    assert file.read_text() == "Thread 1\nThread 2"
    assert slept == [stack_asker.POLL_S], "once more, to see that nothing came"
