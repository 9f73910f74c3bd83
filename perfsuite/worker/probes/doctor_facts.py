"""The measurements of `worker.probes.doctor_probe`, as a file for the driver."""

from typing import Literal

from perfsuite.documents import Data, Document
from perfsuite.results.rank_report import Memory


class ClockFacts(Data):
    """One training loop, timed in several ways: in seconds per step, or as ratios of neighbouring blocks."""

    overhead: tuple[float, ...]  # mean step under the clock over the mean bare step, one ratio per pair
    # Sum of the steps that the clock saw over the host clock's time for the same steps, one ratio per pair.
    wall: tuple[float, ...]
    step_s: float  # median step under the clock
    # On a GPU: time per step from the first kernel's start to the last one's end, in torch's profiler.
    profiler_s: float | None = None


class DoctorFile(Document):
    """The file that the probe writes. The fields of a training are set only if one was requested and ran."""

    schema_version: Literal[1] = 1
    devices: int = 0  # number of GPUs that torch can use
    nccl: str | None = None
    error: str | None = None  # why torch can use none, in the words of torch or the driver
    clock: ClockFacts | None = None
    memory: Memory | None = None  # the peak that perfsuite reads
    expected_peak: int = 0  # what that peak should be after the allocation, in bytes
