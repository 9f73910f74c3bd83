import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _all_gpus_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def fork(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Start a fork of this process that calls a function."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def exit_code_of(target: Callable[..., object], *arguments: Any) -> int | None:
    """Call a function in a fork of this process, and return the exit code of the fork."""
    process = fork(target, *arguments)
    process.join(60)
    return process.exitcode


class Passing:
    """A fake sleep that adds up the seconds. Each sleep calls `meanwhile` with its number."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.count = 0
        self.meanwhile: Callable[[int], object] = lambda count: None

    def sleep(self, seconds: float) -> None:
        self.count += 1
        self.meanwhile(self.count)
        self.seconds += seconds


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Passing:
    passing = Passing()
    monkeypatch.setattr(time, "sleep", passing.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: passing.seconds)
    return passing
