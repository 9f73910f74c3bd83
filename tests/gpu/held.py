"""Print what a part of the first day is expected to show, and afterwards whether the expectation held.

`python -m tests.gpu.held expect CHECK` prints the expectation, and `python -m tests.gpu.held CHECK FILE...`
the answer: HELD, NOT HELD, or NOT SEEN if there is nothing to judge.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.results.counts import Counts
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.rank_report import START_UP
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile

WIDE_MODEL = "llama-3.2-1b"  # the model of the cases without adapters in part 2 of docs/develop/gpu-day.md
NOISE = 0.005  # largest spread of the launches of one case
SAMPLER = 0.005  # largest cost of the health sampler
CACHES = 0.03  # largest difference between cold and warm compilation
SLOWDOWN = (0.04, 0.06)  # an injected slowdown of 5%
AGENT = r"(-m |\[')perfsuite\.(node|worker)"  # in the command line of an agent, or of its ranks' server
LOSSES = 0.01  # largest difference between the losses of one step
FIRST_STEPS = 8  # later, losses diverge
PEAK = 0.05  # largest difference between a peak of memory and that of the dry run
COMPILED = (0.05, 0.25)  # how much faster compiled steps are
LLAMA_MFU = (0.35, 0.55)
CLOCK = {  # by the beginning of a line of tests.gpu.clock: the range of its value
    "under the clock / bare": (0.997, 1.003),
    "sum of the steps / host's clock": (0.995, 1.005),
    "profiler / clock": (0.98, 1.02),
    "synchronised / clock": (1.01, 1.04),
    "peak of torch / of perfsuite": (1.0, 1.0),
    "last peak / first peak": (1.0, 1.0),
    "outside the allocator, GiB": (0.5, 1.5),
}
KERNELS = "attention and loss kernels"
FREE_MIB = 1024  # memory that may be in use after all processes were killed


class Answer(NamedTuple):
    """Whether an expectation held; None if nothing was seen."""

    held: bool | None
    observed: str


def results(file: Path) -> Sequence[Measurement]:
    """Return the measurements of a session; none if it wrote no results."""
    session = documents.read_or_none(file, SessionFile)
    return () if session is None else session.results


def runs(file: Path) -> list[Run]:
    """Return the launches of a session that measured their steps."""
    return [run for result in results(file) for run in result.healthy_runs if run.failure is None]


def is_recorded(file: Path) -> Answer:
    """Every case is recorded, or skipped with a reason."""
    session = documents.read_or_none(file, SessionFile)
    if session is None or not session.results:
        return Answer(None, "nothing was measured")
    measured = session.results
    others = [f"{result.case_id}: {result.outcome}" for result in measured if not result.verdict.is_recorded]
    observed = "; ".join(others) or f"{len(measured)} recorded"
    skipped = "".join(f"; skipped: {skip.case_id}: {skip.reason}" for skip in session.skipped)
    return Answer(not others, observed + skipped)


def is_quiet(file: Path) -> Answer:
    """The launches of one case differ by at most 0.5%."""
    speeds = [run.figures.tokens_per_s for run in runs(file) if run.figures.tokens_per_s]
    if len(speeds) < 3:
        return Answer(None, f"{len(speeds)} launches")
    spread = max(speeds) / min(speeds) - 1
    return Answer(spread <= NOISE, f"{spread:.2%} between {len(speeds)} launches")


def is_slower(file: Path) -> Answer:
    """A slowdown of 5% is measured as 4% to 6%."""
    return _change(file, lambda change: SLOWDOWN[0] <= -change <= SLOWDOWN[1])


def is_sampler_cheap(file: Path) -> Answer:
    """Without the health sampler (arm A), steps are at most 0.5% faster."""
    return _change(file, lambda change: abs(change) <= SAMPLER)


def _change(file: Path, is_expected: Callable[[float], bool]) -> Answer:
    checks = [result.verdict.check(TOKENS_PER_S.name) for result in results(file)]
    changes = [check.change for check in checks if check is not None and check.change is not None]
    if not changes:
        return Answer(None, "no change was estimated")
    return Answer(all(map(is_expected, changes)), ", ".join(f"tokens/s {change:+.1%}" for change in changes))


def is_as_dry(file: Path, dry: Path) -> Answer:
    """FLOPs, kernels, host reads and copies of each case are those of its dry run."""
    predicted = {result.case_id: result.counts for result in results(dry)}
    compared = 0
    differences = []
    for result in results(file):
        before = predicted.get(result.case_id, ())
        if before and result.counts:
            compared += 1
            for name, one, other in _differences(before[0].counts, result.counts[0].counts):
                differences.append(f"{result.case_id}: {name} {one} dry, {other} launched")
    return Answer(not differences if compared else None, "; ".join(differences) or f"{compared} cases alike")


def _differences(dry: Counts, launched: Counts) -> Iterator[tuple[str, object, object]]:
    for name in ("flops", "kernels", "host_reads", "device_copies"):
        one = getattr(dry, name)
        other = getattr(launched, name)
        if one is not None and one != other:
            yield name, one, other


def of_wide(file: Path, **fields: object) -> list[Run]:
    """Return the launches of cases without adapters in part 2 that have these values of their fields."""
    return [
        run
        for run in runs(file)
        if run.case.model.name == WIDE_MODEL
        and run.case.lora is None
        and all(getattr(run.case, name) == value for name, value in fields.items())
    ]


def are_losses_alike(file: Path) -> Answer:
    """The losses of the first eight steps differ by at most 1%, except those of pure bf16."""
    curves = [run.loss[:FIRST_STEPS] for run in of_wide(file) if run.case.precision != "bf16"]
    if len(curves) < 2 or any(len(curve) < FIRST_STEPS for curve in curves):
        return Answer(None, f"{len(curves)} launches with losses")
    largest = max(max(losses) / min(losses) - 1 for losses in zip(*curves, strict=True))
    return Answer(largest <= LOSSES, f"{largest:.2%} between {len(curves)} launches")


def is_memory_saved(file: Path) -> Answer:
    """`full` needs less memory than `every-2` and `selective-op`, which need less than `none`."""
    peaks: dict[str, float] = {}
    for run in of_wide(file, precision="bf16-mixed", compile=False):
        if run.case.framework.name == "fsdp2" and run.figures.peak_memory_bytes:
            peaks[run.case.activation_checkpointing] = run.figures.peak_memory_bytes / 2**30
    if peaks.keys() != {"full", "every-2", "selective-op", "none"}:
        return Answer(None, f"only {', '.join(sorted(peaks))}")
    between = sorted((peaks["every-2"], peaks["selective-op"]))
    is_ordered = peaks["full"] < between[0] and between[1] < peaks["none"]
    return Answer(is_ordered, ", ".join(f"{name} {peak:.1f} GiB" for name, peak in peaks.items()))


def is_peak_as_dry(file: Path, dry: Path) -> Answer:
    """The peak memory of each case is within 5% of its dry run's."""
    predicted = {result.case_id: result.figures.peak_memory_bytes for result in results(dry)}
    changes = {}
    for result in results(file):
        before = predicted.get(result.case_id)
        peak = result.figures.peak_memory_bytes
        if before and peak:
            changes[result.case_id] = peak / before - 1
    far = [f"{case_id}: {change:+.1%}" for case_id, change in changes.items() if abs(change) > PEAK]
    return Answer(not far if changes else None, "; ".join(far) or f"{len(changes)} cases alike")


