"""A session that compares two arms: it launches them in turn, and neither needs a baseline nor writes one.

    A B, B A, A B, ...  -->  pairs of launches  -->  judge_pairs: undecided: one more pair

Arm A is what is compared with, arm B what may be slower. Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from perfsuite.analysis.health import is_shared
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import framework_of
from perfsuite.launch import driving
from perfsuite.launch.quiet import Neighbours
from perfsuite.measure import is_free, launch_once, with_others_named
from perfsuite.node.cpu import node_variables
from perfsuite.results.outcome import Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import Measurement
from perfsuite.results.store import FoundBaseline, SessionDir, Store
from perfsuite.session import Session, check_same
from perfsuite.verdict.arms import ARM_A, ARM_B, judge_pairs, unhealthy_pairs
from perfsuite.verdict.overall import with_unseen
from perfsuite.verdict.paired_test import MAX_PAIRS
from perfsuite.verdict.pairs import order
from perfsuite.verdict.profiled import explained


@dataclass
class Comparison(Session):
    """Compares one case after another in its two `arms`, A and B. A fault is injected into arm B alone."""

    before: list[Run] = field(default_factory=list)
    """The launches of arm A so far; those of arm B are the `launches`."""
    max_pairs: int = MAX_PAIRS
    tolerance: float | None = None
    """Of `metric` (None: of tokens/s), as a share; None: as a gate has it on this kind of device."""
    explains: bool = True
    """Have both arms profiled, in one more launch of each, where they differ."""
    metric: str | None = None
    """Pairs are made until this one is decided; None: until tokens/s and all others are."""

    @cached_property
    def directory(self) -> SessionDir:
        """The directory of this comparison: its launches, and its `results.json`."""
        return Store(self.options.store).new_comparison()

    def _measure(self, case: Case, nodeid: str) -> Measurement:
        self.before = []
        check_same(self._cases.setdefault(case.id, case), case)
        machine = self.host.machine_for(case)
        if reasons := self._unfit_nodes(case, machine):
            verdict = Verdict(outcome="unhealthy", launches=0, reasons=reasons)
            return self._measurement(case, nodeid, (), verdict)
        self._say_if_same(case, machine)
        self.lock.take(self.listener.say, wait=not self.options.no_wait)
        self.running = case.id
        self.save()
        verdict = self._pairs(case, machine)
        self.running = None
        self.listener.end(verdict.outcome)
        return self._measurement(case, nodeid, self.launches, verdict)

    def _measurement(
        self,
        case: Case,
        nodeid: str,
        runs: Sequence[Run],
        verdict: Verdict,
        known: FoundBaseline | None = None,
    ) -> Measurement:
        """Return the result with the launches of arm A. No failure is excused that arm A does not have."""
        result = super()._measurement(case, nodeid, runs, verdict, known)
        before = tuple(self.before[: len(runs)])
        failures, others = ({each.failure.kind for each in arm if each.failure} for arm in (before, runs))
        is_known = failures == {verdict.failure} and others <= failures
        return result.replace(before=before, excused=result.excused if is_known else None)

    def wants_profile(self, result: Measurement, case: Case) -> bool:
        """Whether to profile both arms: they differ."""
        is_other = result.outcome in ("regressed", "improved")
        return self.explains and is_other and framework_of(case).plan(case).needs_torch

    def _explained(self, result: Measurement, case: Case) -> Measurement:
        """Return the result with a profile of each arm, and what differs between them."""
        directory, machine = self._case_directory(case), self.host.machine_for(case)
        a, b = self.arms
        inject = self.options.inject
        before = self._profile(case, machine, directory / "a", inject=None, arm=a, name=ARM_A)
        now = self._profile(case, machine, directory / "b", inject=inject, arm=b, name=ARM_B)
        verdict = with_unseen(result.verdict, {ARM_A: before, ARM_B: now})
        verdict = verdict.replace(profiled=explained(before, now, ARM_A))
        return result.replace(profile=now, profile_before=before, verdict=verdict)

    def _say_if_same(self, case: Case, machine: Machine) -> None:
        """Say before the first launch that both arms are one environment, unless a fault tells them apart."""
        a, b = self.arms
        usual = {**driving.usual(case, machine.device), **node_variables(case, machine.device)}
        if self.options.inject is None and a.acts_as(b, usual):
            given = " and ".join(sorted({*a.given, *b.given}))
            no_effect = f", {given} has no effect" if given else ""
            self.listener.say(
                f"{case.id}: arms A and B are the same environment{no_effect}: this comparison can only show "
                "noise"
            )

    @property
    def unjudged(self) -> list[Run]:
        """The launches so far of both arms, A's first."""
        return [*self.before, *self.launches]

    def _pairs(self, case: Case, machine: Machine) -> Verdict:
        """Launch pairs until they decide. Launches of arm A are added to `before`, of B to `launches`.

        A pair that is no evidence is made again, in the same order.
        """
        while True:
            healthy = len(self.before) - len(unhealthy_pairs(self.before, self.launches))
            made: dict[str, Run] = {}
            others = None
            for arm in order(healthy):
                made[arm], beside = self._launch_arm(case, machine, arm, len(self.before) + 1, len(made))
                others = beside or others
            self.before.append(made["a"])
            self.launches.append(made["b"])
            verdict = self._judge()
            if verdict.outcome != "undecided":
                return verdict
            if others is not None and not is_free(made["b"], others, self.options.when_shared):
                # While others stay, more launches would be in vain: one pair is enough for a verdict.
                verdict = self._judge(max_unhealthy=1)
                if verdict.outcome != "undecided":
                    return verdict

    def _judge(self, **changes: int) -> Verdict:
        return judge_pairs(
            self.before,
            self.launches,
            tolerance=self.tolerance,
            metric=self.metric,
            max_pairs=self.max_pairs,
            corrects=self.arms[0].has_packages_of(self.arms[1]),
            **changes,
        )

    def _launch_arm(
        self, case: Case, machine: Machine, arm: str, pair: int, made: int
    ) -> tuple[Run, Neighbours | None]:
        """Launch an arm once, as the first (`made` is 0) or the second of a pair.

        Returns also who tells of those that used the machine beside it, or None where nobody did.
        """
        number = 2 * (pair - 1) + made + 1
        self.listener.begin(case.id, case.total_steps, number, case.unit)
        if self.neighbours is not None:
            self.neighbours.launch_begins(machine)
        run = launch_once(
            case,
            machine,
            RunDir.of_launch(self._case_directory(case) / arm, pair).path,
            inject=self.options.inject if arm == "b" else None,
            counts=self.options.counts,
            arm=self.arms["ab".index(arm)],
            launcher=self.host.launcher,
            on_progress=self.listener.step,
        )
        if self.neighbours is None or run.failure is not None or not is_shared(run.health, machine):
            return run, None
        return with_others_named(run, number, self.neighbours), self.neighbours
