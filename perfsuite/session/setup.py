"""The setup of a session: its options, a real or simulated machine, preflights, and baselines."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.dry.machine import Device, pretended, why_not_dry
from perfsuite.errors import CaseError, MachineError
from perfsuite.frameworks.base import framework_of
from perfsuite.inputs.ini import BASELINES, STORE
from perfsuite.launch.base import Launcher
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.lock import WAIT_S as LOCK_WAIT_S
from perfsuite.launch.lock import MachineLock
from perfsuite.launch.quiet import WAIT_S, Neighbours
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.measure import Launching, WhenShared
from perfsuite.node.machine import detect_cpu
from perfsuite.report.progress import Progress
from perfsuite.report.terminal import preflight_text
from perfsuite.results.counts import CONSECUTIVE
from perfsuite.results.session_file import Measurement, Preflight
from perfsuite.results.store import BaselineStore, Store
from perfsuite.session.forecasts import Forecasts
from perfsuite.session.plan import Budget
from perfsuite.verdict.policy import Policy

MISSING_FAILS = "--perf-missing-baseline=fail"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's choices. `perfsuite.session.option_table` explains each field."""

    root: Path  # the root directory of the repository that contains the cases
    store: Path
    baselines: Path
    policy: Policy = field(default_factory=Policy)
    inject: str | None = None
    counts: bool = True
    counted_steps: int = CONSECUTIVE  # consecutive steps to count if nothing is timed; a case can override it
    interconnect: str | None = None  # the network between simulated machines; None: unknown
    explain: bool = False
    fail_without_baseline: bool = False
    strict: frozenset[str] = frozenset()
    shadow: bool = False
    min_judged: float = 0  # minimum share of cases that must be judged, from 0 to 1
    budget_s: float | None = None  # the time of the session, see `Budget`; None: no limit
    shard: tuple[int, int] | None = None  # number of this job, from 1, and number of jobs
    wait_quiet_s: float = WAIT_S
    wait_lock_s: float = LOCK_WAIT_S
    allow_shared: bool = False
    preflight: bool = True
    json: Path | None = None
    report: Path | None = None

    @property
    def when_shared(self) -> WhenShared:
        """What to do after a launch during which other jobs used the machine."""
        if self.allow_shared:
            return "stop"
        return "wait" if self.wait_quiet_s else "again"

    def steps_to_count(self, case: Case) -> int:
        """Return how many consecutive steps of a case are counted in a run that times nothing."""
        return self.counted_steps if case.counted_steps is None else case.counted_steps

    def is_failing(self, measurement: Measurement) -> bool:
        """Return whether this measurement fails its test, or would fail it without `shadow`."""
        return measurement.excused is None and measurement.outcome in {"failed", "regressed", *self.strict}

    def fails_session(self, measurement: Measurement) -> bool:
        """Return whether this measurement fails its session, or would fail it without `shadow`."""
        return self.is_failing(measurement) or (measurement.excused is None and measurement.is_empty)


def missing_baselines(directory: Path, root: Path) -> str | None:
    """Return a message if the user chose a directory of reviewed baselines that does not exist, else None.

    The default directory may be missing, because it is created when a baseline is accepted.
    """
    if directory.is_dir() or directory.resolve() == (root / BASELINES).resolve():
        return None
    return (
        f"no case has a reviewed baseline, because there is no directory {directory}. If you have already "
        "accepted a baseline, correct --perf-baselines, --baselines or perf_baselines"
    )


@dataclass
class Host:
    """The machine or nodes on which cases are launched. Also decides which cases can run on them."""

    launcher: Launcher = field(default_factory=LocalLauncher)
    shared: Path = STORE  # a directory that every node must be able to access

    @cached_property
    def machine(self) -> Machine:
        """The nodes and their GPUs. They are detected once, and only if they are needed."""
        return self.launcher.machine(self.shared)

    def machine_for(self, case: Case) -> Machine:
        """Return the machine for `case`. For CPU cases, a machine with GPUs counts as a CPU machine."""
        if "cpu" in case.hardware and all(self.machine.why_not(hardware) for hardware in case.hardware):
            return detect_cpu("a case meant for cpu")
        return self.machine.for_nodes(case.topology.nodes)

    def meant(self, case: Case) -> Case:
        """Return the case as it is measured here."""
        return case

    def why_not(self, case: Case) -> str | None:
        """Return why this machine cannot run `case`, or None.

        Raises `CaseError` if the machine could run the case with another build of torch.
        """
        machine = self.machine_for(case)
        reason = unsupported(case, machine)
        if reason is None:
            problem = wrong_torch(case, machine)
            if problem is not None:
                raise CaseError(problem)
        return reason


