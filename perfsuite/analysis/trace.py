"""Reduce the events of torch's profiler to a `Profile`: intervals, calls and times. Pure.

Events have Chrome's format, with times in microseconds. On a CPU, operators show what is computed, and each
collective of gloo has a thread of its own. On a GPU, kernels show what is computed. Each kernel belongs to
the step in which the host launched it, and a step lasts from its first kernel to the first kernel of the next
step.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from perfsuite import documents
from perfsuite.analysis.intervals import Span, holds, length, union, within, without
from perfsuite.errors import ReportError
from perfsuite.results.profile import PROFILED_STEPS, Profile, StepSplit, Work, longest_first

STEP = "ProfilerStep#"
OPTIMIZER = "Optimizer.step#"
DATA_LOADER = "enumerate(DataLoader)#"
REPEATS = "autograd::engine::evaluate_function: "  # name prefix of events that only wrap another event
OPERATOR = "cpu_op"
OPERATORS = frozenset({OPERATOR, "user_annotation"})
ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
HOST_READ = "aten::_local_scalar_dense"
GRAPH_LAUNCH = "GraphLaunch"  # occurs in the names of calls that replay a CUDA graph
LONGEST_NAME = 160  # maximum characters of a kernel's name: templates are long; a digest replaces the rest

_GLOO = re.compile(r"gloo:(\w+)")
_NCCL = re.compile(r"nccl\w*?Kernel_?((?:[A-Z][a-z]+)+)")
_SYNC = re.compile(r"\w*Synchronize(?:_v\w+)?")
_NOT_COMPUTED = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::", "_dtensor::")
"""Name prefixes of events that compute nothing themselves: collectives, waits for collectives, and autograd
nodes (their operators have events of their own)."""
_COMPILED = ("## Call CompiledFxGraph", "CompiledFunction")
_OF_ONE = re.compile(r"(FSDP::[\w ]+?) (?:\(.*\)|for .*)|(## Call CompiledFxGraph) \S+ ##|(triton_\w+?)_\d+")
"""Matches names that are specific to one layer, one compiled graph or one numbered kernel. One of the groups
matches the part of the name that all layers, graphs or kernels share. The other groups are empty."""
_WAITED_FOR = "Memcpy DtoH (Device -> Pageable)"  # the host waits for this copy into unpinned memory


@dataclass
class _Call:
    """One call of an operator or a kernel. Steps are numbered from 0; -1 means outside all steps."""

    name: str
    step: int
    us: float


class _Kernel(NamedTuple):
    name: str
    step: int
    span: Span
    launched_at: float
    stream: Any  # None for events that do not compute: copies and collectives
    is_seen: bool  # whether an operator launched it; also True if its launch is not in the trace


class _Spans:
    def __init__(self, data: list[Span]) -> None:
        self.compute = list[Span]()
        self.optimizer = list[Span]()
        self.unseen = list[Span]()
        self.data = data
        self.communication = defaultdict[str, list[Span]](list)


class _Window:
    """The profiled steps on the host's clock. `starts` has each step's start, and the last step's end."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        operators = (event for event in events if event.get("cat") in OPERATORS)
        steps = sorted(_span(event) for event in operators if event["name"].startswith(STEP))
        if not steps:
            raise ReportError("the trace has no step")
        begins = [*(begin for begin, _ in steps), steps[-1][1]]
        self.steps = min(len(steps), PROFILED_STEPS)
        self.starts = begins[: self.steps + 1]

    def step(self, at: float) -> int:
        """Return the number of the step at a moment, from 0, or -1 if the moment is outside all steps."""
        number = bisect_right(self.starts, at) - 1
        return number if number < self.steps else -1  # pragma: no mutate -1 to -2: no step has either number


def reduced(events: Sequence[dict[str, Any]], device: Literal["cpu", "cuda"]) -> Profile:
    """Reduce the trace of a rank. Raises `ReportError` if it has no steps or, on a GPU, no kernels."""
    done = [event for event in events if event.get("ph") == "X" and "dur" in event]
    window = _Window(done)
    operators, spans = _operators(done, window)
    calls = {"operators": operators, "kernels": list[_Call]()}
    if device == "cuda":
        calls["kernels"], split = _on_gpu(done, window, spans)
        copies = [call for call in calls["kernels"] if call.name == _WAITED_FOR]
        calls["host_syncs"] = _synchronisations(done, window) + copies
    else:
        split = _split(spans, window.starts[0], window.starts[-1], window.steps, on_gpu=False)
        calls["host_syncs"] = [call for call in operators if call.name == HOST_READ]
    works = {name: _work(its, window.steps) for name, its in calls.items()}
    unsteady = tuple(sorted(set().union(*(_unsteady(its, window.steps) for its in calls.values()))))
    return Profile(device=device, steps=window.steps, split=split, unsteady=unsteady, **works)


