"""Checks whether a machine measures correctly. Each check is a row, with what to do if it fails.

The quick part looks at the machine, and imports torch once in a separate process. The rest trains: it
compares perfsuite's clock with the host's and the profiler's, then makes a few launches of a small case on
every device and estimates their noise. Driver side; imports neither torch nor pytest.
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

from perfsuite import documents, extensions
from perfsuite.case.framework import built_in
from perfsuite.case.framework import load as load_framework
from perfsuite.case.hardware import Machine
from perfsuite.cli.selftest_faults import small_case
from perfsuite.documents import Data
from perfsuite.errors import FileError
from perfsuite.extensions import BUILT_IN_LAUNCHERS, FRAMEWORKS, GROUPS, LAUNCHERS, METRICS
from perfsuite.frameworks.base import missing_package
from perfsuite.launch.job import JobProcesses
from perfsuite.launch.nvml import Gpus
from perfsuite.launch.quiet import Neighbours
from perfsuite.measure import Reference, measure
from perfsuite.report.progress import silent
from perfsuite.report.text import plural
from perfsuite.results import baseline, metric
from perfsuite.results.health import laggard
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
"""Launches from which the noise is estimated."""
REVIEWED_LAUNCHES, REVIEWED_DEGREES = 10, 30
"""Launches of a usual reviewed baseline, and degrees of freedom of the noise that a few of them give."""
PROBE_TIMEOUT_S = 600
"""Deadline of the process that imports torch and trains."""
MAX_WALL_DIFFERENCE = 0.01
"""Largest difference between the sum of the steps and the host's clock over the same steps, relative."""
MAX_PROFILER_DIFFERENCE = 0.03
"""Largest difference between the median step and the profiler's, relative: profiling slows a step down a
little."""
MAX_OVERHEAD = 0.01
"""Largest share of a step's time that measuring may add."""
MAX_PEAK_DIFFERENCE = 0.05
"""Largest relative error of peak memory. On a CPU memory comes in pages, and the rest of the process
allocates."""
MIN_SHARE_OF_PEAK = 0.4
"""Smallest share of the data sheet's dense peak in a 4096 x 4096 matmul: any healthy card exceeds it."""
FABRIC_IS_UP = (3, 0)
"""State and status of a GPU whose NVLink fabric is set up: NVML_GPU_FABRIC_STATE_COMPLETED, NVML_SUCCESS."""
SHARED_MEMORY_BYTES = 2**30
"""Least size of /dev/shm: NCCL's ranks on one machine use it, and a container gets 64 MiB by default."""


class Row(Data):
    """The result of one check."""

    check: str
    status: Status
    found: str
    advice: str | None = None
    """What to do if it did not pass."""


def _passed(check: str, found: str) -> Row:
    return Row(check=check, status="pass", found=found)


def _failed(check: str, found: str, advice: str) -> Row:
    return Row(check=check, status="fail", found=found, advice=advice)


def _unknown(check: str, found: str, advice: str | None = None) -> Row:
    return Row(check=check, status="unknown", found=found, advice=advice)


def _checked(check: str, found: str, *, ok: bool, advice: str) -> Row:
    """Return a row that passes, or fails with the advice."""
    return _passed(check, found) if ok else _failed(check, found, advice)


