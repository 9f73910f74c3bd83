"""Launch a case on every device, and check its measurement, its noise, and what the gate can find."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.case.hardware import Machine
from perfsuite.doctor.gpus import device_rows
from perfsuite.doctor.injected import small_case
from perfsuite.doctor.rows import Row, checked, failed, passed, unknown
from perfsuite.measure import Launching, measure
from perfsuite.report.text import plural
from perfsuite.results.baseline import from_runs
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import Run
from perfsuite.results.run_dir import launches_in
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.overall import Reference
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import Noise, minimum_detectable_drop

LAUNCHES = 5  # number of launches from which the noise is estimated
REVIEWED_LAUNCHES = 10
REVIEWED_DEGREES = 30
"""The number of launches of a typical reviewed baseline, and the degrees of freedom of the noise if it is
estimated from several such baselines."""


def launch_rows(
    machine: Machine,
    say: Callable[[str], None],
    *,
    measure: Callable[..., tuple[list[Run], Verdict]] = measure,
) -> list[Row]:
    """Launch a small case on every device a few times, and check rates, health, noise, and the gate."""
    case = small_case(machine)
    reference = Reference(policy=Policy(record_launches=LAUNCHES))
    launching = Launching(on_launch=lambda case, number: say(f"launch {number} of {case.id}"))
    with tempfile.TemporaryDirectory(prefix="perfsuite-doctor-") as directory:
        runs, verdict = measure(case, machine, Path(directory), reference, launching)
        files = [file for launch in launches_in(Path(directory)) for file in launch.all_ranks()]
        reports = [documents.read(file, RankReport) for file in files]
    rows = device_rows(reports, machine)
    return [*rows, well_row(runs, verdict), noise_row(runs, verdict, machine)]


def well_row(runs: Sequence[Run], verdict: Verdict) -> Row:
    """Check that all launches were measured on a healthy machine."""
    if verdict.outcome == "recorded" and not verdict.unhealthy_launches:
        return passed("launches", f"{len(runs)} measured, on a healthy machine")
    advice = "fix this before the nightly run: such launches are set aside and have to be repeated"
    return failed("launches", "; ".join(verdict.reasons) or verdict.outcome, advice)


def noise_row(runs: Sequence[Run], verdict: Verdict, machine: Machine) -> Row:
    """Estimate the noise between launches, and check that the gate finds drops as large as the tolerance."""
    healthy = [run for run in verdict.healthy(runs) if run.failure is None]
    noise = class_noise([from_runs(healthy)]).of(TOKENS_PER_S) if len(healthy) > 2 else None
    if noise is None:
        observed = f"{plural(len(healthy), 'healthy launch')} are too few to estimate the noise"
        return unknown("noise", observed, "check again when the machine is quiet")
    now = minimum_detectable_drop(noise=noise, baseline_launches=len(healthy))
    reviewed = Noise(sigma=noise.sigma, degrees_of_freedom=REVIEWED_DEGREES)
    later = minimum_detectable_drop(noise=reviewed, baseline_launches=REVIEWED_LAUNCHES)
    allowed = TOKENS_PER_S.tolerance(machine.device)
    by = [f"{TOKENS_PER_S.bound(of_cost):.1%}" for of_cost in (now, later, allowed)]
    observed = (
        f"{noise.sigma:.2%} between launches, so the gate now finds drops of {by[0]} in tokens/s. With "
        f"reviewed baselines of {REVIEWED_LAUNCHES} launches, it finds drops of {by[1]}. Drops of {by[2]} "
        "are allowed"
    )
    advice = (
        f"verdicts here are marked as blind to drops below {by[1]}: lock the clocks, keep other jobs off the "
        "machine, or use cases whose steps are longer"
    )
    return checked("noise", observed, ok=later <= allowed, advice=advice)
