"""`perfsuite doctor`: does this machine measure truly? Each check is a row, with what to do where it fails.

The quick part looks at the machine and imports torch once in a process of its own. The rest trains: the clock
beside the host's and the profiler's, then a few launches of a small case on every device, for their noise.
Driver side; imports neither torch nor pytest.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

from perfsuite import documents
from perfsuite.case.hardware import Machine
from perfsuite.cli.selftest import small_case
from perfsuite.documents import Data
from perfsuite.errors import FileError
from perfsuite.launch.nvml import Gpus
from perfsuite.launch.quiet import Neighbours
from perfsuite.measure import Reference, measure
from perfsuite.results import baseline
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import DeviceHealth, Run
from perfsuite.results.run_dir import launches_in
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.sequential import Noise, minimum_detectable_drop
from perfsuite.worker.doctor_probe import ClockFacts, DoctorFile, MemoryFacts, TorchFacts

Status = Literal["pass", "fail", "unknown"]

LAUNCHES = 5
REVIEWED_LAUNCHES, REVIEWED_DEGREES = 10, 30
"""A reviewed baseline's launches, and the degrees of freedom of the noise that a few such baselines tell."""
PROBE_TIMEOUT_S = 600
WALL_AGREES = 0.01
"""The steps' sum beside the host's clock over the same steps."""
PROFILER_AGREES = 0.03
"""The median step beside the profiler's: the profiler itself slows a step down a little."""
OVERHEAD = 0.01
"""Of a step's time that measuring may add."""
PEAK_AGREES = 0.05
"""On a CPU memory comes in pages, and other parts of the process allocate, too."""
DEVICES_AGREE = 0.10
"""By how much the slowest GPU may stay behind the fastest in the same piece of work."""
SHARE_OF_PEAK = 0.4
"""Of the data sheet's dense peak, in a 4096 x 4096 product: what any healthy card exceeds."""
SHARED_MEMORY_BYTES = 2**30
"""In /dev/shm: NCCL's ranks on one machine talk through it, and a container gets 64 MiB by default."""


class Row(Data):
    """One check."""

    check: str
    status: Status
    found: str
    advice: str | None = None
    """What to do, where it did not pass."""


def examine(machine: Machine, *, quick: bool, say: Callable[[str], None] = lambda told: None) -> list[Row]:
    """All checks of `machine`. `say` is told what is being done now, as that may take minutes."""
    rows = [machine_row(machine), *system_rows(machine), *gpu_rows(machine), neighbours_row(machine)]
    say("importing torch" if quick else "training a small model in one process, bare and under the clock")
    probed = _probe(machine, quick=quick)
    if isinstance(probed, Row):
        return [*rows, probed]
    rows += torch_rows(probed.torch, machine)
    if probed.memory is not None:
        rows.append(memory_row(probed.memory))
    if probed.clock is not None:
        rows += clock_rows(probed.clock)
    if not quick and not any(row.check == "torch and GPUs" and row.status == "fail" for row in rows):
        rows += launch_rows(machine, say)
    return rows


def _mhz(card: DeviceHealth) -> str | None:
    if card.sm_clock_limit_mhz is None:
        return None
    locked = "" if card.sm_clock_set_mhz is None else f", application clock {card.sm_clock_set_mhz:.0f} MHz"
    return f"SM up to {card.sm_clock_limit_mhz:.0f} MHz{locked}"


def _on(flag: bool | None) -> str | None:
    return None if flag is None else "on" if flag else "off"


def machine_row(machine: Machine) -> Row:
    """What it is, and what could not be found out about it."""
    what = "GPUs" if machine.device == "cuda" else "cores"
    found = f"{machine.hardware_class}: {machine.devices} {what}, {machine.device_name}"
    if machine.device == "cuda" and machine.note is not None:
        return Row(check="machine", status="unknown", found=found, advice=machine.note)
    return Row(check="machine", status="pass", found=found)


def system_rows(machine: Machine, *, root: Path = Path("/")) -> list[Row]:
    """Limits and permissions of this process, from /proc and /sys under `root`."""
    rows = [_cores_row(root), _peak_reset_row(root), _ptrace_row(root)]
    if machine.device == "cuda" and machine.devices > 1:
        rows.append(_shared_memory_row(root))
    return rows


def _cores_row(root: Path) -> Row:
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return Row(check="cores", status="pass", found=f"{cores}, and no limit of a cgroup is to be seen")
    if quota == "max" or int(quota) >= cores * int(period):
        return Row(check="cores", status="pass", found=f"{cores}, all of their time")
    return Row(
        check="cores",
        status="fail",
        found=f"{cores} cores are visible, and a cgroup grants the time of {int(quota) / int(period):.1f}",
        advice="start the container with whole cores (--cpuset-cpus) in place of a share of their time: "
        "a process that has used its share stands still until the next period",
    )


