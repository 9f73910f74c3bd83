"""Compares two arms: launches them in turn. Neither needs a baseline, and none is written.

    A B, B A, A B, ...  -->  pairs of launches  -->  judge_pairs: undecided: one more pair

Arm A is what is compared with, arm B what may be slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfsuite.frameworks.base import framework_of
from perfsuite.launch import driving
from perfsuite.launch.arm import Arm, resolve
from perfsuite.launch.base import Launcher, Listener
from perfsuite.launch.quiet import Neighbours
from perfsuite.measure import Launching, is_free, launch_watched, profile_once
from perfsuite.node.cpu import node_variables
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import Measurement
from perfsuite.session.session import Session
from perfsuite.session.setup import Host, Options, Setup
from perfsuite.session.way import Trial, Way, excused
from perfsuite.verdict.arms import ARM_A, ARM_B, judge_pairs, unhealthy_pairs
from perfsuite.verdict.overall import with_unseen
from perfsuite.verdict.paired_test import MAX_PAIRS, order
from perfsuite.verdict.profiled import explained

Pair = tuple[tuple[str, str], tuple[str, str]]


@dataclass
class AgainstArm(Way):
    """Compares cases in two arms, A and B. A fault is injected into arm B alone."""

    max_pairs: int = MAX_PAIRS
    tolerance: float | None = None
    """Of `metric` (None: of tokens/s), as a share; None: as a gate has it on this kind of device."""
    explains: bool = True
    """Have both arms profiled, in one more launch of each, if they differ."""
    metric: str | None = None
    """Pairs are made until this one is decided; None: until tokens/s and all others are."""

    def refused(self, trial: Trial) -> None:
        """Refuse nothing: no baseline is needed. Says if both arms are one environment."""
        say_if_same(self, trial)

    def judge(self, trial: Trial) -> Verdict:
        """Launch pairs until they decide. A pair that is no evidence is made again, in the same order."""
        while True:
            others = self._launch_pair(trial)
            verdict = self._verdict(trial)
            shared = self.setup.options.when_shared
            if verdict.outcome == "undecided" and others and not is_free(trial.runs[-1], others, shared):
                # While others stay, more launches would be in vain: one pair is enough for a verdict.
                verdict = self._verdict(trial, max_unhealthy=1)
            if verdict.outcome != "undecided":
                before, now = (
                    {run.failure.kind for run in arm if run.failure} for arm in (trial.before, trial.runs)
                )
                if before == {verdict.failure} and now <= before:  # arm A has it, too
                    trial.excused = excused(trial, verdict, None)
                return verdict

    def _launch_pair(self, trial: Trial) -> Neighbours | None:
        """Launch each arm once. Returns who tells of others that used the machine; None if nobody did."""
        pair = len(trial.before) + 1
        others, made = None, dict[str, Run]()
        for arm in order(len(trial.before) - len(unhealthy_pairs(trial.before, trial.runs))):
            directory = RunDir.of_launch(trial.directory / arm, pair).path
            number = 2 * (pair - 1) + len(made) + 1
            made[arm], beside = launch_watched(
                trial.case, trial.machine, directory, number, self._launching(arm)
            )
            others = beside or others
        trial.before.append(made["a"])
        trial.runs.append(made["b"])
        return others

    def _launching(self, arm: str) -> Launching:
        how = replace(self.setup.launching, arm=self.arms["ab".index(arm)])
        return how if arm == "b" else replace(how, inject=None)

    def _verdict(self, trial: Trial, **changes: int) -> Verdict:
        return judge_pairs(
            trial.before,
            trial.runs,
            tolerance=self.tolerance,
            metric=self.metric,
            max_pairs=self.max_pairs,
            corrects=self.arms[0].has_packages_of(self.arms[1]),
            **changes,
        )

    def profile(self, result: Measurement, trial: Trial) -> Measurement | None:
        """The result with a profile of each arm, and what differs between them; None if they are alike."""
        differs = result.outcome in ("regressed", "improved")
        if not (self.explains and differs and framework_of(trial.case).plan(trial.case).needs_torch):
            return None
        taken = []
        for arm, name in (("a", ARM_A), ("b", ARM_B)):
            self.setup.listener.say(f"{name} of {trial.case.id} is launched once more, for a profile")
            directory = RunDir.of_profile(trial.directory / arm).path
            taken.append(profile_once(trial.case, trial.machine, directory, self._launching(arm)))
        before, now = taken
        verdict = with_unseen(result.verdict, {ARM_A: before, ARM_B: now})
        verdict = verdict.replace(profiled=explained(before, now, ARM_A))
        return result.replace(profile=now, profile_before=before, verdict=verdict)


def say_if_same(way: Way, trial: Trial) -> None:
    """Say if the two arms of a comparison are one environment for a case."""
    a, b = way.arms
    device = trial.machine.device
    usual = {**driving.usual(trial.case, device), **node_variables(trial.case, device)}
    if way.setup.options.inject is None and a.acts_as(b, usual):
        given = " and ".join(sorted({*a.given, *b.given}))
        no_effect = f", {given} has no effect" if given else ""
        way.setup.listener.say(
            f"{trial.case.id}: arms A and B are the same environment{no_effect}: this comparison can "
            "only show noise"
        )


def resolved(options: Options, arms: Pair) -> tuple[Arm, ...]:
    """The two arms, each given as the option that names it and its value.

    Raises `CaseError` and `GitError` for an arm that there is not.
    """
    return tuple(resolve(option, text, root=options.root, store=options.store) for option, text in arms)


def session(
    options: Options,
    listener: Listener,
    launcher: Launcher,
    arms: tuple[Arm, ...],
    max_pairs: int | None = None,
    tolerance: float | None = None,
) -> Session:
    """A session that compares two arms by the times of launches."""
    setup = Setup(options, listener, Host(launcher, options.store))
    return Session(setup, AgainstArm(setup, arms, max_pairs=max_pairs or MAX_PAIRS, tolerance=tolerance))
