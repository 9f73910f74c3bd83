"""Check in a separate process that torch, its clock and its memory counters are reliable here."""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from perfsuite import documents
from perfsuite.analysis.health import advice_on, hardware_fault
from perfsuite.case import torch_build
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, checked, failed, passed, unknown
from perfsuite.errors import FileError, error_text
from perfsuite.frameworks.base import missing_package
from perfsuite.results.rank_report import Memory
from perfsuite.worker.probes.doctor_facts import ClockFacts, DoctorFile

PROBE_TIMEOUT_S = 600  # deadline of the process that imports torch and trains
# Maximum relative difference between the sum of the step times and the host's clock.
MAX_WALL_DIFFERENCE = 0.01
# Maximum relative difference between the median step time and the profiler's, which is slightly longer.
MAX_PROFILER_DIFFERENCE = 0.03
MAX_OVERHEAD = 0.01  # maximum share of a step's time that measuring may add
# Maximum relative difference in peak memory. On a CPU, the peak covers whole pages of the whole process.
MAX_PEAK_DIFFERENCE = 0.05


def probe(machine: Machine, *, quick: bool) -> DoctorFile | Row:
    """Import torch and train in a separate process.

    Returns the measurements of that process. If the process failed or could not be started, returns the row
    of the check instead.
    """
    problem = torch_build.wrong_build(machine)
    if problem is not None:
        return failed("torch", problem)
    if not quick:
        missing = missing_package("transformers")
        if missing is not None:
            return unknown(
                "torch",
                f"the check cannot run: {missing}",
                "run the command above, then perfsuite doctor again",
            )
    with tempfile.TemporaryDirectory(prefix="perfsuite-doctor-") as directory:
        file = Path(directory) / "probe.json"
        words = [sys.executable, "-m", "perfsuite.worker.probes.doctor_probe", str(file), machine.device]
        command = [*words, *(["--quick"] * quick)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
            return documents.read(file, DoctorFile)
        except subprocess.TimeoutExpired:
            said = f"no answer in {PROBE_TIMEOUT_S} s"
        except OSError as error:
            said = error_text(error)
        except FileError:
            said = (ended.stderr.strip().splitlines() or [f"it ended with status {ended.returncode}"])[-1]
    return failed(
        "torch",
        f"the process that tries torch failed: {said}",
        f"run it yourself: {' '.join(words[:3])} /tmp/probe.json {machine.device}",
    )


def torch_rows(probed: DoctorFile, machine: Machine) -> list[Row]:
    """Check that the installed torch, the driver and the GPUs work together."""
    rows = [passed("torch", torch_build.summary())]
    if machine.device == "cpu":
        return rows
    reached = f"torch reaches {probed.devices} GPUs"
    check = "torch and GPUs"
    if probed.kernel_error is not None:
        fault = hardware_fault(probed.kernel_error)
        advice = "end the processes that use this GPU (nvidia-smi), then run perfsuite doctor again"
        if "no kernel image" in probed.kernel_error:
            advice = (
                "install a torch that is built for these cards (torch.cuda.get_arch_list() lists the "
                "architectures for which the installed torch is built)"
            )
        elif fault is not None:
            advice = advice_on(fault)
        return [*rows, failed(check, f"{reached}, but runs no kernel on {probed.kernel_error}", advice)]
    if probed.devices == machine.devices:
        return [*rows, passed(check, f"{reached}, driver {machine.driver}, NCCL {probed.nccl}")]
    observed = f"NVML sees {machine.devices} GPUs (driver {machine.driver}), {probed.error or reached}"
    advice = (
        "install torch for a CUDA version that this driver supports (pip install torch), or a newer driver"
    )
    return [*rows, failed(check, observed, advice)]


def memory_row(memory: Memory, expected: int) -> Row:
    """Compare the peak memory that perfsuite has read with the `expected` peak. Both are in bytes."""
    return checked(
        "peak memory",
        f"{memory.peak / 2**20:.1f} MiB, expected {expected / 2**20:.1f} MiB ({memory.method})",
        ok=abs(memory.peak - expected) <= MAX_PEAK_DIFFERENCE * expected,
        advice="do not trust memory figures from this machine: check the torch rows above, and report the "
        "wrong peak to perfsuite's developers",
    )


def clock_rows(clock: ClockFacts) -> list[Row]:
    """Compare perfsuite's clock with the host's and the profiler's, and check the cost of measuring."""
    difference = median(clock.wall) - 1
    rows = [
        checked(
            "clock",
            f"the sum of the steps differs from the host's clock by {difference:+.2%} "
            f"(median of {len(clock.wall)} blocks)",
            ok=abs(difference) <= MAX_WALL_DIFFERENCE,
            advice="do not trust times from this machine: check its clock source",
        )
    ]
    if clock.profiler_s is not None:
        difference = clock.step_s / clock.profiler_s - 1
        rows.append(
            checked(
                "clock and profiler",
                f"median step {1e3 * clock.step_s:.2f} ms, {difference:+.1%} compared with the profiler",
                ok=abs(difference) <= MAX_PROFILER_DIFFERENCE,
                advice="look at a trace of one step (torch.profiler) before a nightly run",
            )
        )
    return [*rows, _overhead_row(clock)]


def _overhead_row(clock: ClockFacts) -> Row:
    low, middle, high = (ratio - 1 for ratio in quantiles(clock.overhead, n=4, method="inclusive"))
    check = "cost of measuring"
    observed = f"{middle:+.1%} of a step (interquartile range {low:+.1%} to {high:+.1%})"
    if abs(middle) <= MAX_OVERHEAD:
        return passed(check, observed)
    if low <= MAX_OVERHEAD:  # at least a quarter of the blocks is below the limit
        return unknown(check, observed, "the machine is too noisy to decide: check again when it is quiet")
    advice = (
        f"measuring costs more than {MAX_OVERHEAD:.0%} of these short steps: use cases whose steps are longer"
    )
    return failed(check, observed, advice)