def is_compiled_faster(file: Path) -> Answer:
    """Compiled steps are 5 to 25% faster than eager steps."""
    speeds = {
        run.case.compile: run.figures.tokens_per_s
        for run in of_wide(file, precision="bf16-mixed", activation_checkpointing="none", attention="sdpa")
        if run.case.framework.name == "ddp"
    }
    eager = speeds.get(False)
    compiled = speeds.get(True)
    if not eager or not compiled:
        return Answer(None, "one of them has no speed")
    return _within("compiled", compiled / eager - 1, COMPILED)


def is_fp32_below_peak(file: Path) -> Answer:
    """In fp32, the MFU is below 100%."""
    shares = [run.figures.mfu for run in of_wide(file, precision="fp32") if run.figures.mfu]
    return Answer(max(shares) < 1 if shares else None, ", ".join(f"MFU {share:.0%}" for share in shares))


def are_llamas_fast(file: Path) -> Answer:
    """The cases of one GPU are recorded, with an MFU of 35 to 55%."""
    recorded = is_recorded(file)
    shares = [run.figures.mfu for run in runs(file) if run.figures.mfu]
    if recorded.held is None or not shares:
        return Answer(None, f"{recorded.observed}; no MFU")
    is_usual = all(LLAMA_MFU[0] <= share <= LLAMA_MFU[1] for share in shares)
    return Answer(
        recorded.held and is_usual, f"{recorded.observed}; MFU {min(shares):.0%} to {max(shares):.0%}"
    )


