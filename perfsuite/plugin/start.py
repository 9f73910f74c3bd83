"""Begins and ends a session: the one that the options describe, its progress, and its interrupts."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Generator
from typing import Any

import pytest

from perfsuite.case.hardware import ACCELERATORS
from perfsuite.launch.launchers import launcher
from perfsuite.plugin.keys import PROGRESS, SELECTED, SESSION, is_worker, usage_error
from perfsuite.plugin.options import root_of, values
from perfsuite.plugin.terminal import terminal_of
from perfsuite.plugin.xdist import CollectsFromWorkers
from perfsuite.report.progress import Progress
from perfsuite.report.text import printable
from perfsuite.session.begin import against_arm, against_baseline, dry
from perfsuite.session.option_table import options_of
from perfsuite.session.session import Session


def pytest_configure(config: pytest.Config) -> None:
    """Register the hardware markers and check the options."""
    for name in ACCELERATORS:
        config.addinivalue_line("markers", f"{name}: a perfsuite case meant for {name}")
    progress = config.stash[PROGRESS] = _progress(config)
    config.stash[SESSION] = _session(config, progress)
    config.pluginmanager.register(HoldsInterrupts(config))
    if not is_worker(config):
        config.pluginmanager.register(CollectsFromWorkers(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the next session on this machine measure."""
    HoldsInterrupts.release(config)
    if SESSION in config.stash:
        config.stash[SESSION].setup.lock.release()


def _session(config: pytest.Config, progress: Progress) -> Session:
    chosen = values(config)
    options = options_of(root_of(config), chosen)
    with usage_error():
        if chosen["dry"]:
            session = dry(options, progress)
        elif chosen["against"] is not None:
            arms = ("--perf-against", chosen["against"]), ("", ".")
            session = against_arm(options, progress, launcher(chosen["launcher"]), arms, chosen["max-pairs"])
        else:
            session = against_baseline(options, progress, launcher(chosen["launcher"]))
    session.saves = not is_worker(config)
    return session


def _progress(config: pytest.Config) -> Progress:
    """The progress of a session, written past pytest's capturing."""

    def uncaptured() -> Any:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()

    def line(text: str) -> None:
        if (terminal := terminal_of(config)) is not None:
            with uncaptured():
                terminal.ensure_newline()
                terminal.write_line(printable(text))

    def live(text: str | None) -> None:
        if (terminal := terminal_of(config)) is not None:
            with uncaptured():
                terminal.rewrite((text or "")[: shutil.get_terminal_size().columns - 1], erase=True)
                if text is None:
                    terminal.write("\r")

    return Progress(line=line, live=live)


class HoldsInterrupts:
    """Has a second Ctrl-C wait until the results are written, which takes pytest and perfsuite a second.

    Else it hits pytest while it takes note of the first one, and its exit status says that all is well.
    """

    KEY = pytest.StashKey[Any]()

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_keyboard_interrupt(self) -> Generator[None, object, object]:
        """Ignore SIGINT from now on, before any other plugin looks at the first one."""
        if self.config.stash.get(SELECTED, 0) and signal.getsignal(signal.SIGINT) is not None:
            with contextlib.suppress(ValueError):  # not in the main thread, which alone gets an interrupt
                self.config.stash[self.KEY] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        return (yield)

    @classmethod
    def release(cls, config: pytest.Config) -> None:
        """Answer SIGINT as before."""
        if cls.KEY in config.stash:
            signal.signal(signal.SIGINT, config.stash[cls.KEY])
            del config.stash[cls.KEY]
