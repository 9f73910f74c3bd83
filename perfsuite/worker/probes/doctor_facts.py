"""The measurements of `worker.probes.doctor_probe`, as a file for the driver."""

from typing import Literal

from perfsuite.documents import Data, Document
from perfsuite.results.rank_report import Memory


class ClockFacts(Data):
    """The timings of one training loop: seconds per step, or ratios of neighbouring blocks of steps."""

    # Mean step time with the clock, divided by the mean step time without it. One ratio per pair of blocks.
    overhead: tuple[float, ...]
    # Sum of the measured step times, divided by the host clock's time for these steps. One ratio per pair.
    wall: tuple[float, ...]
    step_s: float  # median step time with the clock
    # Seconds per step in torch's profiler, from the start of the first kernel to the end of the last.
    # None on a CPU.
    profiler_s: float | None = None


class DoctorFile(Document):
    """The file that the probe writes. `clock` and the memory fields are not set by a quick check."""

    schema_version: Literal[1] = 1
    devices: int = 0  # number of GPUs that torch can use
    nccl: str | None = None
    error: str | None = None  # the error message of torch or the driver if torch cannot use any GPU
    # The first GPU on which a kernel of torch does not run, with the error message. None: it runs on all.
    kernel_error: str | None = None
    clock: ClockFacts | None = None
    memory: Memory | None = None  # the peak memory that perfsuite read after allocating a block
    expected_peak: int = 0  # the correct value of that peak, in bytes