def is_clock_true(file: Path) -> Answer:
    """The clock agrees with the host and the profiler, memory agrees with torch, and attention is fast."""
    text = file.read_text() if file.exists() else ""
    values = {name: _value(text, name) for name in CLOCK}
    kernels = re.search(rf"^{KERNELS}: (.*)$", text, re.MULTILINE)
    missing = [name for name, value in values.items() if value is None]
    if missing or kernels is None:
        return Answer(None, f"no line with {', '.join(missing) or KERNELS}")
    wrong = [
        f"{name}: {value:.4g}"
        for name, value in values.items()
        if value is not None and not CLOCK[name][0] <= value <= CLOCK[name][1]
    ]
    if re.search("flash|cudnn|fmha", kernels[1].lower()) is None:
        wrong.append(f"kernels: {kernels[1]}")
    return Answer(not wrong, "; ".join(wrong) or f"{len(values) + 1} lines")


def _value(text: str, name: str) -> float | None:
    line = re.search(rf"^{re.escape(name)}: ([\d.]+)", text, re.MULTILINE)
    return None if line is None else float(line[1])


def _within(name: str, change: float, bounds: tuple[float, float]) -> Answer:
    return Answer(bounds[0] <= change <= bounds[1], f"{name} {change:+.1%}")


def are_caches_alike(cold: Path, warm: Path) -> Answer:
    """Launches with cold and warm compile caches are equally fast, and warm ones start sooner."""
    speeds = []
    starts = []
    for directory in (cold, warm):
        launches = [run for file in sorted(directory.glob("*.json")) for run in runs(file)]
        speeds.append([run.figures.tokens_per_s for run in launches if run.figures.tokens_per_s])
        starts.append([seconds for run in launches for seconds in _start_up_s(run)])
    if not all((*speeds, *starts)):
        return Answer(None, "launches or their start-up are missing")
    difference = median(speeds[1]) / median(speeds[0]) - 1
    spreads = [f"{max(values) / min(values) - 1:.2%}" for values in speeds]
    observed = f"warm {difference:+.2%}; spread {spreads[0]} cold, {spreads[1]} warm; start-up "
    observed += f"{median(starts[0]):.1f} s cold, {median(starts[1]):.1f} s warm"
    return Answer(abs(difference) <= CACHES and median(starts[1]) < median(starts[0]), observed)


def _start_up_s(run: Run) -> Iterator[float]:
    for name, seconds in run.figures.spans_s.items():
        if name.endswith(START_UP):  # also `cold start-up`
            yield seconds


def ends_cleanly(file: Path) -> Answer:
    """CUDA graphs are replayed without a refusal, and no rank dies after its report."""
    measured = [result for result in results(file) if "cuda_graphs" in result.case_id]
    bad = [f"{result.case_id}: {result.outcome}" for result in measured if not result.verdict.is_recorded]
    launches = [run for result in measured for run in result.runs]
    bad += [note for run in launches for note in run.notes if "after its report" in note]
    seen = "; ".join(dict.fromkeys(reason for run in launches for reason in run.hidden))
    return Answer(not bad if measured else None, "; ".join(bad) or f"{len(measured)} recorded; {seen}")