@dataclass
class DryHost(Host):
    """The machines that dry runs simulate. Also decides which cases can run dry on them."""

    device: Device | None = None  # the device to simulate; None: the device that a case is meant for
    # The hardware that `-m` selects. Empty if `-m` selects no hardware, or also uses other marks.
    hardware: frozenset[str] = frozenset()

    @cached_property
    def machine(self) -> Machine:
        """This machine. It need not be able to measure cases, because dry runs only simulate machines."""
        try:
            return super().machine
        except MachineError as error:
            return detect_cpu(str(error))

    def machine_for(self, case: Case) -> Machine:
        """Return the machine that is simulated for `case`."""
        return pretended(self.meant(case), self.device)[0]

    def meant(self, case: Case) -> Case:
        """Return the case with its hardware reordered: the hardware that `-m` selects comes first.

        The first hardware is the one that is simulated. If `-m` selects none or several of the case's
        hardware, the case is returned unchanged.
        """
        chosen = [name for name in case.hardware if name.partition("-")[0] in self.hardware]
        if len(chosen) != 1 or chosen[0] == case.hardware[0]:
            return case
        others = (name for name in case.hardware if name != chosen[0])
        return case.replace(hardware=(chosen[0], *others))

    def why_not(self, case: Case) -> str | None:
        """Return why `case` cannot be run dry, or None."""
        return why_not_dry(case, self.machine_for(case))


@dataclass
class Setup:
    """The options of a session, its machine, other users of the machine, and its baselines."""

    options: Options
    progress: Progress
    host: Host = field(default_factory=Host)
    budget: Budget | None = None  # the time of the session; None: no limit
    _forecasts: dict[str, Forecasts] = field(default_factory=dict)  # by name of the GPU

    @cached_property
    def store(self) -> Store:
        """The local store."""
        return Store(self.options.store)

    def forecasts(self, device_name: str, session: Path) -> Forecasts:
        """Return the measurements and forecasts on a kind of GPU that were in the store at the first call.

        The results of the current session, whose directory is `session`, are left out. So the session can
        still compare its measurements with older forecasts. For later sessions, a measurement replaces the
        older forecast of its case.
        """
        if device_name not in self._forecasts:
            earlier = [file for file in self.store.results() if file.parent.name != session.name]
            self._forecasts[device_name] = Forecasts(earlier, device_name)
        return self._forecasts[device_name]

    @cached_property
    def baselines(self) -> BaselineStore:
        """The reviewed baselines, and the baselines recorded on this machine."""
        return BaselineStore(self.options.baselines, self.store.baselines)

    @cached_property
    def lock(self) -> MachineLock:
        """The lock that lets only one session at a time measure on these nodes."""
        return MachineLock(self.host.launcher.lock, longest_wait_s=self.options.wait_lock_s)

    @cached_property
    def neighbours(self) -> Neighbours | None:
        """The other users of this machine; None if launches run on other machines."""
        if not self.host.launcher.runs_here:
            return None
        return Neighbours(self.progress.say, self.progress.waiting, self.options.wait_quiet_s)

    @property
    def launching(self) -> Launching:
        """The launch settings of this session."""
        return Launching(
            launcher=self.host.launcher,
            inject=self.options.inject,
            counts=self.options.counts,
            neighbours=self.neighbours,
            when_shared=self.options.when_shared,
            has_time=self._has_time,
            on_launch=lambda case, number: self.progress.begin(case.id, case.total_steps, number, case.unit),
            on_progress=self.progress.step,
        )

    def has_time_for(self, case: Case, launches: int) -> bool:
        """Return whether the budget, if there is one, has time for this many launches of a case."""
        return self.budget is None or self.budget.has_time_for(case, launches)

    def _has_time(self, case: Case, longest_s: float) -> bool:
        """Return whether the budget, if there is one, allows another launch of a case."""
        return self.budget is None or self.budget.allows_another(case, longest_s)


@dataclass
class Preflights:
    """Check nodes before the first multi-node case on them, with the torch of this environment."""

    setup: Setup
    new_directory: Callable[[], Path]
    save: Callable[[], None]  # saves the session's results so far
    made: list[Preflight] = field(default_factory=list)
    # Problems of each node that was bad in two consecutive preflights, by node number (from 0).
    _bad: dict[int, str] = field(default_factory=dict)

    def problems(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """Return the problems of the nodes that a case would use; none if no preflight is needed."""
        nodes = case.topology.nodes
        if nodes == 1 or not self.setup.options.preflight or not torch_build.installed():
            return ()
        if not framework_of(case).plan(case).needs_torch:
            return ()
        checked = {(len(preflight.nodes), preflight.machine.device) for preflight in self.made}
        if min(self._bad, default=nodes) >= nodes and (nodes, machine.device) not in checked:
            self._look(nodes, machine)
        return tuple(self._bad[node] for node in sorted(self._bad) if node < nodes)

    def _look(self, nodes: int, machine: Machine) -> None:
        """Run a preflight of the first nodes, and repeat it if a node is bad: other jobs might interfere."""
        first = self._preflight(nodes, machine)
        if not first.problems:
            return
        self.setup.progress.say(
            "repeating the preflight: a node is only considered bad if both preflights find problems"
        )
        second = self._preflight(nodes, machine)
        for number, (before, now) in enumerate(zip(first.nodes, second.nodes, strict=True)):
            if before.problems and now.problems:
                self._bad[number] = f"{now.name} was bad in two preflights: {'; '.join(now.problems)}"

    def _preflight(self, nodes: int, machine: Machine) -> Preflight:
        self.save()
        self.setup.progress.waiting(f"preflight of {nodes} nodes")
        launcher = self.setup.host.launcher
        allocation = self.setup.host.machine.allocation
        names = [node.name for node in allocation.nodes[:nodes]] if allocation else []
        preflight = launcher.check_nodes(machine, nodes, self.new_directory(), names=names)
        self.made.append(preflight)
        self.save()
        self.setup.progress.say(preflight_text(preflight))
        return preflight
