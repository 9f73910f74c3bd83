"""Compares two arms by what a step does: each runs a case once. No baseline, no quiet machine, no pairs.

Counts have no noise, so one run of each arm decides. A dry run needs no hardware either; a launch is for what
cannot be run dry. Neither says anything of speed.
"""

from __future__ import annotations

from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import ClassVar

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

    known_a: Run | None = None
    """The run of arm A, if it was made already."""

    def refused(self, trial: Trial) -> None:
        """Refuse nothing. Says if both arms are one environment."""
        say_if_same(self, trial)

    def judge(self, trial: Trial) -> Verdict:
        """Run a case in both arms and judge what a step of arm B does by that of arm A."""
        made = self._made(trial, "ab" if self.known_a is None else "b")
        a, b = self.known_a or made["a"], made["b"]
        trial.before.append(a)
        trial.runs.append(b)
        return judge_counts(a, b).replace(launches=len(made))

    def _made(self, trial: Trial, names: str) -> dict[str, Run]:
        """A run of each of these arms."""
        runs = dict[str, Run]()
        for number, name in enumerate(names, 1):
            how = self.setup.launching
            how = replace(how, arm=self._arm(name), inject=how.inject if name == "b" else None)
            how.on_launch(trial.case, number)
            runs[name] = launch_once(trial.case, trial.machine, _directory(trial, name), how)
        return runs

    def _arm(self, name: str) -> Arm:
        return self.arms["ab".index(name)]


@dataclass
class ByDryRuns(ByCounts):
    """Runs both arms dry, at the same time. The host of its `setup` is a `DryHost`."""

    dry: ClassVar[bool] = True
    device: Device | None = None
    """What to pretend; None: what the case is meant for."""

    def _made(self, trial: Trial, names: str) -> dict[str, Run]:
        self.setup.listener.begin(trial.case.id, COUNTED_STEP, 1, trial.case.unit)
        stop = Event()

        def run(name: str) -> Run:
            directory = _directory(trial, name)
            return dry_run(trial.case, directory, device=self.device, arm=self._arm(name), stop=stop)

        with ThreadPoolExecutor(len(names)) as threads:
            begun = {name: threads.submit(run, name) for name in names}
            try:
                wait(begun.values(), return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # an interrupt, or an arm that cannot run the case, ends the other
        return {name: each.result() for name, each in begun.items()}


def _directory(trial: Trial, arm: str) -> Path:
    return RunDir.of_launch(trial.directory / arm, 1).path


def session(
    options: Options,
    listener: Listener,
    arms: tuple[Arm, ...],
    launcher: Launcher | None = None,
    known_a: Run | None = None,
) -> Session:
    """A session that compares two arms by counts: of launches, or of dry runs without a `launcher`.

    Dry runs pretend CUDA in both arms or in neither: says so if the torch of an arm lets none be pretended.
    """
    if launcher is not None:
        setup = Setup(options, listener, Host(launcher, options.store))
        return Session(setup, ByCounts(setup, arms, known_a=known_a))
    why_not = {name: why for name, arm in zip("AB", arms, strict=True) if (why := why_no_cuda(arm))}
    device: Device | None = "cpu" if why_not else None
    for name, why in why_not.items():
        listener.say(f"a CPU is pretended in both arms, for arm {name}: {why}")
    setup = Setup(options, listener, DryHost(device=device))
    return Session(setup, ByDryRuns(setup, arms, known_a=known_a, device=device))
