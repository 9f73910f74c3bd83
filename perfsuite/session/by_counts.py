"""Compares two arms by what a step does: each runs a case once. No baseline, no quiet machine, no pairs.

Counts have no noise, so one run of each arm decides. A dry run needs no hardware either; a launch is for what
cannot be run dry. Neither says anything of speed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import ClassVar, Literal

from perfsuite.dry.driver import dry_run, why_no_cuda
from perfsuite.dry.machine import Device
from perfsuite.launch.arm import Arm
from perfsuite.launch.base import Launcher, Listener
from perfsuite.measure import launch_once
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.session.against_arm import say_if_same
from perfsuite.session.session import Session
from perfsuite.session.setup import DryHost, Host, Options, Setup
from perfsuite.session.way import Trial, Way
from perfsuite.verdict.arms import judge_counts


@dataclass
class ByCounts(Way):
    """Launches each arm once, on the machine that the case is meant for, however busy it is."""

    def refused(self, trial: Trial) -> None:
        """Refuse nothing. Says if both arms are one environment."""
        say_if_same(self, trial)

    def judge(self, trial: Trial) -> Verdict:
        """Run a case in both arms and judge what a step of arm B does by that of arm A."""
        a, b = self._both(trial)
        trial.before.append(a)
        trial.runs.append(b)
        return judge_counts(a, b)

    def _both(self, trial: Trial) -> tuple[Run, Run]:
        return self._launched(trial, "a"), self._launched(trial, "b")

    def _launched(self, trial: Trial, arm: Literal["a", "b"]) -> Run:
        how = self.setup.launching
        how = replace(how, arm=self.arms["ab".index(arm)], inject=how.inject if arm == "b" else None)
        how.on_launch(trial.case, 1 + "ab".index(arm))
        return launch_once(trial.case, trial.machine, _directory(trial, arm), how)


@dataclass
class ByDryRuns(ByCounts):
    """Runs both arms dry, at the same time. The host of its `setup` is a `DryHost`."""

    dry: ClassVar[bool] = True
    device: Device | None = None
    """What to pretend; None: what the case is meant for."""

    def _both(self, trial: Trial) -> tuple[Run, Run]:
        self.setup.listener.begin(trial.case.id, COUNTED_STEP, 1, trial.case.unit)
        stop = Event()
        with ThreadPoolExecutor(len(self.arms)) as threads:
            begun = [
                threads.submit(
                    dry_run, trial.case, _directory(trial, name), device=self.device, arm=arm, stop=stop
                )
                for name, arm in zip("ab", self.arms, strict=True)
            ]
            try:
                a, b = (each.result() for each in begun)
            finally:
                stop.set()  # an interrupt, or one arm that cannot run the case, ends the other
        return a, b


def _directory(trial: Trial, arm: str) -> Path:
    return RunDir.of_launch(trial.directory / arm, 1).path


def session(
    options: Options, listener: Listener, arms: tuple[Arm, ...], launcher: Launcher | None = None
) -> Session:
    """A session that compares two arms by counts: of launches, or of dry runs without a `launcher`.

    Dry runs pretend CUDA in both arms or in neither: says so if the torch of an arm lets none be pretended.
    """
    if launcher is not None:
        setup = Setup(options, listener, Host(launcher, options.store))
        return Session(setup, ByCounts(setup, arms))
    why_not = {name: why for name, arm in zip("AB", arms, strict=True) if (why := why_no_cuda(arm))}
    device: Device | None = "cpu" if why_not else None
    for name, why in why_not.items():
        listener.say(f"a CPU is pretended in both arms, for arm {name}: {why}")
    setup = Setup(options, listener, DryHost(device=device))
    return Session(setup, ByDryRuns(setup, arms, device=device))
