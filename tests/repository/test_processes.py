"""Tests that every wait in the tests has a time limit."""

import subprocess
import sys

import pytest

from tests.processes import ended, read_until

PRINTS = "print('first', flush=True); import time; time.sleep(600)"


def start() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, text=True)


@pytest.mark.launch
def test_a_line_is_read_while_the_process_goes_on() -> None:
    with ended(start()) as process:
        read_until("first", process.stdout, process)
        assert process.poll() is None
        process.kill()


@pytest.mark.launch
def test_late_line_is_an_error() -> None:
    with ended(start()) as process, pytest.raises(TimeoutError, match=r"'second' in 1 s, but \['first"):
        read_until("second", process.stdout, process, seconds=1)


@pytest.mark.launch
def test_a_failure_ends_the_process() -> None:
    process = start()
    with pytest.raises(ValueError, match="mine"), ended(process):
        raise ValueError("mine")
    assert process.poll() is not None