def _peak_reset_row(root: Path) -> Row:
    file = root / "proc/self/clear_refs"
    if os.access(file, os.W_OK):
        return Row(check="peak memory reset", status="pass", found=f"{file} can be written")
    return Row(
        check="peak memory reset",
        status="fail",
        found=f"{file} cannot be written: peaks on a CPU hold what building the model needed",
        advice="run in a container whose /proc is not read-only, or compare GPU memory alone",
    )


def _ptrace_row(root: Path) -> Row:
    try:
        scope = int((root / "proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope == 0 or (os.geteuid() == 0 and scope < 3):
        return Row(check="ptrace", status="pass", found=f"allowed (ptrace_scope {scope})")
    return Row(
        check="ptrace",
        status="unknown",
        found=f"limited (ptrace_scope {scope})",
        advice="nothing, unless you attach py-spy or gdb by hand: the stacks of a hang need no ptrace",
    )


def _shared_memory_row(root: Path) -> Row:
    try:
        space = os.statvfs(root / "dev/shm")
    except OSError as error:
        return Row(check="shared memory", status="unknown", found=f"/dev/shm: {error.strerror}")
    size = space.f_blocks * space.f_frsize
    if size >= SHARED_MEMORY_BYTES:
        return Row(check="shared memory", status="pass", found=f"/dev/shm holds {size / 2**30:.0f} GiB")
    return Row(
        check="shared memory",
        status="fail",
        found=f"/dev/shm holds {size / 2**20:.0f} MiB",
        advice="NCCL needs more: start the container with --ipc=host or --shm-size=8g",
    )


def gpu_rows(machine: Machine, nvml: Any | None = None) -> list[Row]:
    """How the GPUs are set up, and what is wrong with a card, by NVML (`pynvml`, or what is handed in)."""
    if machine.device == "cpu":
        return []
    if nvml is None:
        nvml = importlib.import_module("pynvml")
    gpus = Gpus(nvml, machine.devices, NoJob())
    cards = gpus.cards(gpus.used_bytes())
    notes = gpus.notes()
    gpus.finish()
    if len(cards) < machine.devices:
        return [Row(check="NVML", status="unknown", found="; ".join(notes), advice="ask nvidia-smi why")]
    faults = Row(check="GPU hardware", status="fail", found="; ".join(notes), advice="see to the card first")
    return [
        faults
        if notes
        else Row(check="GPU hardware", status="pass", found="no fault is known to the driver"),
        _power_row(cards),
        _alike_row("clocks", [_mhz(card) for card in cards]),
        _alike_row("ECC", [_on(card.ecc) for card in cards]),
        _alike_row("persistence mode", [_on(card.persistence) for card in cards]),
    ]


class NoJob:
    """Nothing is launched while the machine is looked at."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def scan(self) -> None:
        """There is nothing to find."""


def _power_row(cards: Sequence[DeviceHealth]) -> Row:
    known = [(card.name, card.power_limit_w, card.power_limit_default_w) for card in cards]
    low = [
        f"{name} is limited to {limit:.0f} W, its default is {usual:.0f} W"
        for name, limit, usual in known
        if limit is not None and usual is not None and limit < usual
    ]
    if low:
        advice = "raise it (nvidia-smi -pl) before baselines are recorded: it sets how fast these GPUs train"
        return Row(check="power limit", status="fail", found="; ".join(low), advice=advice)
    told = sorted({f"{limit:.0f} W" for _, limit, _ in known if limit is not None})
    if not told:
        return Row(check="power limit", status="unknown", found="NVML does not tell it")
    return Row(check="power limit", status="pass", found=", ".join(told))


def _alike_row(what: str, values: Sequence[str | None]) -> Row:
    told = {value for value in values if value is not None}
    if not told:
        return Row(check=what, status="unknown", found="NVML does not tell it")
    if len(told) == 1:
        return Row(check=what, status="pass", found=told.pop())
    each = ", ".join(f"GPU {index}: {value or 'unknown'}" for index, value in enumerate(values))
    advice = "set all GPUs alike: the slowest one sets the pace of a step"
    return Row(check=what, status="fail", found=each, advice=advice)


def neighbours_row(machine: Machine, neighbours: Neighbours | None = None) -> Row:
    """Who else uses the cores, or holds memory of the GPUs, now."""
    seen = Neighbours(say=_say_nothing, show=_say_nothing) if neighbours is None else neighbours
    if not (found := seen.look(machine, machine.devices)):
        return Row(check="other processes", status="pass", found="none uses the machine")
    advice = "end them, or measure at another hour: launches beside them are set aside"
    return Row(check="other processes", status="fail", found="; ".join(found), advice=advice)


def _say_nothing(told: str) -> None:
    """Whatever is told stands in the row."""


def _probe(machine: Machine, *, quick: bool) -> DoctorFile | Row:
    with tempfile.TemporaryDirectory(prefix="perfsuite-doctor-") as directory:
        file = Path(directory) / "probe.json"
        words = [sys.executable, "-m", "perfsuite.worker.doctor_probe", str(file), machine.device]
        try:
            ended = subprocess.run(
                [*words, *(["--quick"] * quick)],
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=False,
            )
            return documents.read(file, DoctorFile)
        except subprocess.TimeoutExpired:
            said = f"no answer in {PROBE_TIMEOUT_S} s"
        except FileError:
            said = (ended.stderr.strip().splitlines() or [f"it ended with status {ended.returncode}"])[-1]
    return Row(
        check="torch",
        status="fail",
        found=f"a process that imports torch and trains failed: {said}",
        advice=f"run it yourself: {' '.join(words[:3])} /tmp/probe.json {machine.device}",
    )


def torch_rows(torch: TorchFacts, machine: Machine) -> list[Row]:
    """Whether the installed torch, the driver and the GPUs fit together."""
    build = "without CUDA" if torch.cuda is None else f"for CUDA {torch.cuda}"
    rows = [Row(check="torch", status="pass", found=f"{torch.version}, built {build}")]
    if machine.device == "cpu":
        return rows
    if torch.devices == machine.devices:
        found = f"torch reaches {torch.devices} GPUs, driver {machine.driver}, NCCL {torch.nccl}"
        return [*rows, Row(check="torch and GPUs", status="pass", found=found)]
    said = torch.error or f"torch reaches {torch.devices} GPUs"
    return [
        *rows,
        Row(
            check="torch and GPUs",
            status="fail",
            found=f"NVML sees {machine.devices} GPUs (driver {machine.driver}), {said}",
            advice="install a torch for a CUDA that this driver knows (pip install torch), or a newer driver",
        ),
    ]


def memory_row(memory: MemoryFacts) -> Row:
    """The peak that perfsuite reads beside what was allocated."""
    mib = f"read {memory.read / 2**20:.1f} MiB of {memory.expected / 2**20:.1f} ({memory.method})"
    if abs(memory.read - memory.expected) <= PEAK_AGREES * memory.expected:
        return Row(check="peak memory", status="pass", found=mib)
    return Row(
        check="peak memory",
        status="fail",
        found=mib,
        advice="do not trust memory figures of this machine; look at the row above, and report it",
    )


def clock_rows(clock: ClockFacts) -> list[Row]:
    """The clock beside the host's and the profiler's, and what measuring costs."""
    apart = median(clock.wall) - 1
    agrees = abs(apart) <= WALL_AGREES
    rows = [
        Row(
            check="clock",
            status="pass" if agrees else "fail",
            found=f"the steps sum to the host's clock {apart:+.2%} (median of {len(clock.wall)} blocks)",
            advice=None
            if agrees
            else "times of this machine are not to be trusted: look at its clock source",
        )
    ]
    if clock.profiler_s is not None:
        apart = clock.step_s / clock.profiler_s - 1
        agrees = abs(apart) <= PROFILER_AGREES
        rows.append(
            Row(
                check="clock and profiler",
                status="pass" if agrees else "fail",
                found=f"median step {1e3 * clock.step_s:.2f} ms, by the profiler {apart:+.1%}",
                advice=None if agrees else "look at a trace of one step (torch.profiler) before a night",
            )
        )
    low, middle, high = (ratio - 1 for ratio in quantiles(clock.overhead, n=4, method="inclusive"))
    status: Status = "pass" if abs(middle) <= OVERHEAD else "unknown" if low <= OVERHEAD else "fail"
    rows.append(
        Row(
            check="cost of measuring",
            status=status,
            found=f"{middle:+.1%} of a step (middle half {low:+.1%} to {high:+.1%})",
            advice={
                "pass": None,
                "unknown": "the machine scatters too much to tell: look again when it is quiet",
                "fail": f"measuring costs more than {OVERHEAD:.0%} of these short steps: take longer ones",
            }[status],
        )
    )
    return rows


def launch_rows(machine: Machine, say: Callable[[str], None]) -> list[Row]:
    """A few launches of a small case on every device: rates, health, noise, and what the gate can find."""
    case = small_case(machine)
    with tempfile.TemporaryDirectory(prefix="perfsuite-doctor-") as directory:
        runs, verdict = measure(
            case,
            machine,
            Path(directory),
            Reference(policy=Policy(record_launches=LAUNCHES)),
            on_launch=lambda number: say(f"launch {number} of {case.id}"),
        )
        files = [file for launch in launches_in(Path(directory)) for file in launch.all_ranks()]
        reports = [documents.read(file, RankReport) for file in files]
    rows = device_rows(reports, machine)
    return [*rows, well_row(runs, verdict), noise_row(runs, verdict, machine)]


def device_rows(reports: Sequence[RankReport], machine: Machine) -> list[Row]:
    """Rates of the GPUs in the same pieces of work: the slowest beside the fastest, or beside its data sheet.

    Ranks on a CPU share its cores, so that their rates say nothing of a device.
    """
    if machine.device == "cpu":
        return []
    rows = []
    for name in sorted({name for report in reports for name in report.device_probe}):
        by_rank: dict[int, list[float]] = {}
        for report in reports:
            if name in report.device_probe:
                by_rank.setdefault(report.rank, []).append(report.device_probe[name])
        rows.append(_device_row(name, {rank: median(values) for rank, values in by_rank.items()}, machine))
    return rows


def _device_row(name: str, rates: dict[int, float], machine: Machine) -> Row:
    lowest, highest = min(rates.values()), max(rates.values())
    rank = next(rank for rank, rate in rates.items() if rate == lowest)
    found = f"{lowest:.4g} to {highest:.4g} over {len(rates)} GPUs" if len(rates) > 1 else f"{lowest:.4g}"
    if (behind := 1 - lowest / highest) > DEVICES_AGREE:
        advice = (
            f"GPU {rank} is {behind:.0%} slower than the fastest: look at its clocks, its power limit, its "
            "link, and who else uses it"
        )
        return Row(check=name, status="fail", found=found, advice=advice)
    peak = machine.peak_flops("bf16") if name == "matmul_tflops" else None
    if peak is not None:
        share = lowest * 1e12 / peak
        found += f", {share:.0%} of the data sheet's peak"
        if share < SHARE_OF_PEAK:
            advice = f"at least {SHARE_OF_PEAK:.0%} is usual: look at clocks, power limit and temperature"
            return Row(check=name, status="fail", found=found, advice=advice)
    elif len(rates) == 1:
        advice = (
            "there is no other GPU here to compare it with: compare it with another machine of this class"
        )
        return Row(check=name, status="unknown", found=found, advice=advice)
    return Row(check=name, status="pass", found=found)


def well_row(runs: Sequence[Run], verdict: Verdict) -> Row:
    """Whether the launches were measured, on a machine that was well."""
    if verdict.outcome == "recorded" and not verdict.unhealthy_launches:
        return Row(check="launches", status="pass", found=f"{len(runs)} measured, the machine was well")
    return Row(
        check="launches",
        status="fail",
        found="; ".join(verdict.reasons) or verdict.outcome,
        advice="see to it before the night: such launches are set aside, and verdicts need others",
    )


def noise_row(runs: Sequence[Run], verdict: Verdict, machine: Machine) -> Row:
    """How far the launches scatter, the change that the gate finds then, and so the tolerance it can hold."""
    healthy = [run for run in verdict.healthy(runs) if run.failure is None]
    known = class_noise([baseline.from_runs(healthy)]).of(TOKENS_PER_S) if len(healthy) > 2 else None
    if known is None:
        found = f"{len(healthy)} launches are too few to tell it"
        return Row(check="noise", status="unknown", found=found, advice="look again when it is quiet")
    now = minimum_detectable_drop(noise=known, baseline_launches=len(healthy))
    later = minimum_detectable_drop(
        noise=Noise(sigma=known.sigma, degrees_of_freedom=REVIEWED_DEGREES),
        baseline_launches=REVIEWED_LAUNCHES,
    )
    allowed = TOKENS_PER_S.tolerance(machine.device)
    found = (
        f"{known.sigma:.2%} between launches, so drops of {now:.1%} are found now and of {later:.1%} with "
        f"reviewed baselines of {REVIEWED_LAUNCHES} launches; tokens/s may drop by {allowed:.0%}"
    )
    if later <= allowed:
        return Row(check="noise", status="pass", found=found)
    advice = (
        f"this machine deserves a tolerance of {later:.0%} or more, and verdicts below that are called "
        "blind: lock the clocks, keep others off, or take longer steps"
    )
    return Row(check="noise", status="fail", found=found, advice=advice)