def is_out_of_memory(file: Path) -> Answer:
    """The case runs out of memory, and is excused."""
    measured = results(file)
    kinds = [str(result.verdict.failure) for result in measured]
    return Answer(set(kinds) == {"out_of_memory"} if measured else None, ", ".join(kinds))


def is_unhealthy(file: Path) -> Answer:
    """The launch is unhealthy, and the reason names the memory of other processes."""
    return _names(file, "other processes")


def is_locked(file: Path) -> Answer:
    """The clocks are listed as changed since the baseline, or are a reason to discard the launch."""
    return _names(file, "clock")


def _names(file: Path, word: str) -> Answer:
    measured = results(file)
    reasons = [reason for result in measured for reason in (*result.verdict.reasons, *result.verdict.changed)]
    is_named = any(word in reason for reason in reasons)
    return Answer(is_named if measured else None, "; ".join(reasons) or ("no reason" if measured else ""))


def has_trends(file: Path) -> Answer:
    """Memory does not grow, the start-up is timed in parts, and the wait for data is known."""
    launches = runs(file)
    missing = []
    for run in launches:
        growing = [slope.name for slope in run.slopes if slope.unit == "bytes" and slope.interval[0] > 0]
        missing += [f"{name} grows" for name in growing]
        missing += [] if [*_start_up_s(run)] else ["no start-up"]
        missing += [] if run.figures.data_wait_s is not None else ["no wait for data"]
    return Answer(not missing if launches else None, "; ".join(missing) or f"{len(launches)} launches")


def has_no_failed_row(file: Path) -> Answer:
    """No check fails."""
    try:
        rows = json.loads(file.read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return Answer(None, f"{file} has no rows")
    failed = [f"{row['check']}: {row['found']}" for row in rows if row["status"] == "fail"]
    return Answer(not failed, "; ".join(failed) or f"{len(rows)} checks")


def is_free(file: Path) -> Answer:
    """Six seconds after SIGKILL, less than 1 GiB is in use, and no process of perfsuite is left."""
    lines = file.read_text().splitlines() if file.exists() else []
    used = [int(line.split()[0]) for line in lines if re.fullmatch(r"\d+ MiB", line.strip())]
    left = [line for line in lines if re.search(AGENT, line)]
    if not used:
        return Answer(None, "nvidia-smi did not answer")
    return Answer(used[-1] < FREE_MIB and not left, f"{used[-1]} MiB; {'; '.join(left) or 'no process'}")


CHECKS: dict[str, Callable[..., Answer]] = {
    "rows": has_no_failed_row,
    "recorded": is_recorded,
    "as-dry": is_as_dry,
    "quiet": is_quiet,
    "slower": is_slower,
    "graphs": ends_cleanly,
    "caches": are_caches_alike,
    "sampler": is_sampler_cheap,
    "oom": is_out_of_memory,
    "unhealthy": is_unhealthy,
    "locked": is_locked,
    "trends": has_trends,
    "free": is_free,
    "losses": are_losses_alike,
    "memory": is_memory_saved,
    "peak-as-dry": is_peak_as_dry,
    "compiled": is_compiled_faster,
    "fp32": is_fp32_below_peak,
    "clock": is_clock_true,
    "llamas": are_llamas_fast,
}


def main(words: Sequence[str]) -> str:
    """Return the line to print. If a file cannot be read, nothing was seen."""
    name, *others = words
    if name == "expect":
        return f"EXPECTED ({others[0]}): {CHECKS[others[0]].__doc__}"
    try:
        answer = CHECKS[name](*map(Path, others))
    except FileError as error:
        answer = Answer(None, str(error))
    verdict = {True: "HELD", False: "NOT HELD", None: "NOT SEEN"}[answer.held]
    return f"{verdict} ({name}): {answer.observed or 'nothing was measured'}"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
