"""Begins a session: the one that the options describe, and its progress."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

import pytest

from perfsuite.case.hardware import ACCELERATORS
from perfsuite.launch.launchers import launcher
from perfsuite.plugin.ending import CollectsFromWorkers, HoldsInterrupts
from perfsuite.plugin.keys import PROGRESS, SESSION, is_worker, terminal_of, usage_error
from perfsuite.plugin.options import root_of, values
from perfsuite.report.progress import Progress
from perfsuite.report.text import printable
from perfsuite.session import against_arm, dry
from perfsuite.session.against_baseline import AgainstBaseline
from perfsuite.session.option_table import options_of
from perfsuite.session.session import Session
from perfsuite.session.setup import Host, Setup


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
            session = dry.session(options, progress)
        elif chosen["against"] is not None:
            arms = ("--perf-against", chosen["against"]), ("", ".")
            starts, most = launcher(chosen["launcher"]), chosen["max-pairs"]
            session = against_arm.session(options, progress, starts, arms, most)
        else:
            setup = Setup(options, progress, Host(launcher(chosen["launcher"]), options.store))
            session = Session(setup, AgainstBaseline(setup))
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