def examine(machine: Machine, *, quick: bool, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Run all checks of `machine`. `say` is called with what is being done now, which may take minutes."""
    rows = [machine_row(machine), *system_rows(machine), *gpu_rows(machine), neighbours_row(machine)]
    rows.append(extensions_row())
    say("importing torch" if quick else "training a small model in one process, bare and under the clock")
    probed = _probe(machine, quick=quick)
    if isinstance(probed, Row):
        return [*rows, probed]
    rows += torch_rows(probed.torch, machine)
    if probed.memory is not None:
        rows.append(memory_row(probed.memory))
    if probed.clock is not None:
        rows += clock_rows(probed.clock)
    failed = {row.check for row in rows if row.status == "fail"}
    if not quick and not failed & {"torch and GPUs", "extensions"}:  # with these, no launch is measured
        rows += launch_rows(machine, say)
    return rows


def extensions_row() -> Row:
    """Import what other packages add to perfsuite: each must have a name of its own, and be of its kind."""
    problems = [
        *extensions.problems(FRAMEWORKS, built_in(), load_framework),
        *extensions.problems(METRICS, (), lambda extension: metric.find(extension.name)),
        *extensions.problems(LAUNCHERS, BUILT_IN_LAUNCHERS, lambda extension: extension.load()),
    ]
    names = [f"{each.name} of {each.package}" for group in GROUPS for each in extensions.installed(group)]
    if problems:
        return _failed(
            "extensions", "; ".join(problems), "mend or remove these packages: what needs them fails"
        )
    return _passed("extensions", ", ".join(names) or "none installed")


def _mhz(card: DeviceHealth) -> str | None:
    """Describe the clock limits of a GPU; None if NVML does not tell them."""
    if card.sm_clock_limit_mhz is None:
        return None
    locked = "" if card.sm_clock_set_mhz is None else f", application clock {card.sm_clock_set_mhz:.0f} MHz"
    return f"SM up to {card.sm_clock_limit_mhz:.0f} MHz{locked}"


def _on(flag: bool | None) -> str | None:
    return None if flag is None else "on" if flag else "off"


def machine_row(machine: Machine) -> Row:
    """Name the machine, and what could not be found out about it."""
    devices = "GPUs" if machine.device == "cuda" else "cores"
    found = f"{machine.hardware_class}: {machine.devices} {devices}, {machine.device_name}"
    if machine.device == "cuda" and machine.note is not None:
        return _unknown("machine", found, machine.note)
    return _passed("machine", found)


def system_rows(machine: Machine, *, root: Path = Path("/")) -> list[Row]:
    """Check the limits and permissions of this process, from /proc and /sys under `root`."""
    rows = [_cores_row(root), _peak_reset_row(root), _ptrace_row(root)]
    if machine.device == "cuda" and machine.devices > 1:
        rows.append(_shared_memory_row(root))
    return rows


def _cores_row(root: Path) -> Row:
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return _passed("cores", f"{cores}, and no limit of a cgroup is to be seen")
    if quota == "max" or int(quota) >= cores * int(period):
        return _passed("cores", f"{cores}, all of their time")
    return _failed(
        "cores",
        f"{cores} cores are visible, and a cgroup grants the time of {int(quota) / int(period):.1f}",
        "start the container with whole cores (--cpuset-cpus) in place of a share of their time: "
        "a process that has used its share stands still until the next period",
    )


def _peak_reset_row(root: Path) -> Row:
    file = root / "proc/self/clear_refs"
    if os.access(file, os.W_OK):
        return _passed("peak memory reset", f"{file} can be written")
    return _failed(
        "peak memory reset",
        f"{file} cannot be written: peaks on a CPU hold what building the model needed",
        "run in a container whose /proc is not read-only, or compare GPU memory alone",
    )


def _ptrace_row(root: Path) -> Row:
    try:
        scope = int((root / "proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0
    if scope == 0 or (os.geteuid() == 0 and scope < 3):
        return _passed("ptrace", f"allowed (ptrace_scope {scope})")
    return _unknown(
        "ptrace",
        f"limited (ptrace_scope {scope})",
        "nothing, unless you attach py-spy or gdb by hand: the stacks of a hang need no ptrace",
    )


def _shared_memory_row(root: Path) -> Row:
    try:
        space = os.statvfs(root / "dev/shm")
    except OSError as error:
        return _unknown("shared memory", f"/dev/shm: {error.strerror}")
    size = space.f_blocks * space.f_frsize
    if size >= SHARED_MEMORY_BYTES:
        return _passed("shared memory", f"/dev/shm holds {size / 2**30:.0f} GiB")
    return _failed(
        "shared memory",
        f"/dev/shm holds {size / 2**20:.0f} MiB",
        "NCCL needs more: start the container with --ipc=host or --shm-size=8g",
    )


def gpu_rows(machine: Machine, nvml: Any | None = None) -> list[Row]:
    """Check how the GPUs are set up, and whether a card is faulty, by NVML. `nvml` is `pynvml` by default."""
    if machine.device == "cpu":
        return []
    if nvml is None:
        nvml = importlib.import_module("pynvml")
    gpus = Gpus(nvml, machine.devices, JobProcesses())  # nothing is launched
    cards = gpus.cards(gpus.used_bytes())
    fabric = gpus.fabric_states()
    notes = [*gpus.notes(), *(f"{card.name}: {fault}" for card in cards for fault in card.memory_faults)]
    gpus.finish()
    if len(cards) < machine.devices:
        return [_unknown("NVML", "; ".join(notes), "ask nvidia-smi why")]
    return [
        _failed("GPU hardware", "; ".join(notes), "see to the card first")
        if notes
        else _passed("GPU hardware", "no fault is known to the driver"),
        _power_row(cards),
        _alike_row("clocks", [_mhz(card) for card in cards]),
        _alike_row("ECC", [_on(card.ecc) for card in cards]),
        _alike_row("persistence mode", [_on(card.persistence) for card in cards]),
        *_nvlink_rows(cards, fabric),
    ]


def _nvlink_rows(cards: Sequence[DeviceHealth], fabric: Sequence[tuple[int, int] | None]) -> list[Row]:
    """Check the links between GPUs, where there are any, and the fabric of their switches."""
    rows = []
    if any(card.nvlinks is not None for card in cards):
        rows.append(_alike_row("NVLink", [_nvlinks(card) for card in cards]))
    if any(fabric):
        wrong = [card.name for card, state in zip(cards, fabric, strict=True) if state != FABRIC_IS_UP]
        advice = "start NVIDIA's Fabric Manager (systemctl status nvidia-fabricmanager), and see dmesg"
        found = f"not initialized: {', '.join(wrong)}" if wrong else "initialized"
        rows.append(_checked("NVLink fabric", found, ok=not wrong, advice=advice))
    return rows


def _nvlinks(card: DeviceHealth) -> str | None:
    """The NVLinks of a GPU that are up, and those that are not."""
    down = f", {card.nvlinks_down} down" if card.nvlinks_down else ""
    return None if card.nvlinks is None else f"{card.nvlinks} up{down}"


def _power_row(cards: Sequence[DeviceHealth]) -> Row:
    known = [(card.name, card.power_limit_w, card.power_limit_default_w) for card in cards]
    low = [
        f"{name} is limited to {limit:.0f} W, its default is {usual:.0f} W"
        for name, limit, usual in known
        if limit is not None and usual is not None and limit < usual
    ]
    if low:
        advice = "raise it (nvidia-smi -pl) before baselines are recorded: it sets how fast these GPUs train"
        return _failed("power limit", "; ".join(low), advice)
    limits = sorted({f"{limit:.0f} W" for _, limit, _ in known if limit is not None})
    if not limits:
        return _unknown("power limit", "NVML does not tell it")
    return _passed("power limit", ", ".join(limits))


def _alike_row(check: str, values: Sequence[str | None]) -> Row:
    """Check that a setting is the same on all GPUs; `values` are theirs, None where NVML does not tell it."""
    known = {value for value in values if value is not None}
    if not known:
        return _unknown(check, "NVML does not tell it")
    if len(known) == 1:
        return _passed(check, known.pop())
    each = ", ".join(f"GPU {index}: {value or 'unknown'}" for index, value in enumerate(values))
    return _failed(check, each, "set all GPUs alike: the slowest one sets the pace of a step")


def neighbours_row(machine: Machine, neighbours: Neighbours | None = None) -> Row:
    """Check that nobody else uses the cores, or holds memory of the GPUs, now."""
    watched = Neighbours(say=silent, show=silent) if neighbours is None else neighbours
    others = watched.look(machine, machine.devices)
    if not others:
        return _passed("other processes", "none uses the machine")
    advice = "end them, or measure at another hour: launches beside them are set aside"
    return _failed("other processes", "; ".join(others), advice)


def _probe(machine: Machine, *, quick: bool) -> DoctorFile | Row:
    """Import torch and train in a separate process. Returns what it measured, or the row of its failure."""
    missing = missing_package("torch") or (None if quick else missing_package("transformers"))
    if missing is not None:
        return _failed(
            "torch", f"to check it, {missing}", "run the command above, then perfsuite doctor again"
        )
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
    return _failed(
        "torch",
        f"a process that imports torch and trains failed: {said}",
        f"run it yourself: {' '.join(words[:3])} /tmp/probe.json {machine.device}",
    )


def torch_rows(torch: TorchFacts, machine: Machine) -> list[Row]:
    """Check that the installed torch, the driver and the GPUs fit together."""
    build = "without CUDA" if torch.cuda is None else f"for CUDA {torch.cuda}"
    rows = [_passed("torch", f"{torch.version}, built {build}")]
    if machine.device == "cpu":
        return rows
    check = "torch and GPUs"
    if torch.devices == machine.devices:
        found = f"torch reaches {torch.devices} GPUs, driver {machine.driver}, NCCL {torch.nccl}"
        return [*rows, _passed(check, found)]
    reason = torch.error or f"torch reaches {torch.devices} GPUs"
    found = f"NVML sees {machine.devices} GPUs (driver {machine.driver}), {reason}"
    advice = "install a torch for a CUDA that this driver knows (pip install torch), or a newer driver"
    return [*rows, _failed(check, found, advice)]


def memory_row(memory: MemoryFacts) -> Row:
    """Compare the peak that perfsuite reads with what was allocated."""
    return _checked(
        "peak memory",
        f"read {memory.read / 2**20:.1f} MiB of {memory.expected / 2**20:.1f} ({memory.method})",
        ok=abs(memory.read - memory.expected) <= MAX_PEAK_DIFFERENCE * memory.expected,
        advice="do not trust memory figures of this machine; look at the row above, and report it",
    )


def clock_rows(clock: ClockFacts) -> list[Row]:
    """Compare the clock with the host's and the profiler's, and check what measuring costs."""
    difference = median(clock.wall) - 1
    rows = [
        _checked(
            "clock",
            f"the steps sum to the host's clock {difference:+.2%} (median of {len(clock.wall)} blocks)",
            ok=abs(difference) <= MAX_WALL_DIFFERENCE,
            advice="times of this machine are not to be trusted: look at its clock source",
        )
    ]
    if clock.profiler_s is not None:
        difference = clock.step_s / clock.profiler_s - 1
        rows.append(
            _checked(
                "clock and profiler",
                f"median step {1e3 * clock.step_s:.2f} ms, by the profiler {difference:+.1%}",
                ok=abs(difference) <= MAX_PROFILER_DIFFERENCE,
                advice="look at a trace of one step (torch.profiler) before a night",
            )
        )
    return [*rows, _overhead_row(clock)]


def _overhead_row(clock: ClockFacts) -> Row:
    """Check by how much measuring lengthens a step; unknown if the quarter of the blocks with the least is
    fine."""
    low, middle, high = (ratio - 1 for ratio in quantiles(clock.overhead, n=4, method="inclusive"))
    check = "cost of measuring"
    found = f"{middle:+.1%} of a step (middle half {low:+.1%} to {high:+.1%})"
    if abs(middle) <= MAX_OVERHEAD:
        return _passed(check, found)
    if low <= MAX_OVERHEAD:
        return _unknown(check, found, "the machine scatters too much to tell: look again when it is quiet")
    advice = f"measuring costs more than {MAX_OVERHEAD:.0%} of these short steps: take longer ones"
    return _failed(check, found, advice)


def launch_rows(machine: Machine, say: Callable[[str], None]) -> list[Row]:
    """Launch a small case on every device a few times: rates, health, noise, and what the gate can find."""
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
    """Compare the rates of the GPUs in the same pieces of work: slowest with fastest, and with the data
    sheet.

    On a CPU there are no rows: its ranks share the cores, so that their rates say nothing about a device.
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
    found = f"{lowest:.4g} to {highest:.4g} over {len(rates)} GPUs" if len(rates) > 1 else f"{lowest:.4g}"
    if (lag := laggard(rates)) is not None:
        rank, _, behind = lag
        advice = (
            f"GPU {rank} is {behind:.0%} slower than the fastest: look at its clocks, its power limit, its "
            "link, and who else uses it"
        )
        return _failed(name, found, advice)
    peak = machine.peak_flops("bf16") if name == "matmul_tflops" else None
    if peak is not None:
        share = lowest * 1e12 / peak
        found += f", {share:.0%} of the data sheet's peak"
        if share < MIN_SHARE_OF_PEAK:
            advice = f"at least {MIN_SHARE_OF_PEAK:.0%} is usual: look at clocks, power limit and temperature"
            return _failed(name, found, advice)
    elif len(rates) == 1:
        advice = (
            "there is no other GPU here to compare it with: compare it with another machine of this class"
        )
        return _unknown(name, found, advice)
    return _passed(name, found)


def well_row(runs: Sequence[Run], verdict: Verdict) -> Row:
    """Check that all launches were measured, on a healthy machine."""
    if verdict.outcome == "recorded" and not verdict.unhealthy_launches:
        return _passed("launches", f"{len(runs)} measured, the machine was well")
    advice = "see to it before the night: such launches are set aside, and verdicts need others"
    return _failed("launches", "; ".join(verdict.reasons) or verdict.outcome, advice)


def noise_row(runs: Sequence[Run], verdict: Verdict, machine: Machine) -> Row:
    """Estimate the noise between launches, and check that the gate finds drops of the usual tolerance with
    it."""
    healthy = [run for run in verdict.healthy(runs) if run.failure is None]
    known = class_noise([baseline.from_runs(healthy)]).of(TOKENS_PER_S) if len(healthy) > 2 else None
    if known is None:
        found = f"{plural(len(healthy), 'healthy launch')} cannot tell it"
        return _unknown("noise", found, "look again when it is quiet")
    now = minimum_detectable_drop(noise=known, baseline_launches=len(healthy))
    later = minimum_detectable_drop(
        noise=Noise(sigma=known.sigma, degrees_of_freedom=REVIEWED_DEGREES),
        baseline_launches=REVIEWED_LAUNCHES,
    )
    allowed = TOKENS_PER_S.tolerance(machine.device)
    by = [f"{TOKENS_PER_S.bound(of_cost):.1%}" for of_cost in (now, later, allowed)]
    found = (
        f"{known.sigma:.2%} between launches, so drops of tokens/s by {by[0]} are found now and by {by[1]} "
        f"with reviewed baselines of {REVIEWED_LAUNCHES} launches; {by[2]} are allowed"
    )
    advice = (
        f"verdicts here are called blind to drops below {by[1]}: lock the clocks, keep others off, or take "
        "longer steps"
    )
    return _checked("noise", found, ok=later <= allowed, advice=advice)
