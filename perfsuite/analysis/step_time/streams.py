"""Replay the log of a step on a simulated host, streams and links, whose speeds are given. Pure.

The host issues the entries of the log one after another, and each entry takes the host some time. A kernel
begins when its stream is free and the host has launched it. Streams wait for each other only where the log
says so. The log has its entries in the order in which the framework issued them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from perfsuite.analysis.step_time.kernels import Device, KernelKind, kernel_s
from perfsuite.analysis.step_time.links import Links, collective_s, is_inside
from perfsuite.errors import PredictionError
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.device_log import (
    CollectiveWait,
    Communicate,
    EndOfStep,
    Entry,
    HostCall,
    HostWait,
    Kernel,
    RecordEvent,
    StreamWait,
)

REPEATS = 3  # number of replays of the step: the first ones fill the queues, and the last one is timed
ON_STREAMS = (Kernel, Communicate, CollectiveWait, RecordEvent, StreamWait, HostWait)
"""Entries that `_Clock` replays. All other entries only take time on the host."""
CUT_SHORT = "the log of the dry run was cut short: {}. Repeat the dry run of the case"


class HostTimes(NamedTuple):
    """Seconds that the host takes for each kind of work, on the machine of docs/evidence/one-h100.md.

    `event_s` was chosen so that the prediction matches FSDP2's step on that page. `event_s` includes the time
    of the Python code in the hook around the event. The other constants were fixed beforehand.
    """

    forward_s: float = 7e-6  # for an operator
    backward_s: float = 6e-6  # for an operator, which autograd calls from C++ and not from Python code
    optimizer_s: float = 8e-6
    tensor_s: float = 0.06e-6  # for each tensor of an operator on lists
    view_s: float = 1.2e-6
    host_operator_s: float = 2e-6
    wrapper_s: float = 45e-6  # for an operator on a DTensor, until it is called on the inner tensors
    collective_s: float = 45e-6
    event_s: float = 475e-6  # to record an event, or to let a stream wait for it
    launch_s: float = 5e-6  # until an idle stream begins its new work
    read_s: float = 12e-6  # until the host continues after the GPU has finished
    factor: float = 1.0  # factor by which these times, except for `launch_s`, are multiplied on another host

    def call_s(self, entry: Entry) -> float:
        """Return the seconds that the host takes to issue an entry."""
        return self.factor * self._call_s(entry)

    def _call_s(self, entry: Entry) -> float:
        match entry:
            case Kernel():
                of_phase = {"backward": self.backward_s, "optimizer": self.optimizer_s}
                lists = entry.tensors * self.tensor_s
                return of_phase.get(entry.phase, self.forward_s) + lists
            case HostCall(kind):
                of_kind = {"view": self.view_s, "host": self.host_operator_s, "wrapper": self.wrapper_s}
                return of_kind[kind]
            case Communicate():
                return self.collective_s
            case RecordEvent() | StreamWait():
                return self.event_s
        return 0.0


class MachineSpeeds(NamedTuple):
    """The speeds of everything that a step uses."""

    device: Device
    links: Links
    host: HostTimes = HostTimes()

    def with_host(self, factor: float) -> MachineSpeeds:
        """Return the machine with a host that takes this many times as long."""
        return self._replace(host=self.host._replace(factor=factor * self.host.factor))

    def with_device(self, factor: float) -> MachineSpeeds:
        """Return the machine with a device whose kernels take this many times as long."""
        return self._replace(device=self.device.slower(factor))


class Durations:
    """The seconds that each kernel and each collective of a step takes if it runs alone."""

    def __init__(self, step: Sequence[Entry], machine: MachineSpeeds) -> None:
        self.of_entry: list[float] = []  # 0 for all other entries
        self.of_kind: defaultdict[KernelKind, float] = defaultdict(float)
        self.communication_s = 0.0
        known: dict[Kernel, tuple[KernelKind, float]] = {}
        for entry in step:
            seconds = 0.0
            if isinstance(entry, Kernel):
                if entry not in known:
                    known[entry] = kernel_s(entry, machine.device)
                kind, seconds = known[entry]
                self.of_kind[kind] += seconds
            elif isinstance(entry, Communicate):
                seconds = collective_s(entry, machine.links)
                self.communication_s += seconds
            self.of_entry.append(seconds)

    @property
    def kernels_s(self) -> float:
        """Seconds of all kernels."""
        return sum(self.of_kind.values())


def reported_step(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries of the reported step of a dry run. Raises `PredictionError` if some are missing."""
    ends = {entry.step: index for index, entry in enumerate(entries) if isinstance(entry, EndOfStep)}
    for number in (COUNTED_STEP - 1, COUNTED_STEP):
        if number not in ends:
            raise PredictionError(CUT_SHORT.format(f"it does not reach the end of step {number}"))
    recorded: set[int | None] = {entry.event for entry in entries if isinstance(entry, RecordEvent)}
    recorded.add(None)  # None: the host waits for all work, not for an event
    begun = {entry.number for entry in entries if isinstance(entry, Communicate)}
    step = entries[ends[COUNTED_STEP - 1] + 1 : ends[COUNTED_STEP]]
    for entry in step:
        if isinstance(entry, (StreamWait, HostWait)) and entry.event not in recorded:
            raise PredictionError(CUT_SHORT.format(f"event {entry.event} is awaited but not recorded"))
        if isinstance(entry, CollectiveWait) and entry.number not in begun:
            raise PredictionError(CUT_SHORT.format(f"collective {entry.number} is awaited but not begun"))
    if not any(isinstance(entry, Kernel) for entry in step):
        raise PredictionError(
            "the log of the dry run has no kernels. Repeat the dry run of the case with a simulated GPU"
        )
    return step


