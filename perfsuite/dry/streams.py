"""Simulate CUDA's streams and events. Nothing waits, but a log records what would wait. Imports torch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from perfsuite.results.device_log import DeviceLog, HostWait, StreamWait

CUDA = 1  # the number of this type of device in `c10::DeviceType`


class SimulatedStream:
    """Replaces `torch.cuda.Stream`. A subclass sets the log."""

    log: DeviceLog
    device = torch.device("cuda", 0)
    device_index = 0
    device_type = CUDA
    priority = 0

    def __init__(self, *args: Any, number: int | None = None, **kwargs: Any) -> None:
        self.number = self.log.new_stream() if number is None else number
        self.cuda_stream = self.stream_id = self.native_handle = self.number
        self._outer: list[int] = []  # the streams that were current when this stream was entered

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority of a stream on GPUs such as the H100."""
        return 0, -5

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new event, in this stream."""
        event = SimulatedEvent.of(self.log) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Wait for an event, if it was recorded."""
        number = getattr(event, "number", None)
        if number is not None:
            self.log.add(StreamWait(self.number, number))

    def wait_stream(self, stream: Any) -> None:
        """Wait for the work that another stream has been given so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        self.log.add(HostWait(self.log.record_event(self.number)))

    def query(self) -> bool:
        """Return True, because nothing takes time."""
        return True

    def is_capturing(self) -> bool:
        """Return False, because CUDA graphs are not simulated."""
        return False

    def __enter__(self) -> SimulatedStream:
        self._outer.append(self.log.stream)
        self.log.stream = self.number
        return self

    def __exit__(self, *error: object) -> None:
        self.log.stream = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SimulatedStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


class SimulatedEvent:
    """Replaces `torch.cuda.Event`. A subclass sets the log."""

    log: DeviceLog
    device = torch.device("cuda", 0)
    cuda_event = event_id = 0  # handles, which only code in C++ could use
    number: int | None = None  # number of the latest record of this event in the log

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def of(cls, log: DeviceLog) -> SimulatedEvent:
        """Return a new event of a log."""
        event = cls()
        event.log = log
        return event

    def record(self, stream: Any = None) -> SimulatedEvent:
        """Record this event in `stream`, or in the current stream. Returns the event, for chained calls."""
        self.number = self.log.record_event(self.log.stream if stream is None else stream.number)
        return self

    def wait(self, stream: Any = None) -> None:
        """Let `stream`, or the current stream, wait for this event."""
        if self.number is not None:
            self.log.add(StreamWait(self.log.stream if stream is None else stream.number, self.number))

    def synchronize(self) -> None:
        """Let the host wait for this event."""
        if self.number is not None:
            self.log.add(HostWait(self.number))

    def query(self) -> bool:
        """Return True, because nothing takes time."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Return 0, because nothing takes time."""
        return 0.0


def stand_ins(log: DeviceLog) -> dict[str, Any]:
    """Return stand-ins for the names in `torch.cuda` that have to do with streams."""
    stream_class: Any = type("Stream", (SimulatedStream,), {"log": log})
    event_class: Any = type("Event", (SimulatedEvent,), {"log": log})

    def current_stream(*args: Any, **kwargs: Any) -> Any:
        return stream_class(number=log.stream)

    def set_stream(stream: Any) -> None:
        if stream is not None:
            log.stream = stream.number

    def enter(stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else stream

    return {
        "Stream": stream_class,
        "Event": event_class,
        "stream": enter,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": lambda *args, **kwargs: stream_class(number=0),
        "synchronize": lambda *args, **kwargs: log.add(HostWait(None)),
    }