def _operators(events: Iterable[dict[str, Any]], window: _Window) -> tuple[list[_Call], _Spans]:
    """Return the calls of operators that begin in a step, and all spans.

    The time of a call does not include the time of the calls inside it.
    """
    by_thread = defaultdict[Any, list[tuple[float, float, str]]](list)
    for event in events:
        if event.get("cat") in OPERATORS and not event["name"].startswith(STEP):
            by_thread[event.get("tid")].append((event["ts"], -event["dur"], event["name"]))
    calls: list[_Call] = []
    spans = _Spans([])
    for of_thread in by_thread.values():
        opened: list[tuple[_Call, float, bool]] = []  # call, its end, and whether it is in a collective
        for begin, minus_length, full_name in sorted(of_thread):  # outer calls come first
            end = begin - minus_length
            while opened and opened[-1][1] <= begin:
                opened.pop()
            inside = False
            if opened:
                outer, outer_end, inside = opened[-1]
                outer.us -= min(end, outer_end) - begin
            collective = _GLOO.fullmatch(full_name)
            call = _Call(_of_all(full_name), window.step(begin), -minus_length)
            calls.append(call)
            opened.append((call, end, inside or collective is not None))
            if collective is not None:
                spans.communication[collective[1].strip("_")].append((begin, end))
            elif full_name.startswith(OPTIMIZER):
                spans.optimizer.append((begin, end))
            elif full_name.startswith(DATA_LOADER):
                spans.data.append((begin, end))
            elif not inside and _computes(full_name):
                spans.compute.append((begin, end))
    return [call for call in calls if call.step >= 0 and not call.name.startswith(REPEATS)], spans


def _of_all(name: str) -> str:
    match = _OF_ONE.fullmatch(name)
    return name if match is None else next(filter(None, match.groups()))


def _computes(name: str) -> bool:
    is_operator = re.match(r"\w+::", name) and not name.startswith(("FSDP::", *_NOT_COMPUTED))
    return bool(is_operator) or name.startswith(_COMPILED)


def _split(spans: _Spans, begin: float, end: float, steps: int, *, on_gpu: bool) -> StepSplit:
    """Split the time between `begin` and `end`.

    On a CPU, the wait for data is part of the busy time. On a GPU, it is not.
    """

    def inside(ranges: Iterable[Span]) -> list[Span]:
        return within(union(ranges), begin, end)

    optimizer = inside(spans.optimizer)
    data = inside(spans.data)
    waiting = [] if on_gpu else without(data, optimizer)
    compute = without(inside(spans.compute), union([*optimizer, *waiting]))
    busy = union([*optimizer, *compute, *waiting])
    exposed: dict[str, float] = {}
    hidden: dict[str, float] = {}
    communicated: list[Span] = []
    # If two kinds overlap, the time is assigned to the kind whose name sorts first.
    for kind, ranges in sorted(spans.communication.items()):
        new = without(inside(ranges), communicated)
        alone = length(without(new, busy))
        for times, us in ((exposed, alone), (hidden, length(new) - alone)):
            if round(us, 1) > 0:
                times[kind] = _a_step(us, steps)
        communicated = union([*communicated, *new])
    rest = without([(begin, end)], union([*busy, *communicated]))
    idle = length(without(rest, data))
    return StepSplit(
        step_us=_a_step(end - begin, steps),
        compute_us=_a_step(length(compute), steps),
        optimizer_us=_a_step(length(optimizer), steps),
        exposed_us=exposed,
        hidden_us=hidden,
        data_wait_us=_a_step(length(waiting) + length(rest) - idle, steps),
        idle_us=_a_step(idle, steps) if on_gpu else 0,
        other_us=0 if on_gpu else _a_step(idle, steps),
        unseen_us=_a_step(length(inside(spans.unseen)), steps),
    )


def _synchronisations(events: Iterable[dict[str, Any]], window: _Window) -> list[_Call]:
    """Return calls in which the host waits for the device: synchronisations, and reads of device values."""
    waits = [event for event in events if event.get("cat") in LAUNCHES and _SYNC.fullmatch(event["name"])]
    begins = sorted((str(event.get("tid")), event["ts"]) for event in waits)

    def is_waiting(read: dict[str, Any]) -> bool:
        tid = str(read.get("tid"))
        begin = read["ts"]
        return bisect_left(begins, (tid, begin)) < bisect_right(begins, (tid, begin + read["dur"]))

    reads = (event for event in events if event.get("cat") in OPERATORS and event["name"] == HOST_READ)
    waiting = (*waits, *filter(is_waiting, reads))
    calls = (_Call(event["name"], window.step(event["ts"]), event["dur"]) for event in waiting)
    return [call for call in calls if call.step >= 0]