def period_s(
    step: Sequence[Entry],
    durations: Durations,
    machine: MachineSpeeds,
    *,
    communicates: bool = True,
    host_takes_time: bool = True,
) -> float:
    """Return the seconds between the ends of two consecutive steps; 0 for a step without work.

    If streams or links do not wait for each other, the slowest one sets the pace.

    Without `communicates`, collectives take no time. Without `host_takes_time`, the host's work takes no
    time.
    """
    host = machine.host if host_takes_time else HostTimes(factor=0.0, launch_s=0.0)
    issued = _issued(step, durations, host, communicates=communicates)
    clock = _Clock(host, machine.links.devices)
    ends = []
    for _ in range(REPEATS):
        for call in issued:
            clock.issue(call)
        ends.append(clock.ends)
    return max((end - before for end, before in zip(ends[-1], ends[-2], strict=True)), default=0.0)


class _Issued(NamedTuple):
    """An entry that the host issues, and its times."""

    entry: Entry
    host_s: float  # seconds on the host from the previous `_Issued` entry until this entry is issued
    seconds: float  # seconds of the entry's own work


def _issued(
    step: Sequence[Entry], durations: Durations, host: HostTimes, *, communicates: bool
) -> list[_Issued]:
    """Return the entries of the kinds in `ON_STREAMS`, with their times.

    The host's time for any other entry is added to that of the next entry in `ON_STREAMS`.
    """
    issued = []
    host_s = 0.0
    for entry, seconds in zip(step, durations.of_entry, strict=True):
        host_s += host.call_s(entry)
        if isinstance(entry, ON_STREAMS):
            takes_time = communicates or not isinstance(entry, Communicate)
            issued.append(_Issued(entry, host_s, seconds if takes_time else 0.0))
            host_s = 0.0
    if host_s:  # after the last of these entries, the host still has work in this step
        issued.append(_Issued(step[-1], host_s, 0.0))
    return issued


class _Clock:
    """The times, in seconds, at which the host and each stream have done what they were given."""

    def __init__(self, host: HostTimes, devices: int) -> None:
        self._host = host
        self._devices = devices  # number of devices in one machine
        self._now = 0.0  # time on the host
        self._streams: defaultdict[int, float] = defaultdict(float)
        self._links: defaultdict[bool, float] = defaultdict(float)  # by whether the link is within a machine
        self._events: dict[int, float] = {}
        self._collectives: dict[int, float] = {}

    @property
    def ends(self) -> list[float]:
        """The times at which each stream and each link has done everything."""
        return [*self._streams.values(), *self._links.values()]

    def issue(self, issued: _Issued) -> None:
        """Let the host issue an entry."""
        entry, host_s, seconds = issued
        self._now += host_s
        streams = self._streams
        match entry:
            case Kernel(stream):
                streams[stream] = max(streams[stream], self._launched()) + seconds
            case Communicate():
                self._communicate(entry, seconds)
            case CollectiveWait(stream, number):
                streams[stream] = max(streams[stream], self._collectives.get(number, 0.0))
            case RecordEvent(event, stream):
                self._events[event] = max(streams[stream], self._now)
            case StreamWait(stream, event):
                streams[stream] = max(streams[stream], self._events.get(event, 0.0))
            case HostWait(event):
                done = max(self.ends, default=0.0) if event is None else self._events.get(event, 0.0)
                self._now = max(self._now, done + self._host.read_s * self._host.factor)

    def _launched(self) -> float:
        return self._now + self._host.launch_s

    def _communicate(self, call: Communicate, seconds: float) -> None:
        """Begin a collective. Collectives on the same link run one after another."""
        link = is_inside(call.ranks, call.apart, self._devices)
        begin = max(self._streams[call.stream], self._launched())
        if seconds:
            begin = max(begin, self._links[link])
        end = begin + seconds
        self._links[link] = max(self._links[link], end)
        self._collectives[call.number] = end
        if not call.is_async:
            self._streams[call.stream] = end
