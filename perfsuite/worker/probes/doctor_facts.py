"""The measurements of `worker.probes.doctor_probe`, as a file for the process that started the probe."""

from typing import Literal

from perfsuite.documents import Data, Document
from perfsuite.results.rank_report import Memory


class ClockFacts(Data):
    """The timings of one training loop.

    It is run in pairs of blocks of steps: one block with perfsuite's clock and one without.
    """

    # For each pair of blocks: mean step time with perfsuite's clock, divided by the mean without it.
    overhead: tuple[float, ...]
    # For each block with perfsuite's clock: sum of the measured step times, divided by the host clock's time
    # for these steps.
    wall: tuple[float, ...]
    step_s: float  # median step time with the clock
    # Seconds per step according to torch's profiler, from the start of the first kernel to the end of the
    # last one. None on a CPU.
    profiler_s: float | None = None


class DoctorFile(Document):
    """The file that the probe writes. In a quick check, `clock` and the fields about memory are not set."""

    schema_version: Literal[1] = 1
    devices: int = 0  # number of GPUs that torch can use
    nccl: str | None = None
    error: str | None = None  # if torch cannot use any GPU: the error message of torch or of the GPU's driver
    # The first GPU on which torch cannot run a kernel, with the error message. None: kernels run on all GPUs.
    kernel_error: str | None = None
    clock: ClockFacts | None = None
    memory: Memory | None = None  # the peak memory that perfsuite read after allocating a block
    expected_peak: int = 0  # the correct value of that peak, in bytes