def _on_gpu(
    events: Sequence[dict[str, Any]], window: _Window, spans: _Spans
) -> tuple[list[_Call], StepSplit]:
    """Return every kernel and copy in the steps, and the split of the device's time."""
    kernels = _kernels(events, window)
    ours = [kernel for kernel in kernels if kernel.step >= 0]
    if not ours:
        raise ReportError(
            "the trace has no GPU kernel: is the GPU's profiling interface (CUPTI) already in use?"
        )
    begin, end = _device_window(kernels, ours, window)
    optimizers = union(spans.optimizer)
    done = _Spans(spans.data)
    done.unseen = [kernel.span for kernel in kernels if kernel.stream is not None and not kernel.is_seen]
    for kernel in kernels:
        collective = _NCCL.search(kernel.name)
        if collective is not None:
            # `AllGather` becomes `all_gather`, the name used in counts.
            kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", collective[1]).lower()
            done.communication[kind].append(kernel.span)
        else:
            is_optimizer = holds(optimizers, kernel.launched_at)
            (done.optimizer if is_optimizer else done.compute).append(kernel.span)
    calls = [_Call(kernel.name, kernel.step, length([kernel.span])) for kernel in ours]
    return calls, _split(done, begin, end, window.steps, on_gpu=True)


def _device_window(kernels: Sequence[_Kernel], ours: Sequence[_Kernel], window: _Window) -> Span:
    """Return when the steps begin and end on the device, in the stream that computes most.

    Other streams, such as streams for copies, can be ahead of this stream.
    """
    busy = defaultdict[Any, float](float)
    for kernel in ours:
        if kernel.stream is not None:
            busy[kernel.stream] += length([kernel.span])
    most = max(busy, key=busy.__getitem__, default=None)
    of_most = [kernel for kernel in kernels if most is None or kernel.stream == most]
    later = [kernel.span[0] for kernel in of_most if kernel.launched_at >= window.starts[-1]]
    begin = min(kernel.span[0] for kernel in of_most if kernel.step >= 0)
    return begin, min(later, default=max(kernel.span[1] for kernel in ours))


def _kernels(events: Sequence[dict[str, Any]], window: _Window) -> list[_Kernel]:
    """Return the device's events with their launch times. Events launched before the trace have no step."""
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    of_threads = defaultdict[str, list[Span]](list)
    for event in events:
        if event.get("cat") == OPERATOR:
            of_threads[str(event.get("tid"))].append(_span(event))
    operators = {thread: union(intervals) for thread, intervals in of_threads.items()}

    def is_seen(launch: dict[str, Any]) -> bool:
        running = operators.get(str(launch.get("tid")), [])
        return GRAPH_LAUNCH not in launch["name"] and holds(running, launch["ts"])

    def kernel(event: dict[str, Any]) -> _Kernel:
        computes = event["cat"] == "kernel" and not _NCCL.search(event["name"])
        launch = launches.get(event.get("args", {}).get("correlation"))
        launched_at = float("-inf") if launch is None else launch["ts"]
        return _Kernel(
            name=_kernel_name(event["name"]),
            step=window.step(launched_at),
            span=_span(event),
            launched_at=launched_at,
            stream=event.get("tid") if computes else None,
            is_seen=launch is None or is_seen(launch),
        )

    return [kernel(event) for event in events if event.get("cat") in ON_DEVICE]


def _kernel_name(name: str) -> str:
    """Strip the parameters from a name: `void add<float, (Mode)0>(int)` becomes `add<float, (Mode)0>`."""
    if name.startswith("Mem"):
        return name
    short = name.removeprefix("void ").replace("(anonymous namespace)", "anonymous")
    short = _of_all(short[: _parameters(short)].strip())
    mark = f"~{documents.digest(short, 8)}"
    return short if len(short) <= LONGEST_NAME else short[: LONGEST_NAME - len(mark)] + mark


def _parameters(name: str) -> int:
    """Return the index of the opening parenthesis of a trailing argument list, or the name's length."""
    depth = 0
    for at in reversed(range(len(name))):
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if depth == 0:
            return at if name[at] == "(" else len(name)
    return len(name)


def _work(calls: Iterable[_Call], steps: int) -> tuple[Work, ...]:
    """Sum up the calls by name, longest time first."""
    us = defaultdict[str, list[float]](list)
    for call in calls:
        us[call.name].append(max(call.us, 0))
    return longest_first(
        Work(name=name, calls=round(len(its) / steps, 3), us=_a_step(sum(its), steps))
        for name, its in us.items()
    )


def _unsteady(calls: Iterable[_Call], steps: int) -> set[str]:
    """Return the names that are not called equally often in every step."""
    in_steps = Counter((call.name, call.step) for call in calls)
    return {name for name, step in in_steps if len({in_steps[name, number] for number in range(steps)}) > 1}


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _a_step(us: float, steps: int) -> float:
    return round(us / steps, 1)
