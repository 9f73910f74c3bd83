"""What `perfsuite.worker.doctor_probe` measures, as a file for the driver. Imports no torch."""

from __future__ import annotations

from typing import Literal

from perfsuite.documents import Data, Document


class TorchFacts(Data):
    """What the installed torch says of itself and of the devices that it reaches."""

    version: str
    cuda: str | None
    """The CUDA version that it was built with; None for a build without."""
    nccl: str | None
    devices: int
    """GPUs that it reaches."""
    error: str | None = None
    """Why it reaches none, in the words of torch or the driver."""


class ClockFacts(Data):
    """One training loop, timed in several ways: in seconds per step, or as ratios of neighbouring blocks."""

    overhead: tuple[float, ...]
    """Mean step under the clock over the mean bare step, one ratio a pair."""
    wall: tuple[float, ...]
    """Sum of the steps that the clock saw over the host's clock for the same steps, one ratio a pair."""
    step_s: float
    """Median step under the clock."""
    profiler_s: float | None = None
    """On a GPU: from the first kernel's start to the last one's end by torch's profiler, per step."""


class MemoryFacts(Data):
    """Bytes that were allocated, and the peak that perfsuite reads."""

    expected: int
    read: int
    method: str


class DoctorFile(Document):
    """What the process writes. A part is None where it was not asked for or could not be done."""

    schema_version: Literal[1] = 1
    torch: TorchFacts
    clock: ClockFacts | None = None
    memory: MemoryFacts | None = None
