"""What `worker.probes.doctor_probe` measures, as a file for the driver."""

from typing import Literal

from perfsuite.documents import Data, Document
from perfsuite.results.rank_report import Memory


class ClockFacts(Data):
    """One training loop, timed in several ways: in seconds per step, or as ratios of neighbouring blocks."""

    overhead: tuple[float, ...]  # mean step under the clock over the mean bare step, one ratio a pair
    # Sum of the steps that the clock saw over the host's clock for the same steps, one ratio a pair.
    wall: tuple[float, ...]
    step_s: float  # median step under the clock
    # On a GPU: from the first kernel's start to the last one's end by torch's profiler, per step.
    profiler_s: float | None = None


class DoctorFile(Document):
    """What the process writes: of a training only if one was asked for and could be made."""

    schema_version: Literal[1] = 1
    devices: int = 0  # GPUs that torch reaches
    nccl: str | None = None
    error: str | None = None  # why it reaches none, in the words of torch or the driver
    clock: ClockFacts | None = None
    memory: Memory | None = None  # the peak that perfsuite reads
    expected_peak: int = 0  # the peak after what was allocated, in bytes
