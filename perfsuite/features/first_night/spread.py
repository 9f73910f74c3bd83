"""Launch one case several times, and compare the launches, their counts and the GPUs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.case.hardware import Machine
from perfsuite.doctor.gpus import device_rows
from perfsuite.doctor.launches import noise_row, well_row
from perfsuite.doctor.rows import Row, checked, passed, unknown
from perfsuite.features.first_night.cases import SIMULATED, Size, spread_case
from perfsuite.features.first_night.night import Night, not_run, numa_nodes, why_not
from perfsuite.launch.lock import machine_lock
from perfsuite.report.text import plural
from perfsuite.results.count_baseline import from_runs as counts_of
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import Run
from perfsuite.results.run_dir import launches_in
from perfsuite.verdict import exact
from perfsuite.verdict.overall import Reference
from perfsuite.verdict.policy import Policy

LAUNCHES: Mapping[Size, int] = {"full": 5, "tiny": 3, "simulated": 3}
"""Number of launches of one case, from which the noise is computed. Fewer than three do not show it."""


def spread_rows(night: Night) -> Iterator[Row]:
    """Launch one case several times, and compare the launches, their counts and the GPUs."""
    directory = night.new_directory("spread")
    case = spread_case(night.machine, night.size)
    reason = why_not(case, night)
    if reason is not None:
        yield not_run("launches", reason)
        return
    with machine_lock(night.say):
        reference = Reference(policy=Policy(record_launches=LAUNCHES[night.size]))
        runs, verdict = night.measure(case, night.machine, directory, reference, night.launching())
    reports = [
        documents.read(file, RankReport) for launch in launches_in(directory) for file in launch.all_ranks()
    ]
    yield from device_rows(reports, night.machine)
    yield well_row(runs, verdict)
    noise = noise_row(runs, verdict, night.machine)
    if night.size == "simulated":
        noise = noise.replace(found=f"{SIMULATED}; {noise.found}")
    yield noise
    yield counts_row(runs)
    yield cores_row(reports, night.machine)


def counts_row(runs: Sequence[Run]) -> Row:
    """Check that the work of a step was counted, and that it is the same in each launch."""
    check = "counts"
    counted = [run for run in runs if run.failure is None]
    hidden = [*dict.fromkeys(reason for run in counted for reason in run.hidden)]
    if not counted or hidden or not all(run.counts for run in counted):
        why = "; ".join(hidden) or "no launch was counted"
        return unknown(check, f"not counted: {why}", "times and memory are judged without counts")
    if len(counted) == 1:
        return unknown(check, "one launch cannot show whether counts are steady")
    result = exact.check(counted[1:], counts_of(counted[:1]))
    different = (
        () if result is None else (*(finding.sentence for finding in result.findings), *result.unsteady)
    )
    observed = "; ".join(different) or f"the same in {plural(len(counted), 'launch')}"
    advice = "such counts are not judged: does the work depend on time or on random data?"
    return checked(check, observed, ok=not different, advice=advice)


def cores_row(reports: Sequence[RankReport], machine: Machine, *, root: Path = Path("/")) -> Row:
    """Check, on a machine with several sockets, that the ranks do not all run on the same cores.

    The sockets are those in /sys under `root`.
    """
    check = "cores of the ranks"
    if machine.device == "cpu":
        return not_run(check, "ranks are bound to the cores near their GPU, and there is no GPU")
    seen = {report.rank: report.observed.environment.get("cores") for report in reports if report.observed}
    groups: dict[str, list[int]] = {}
    for rank, cores in sorted(seen.items()):
        groups.setdefault(cores or "unknown", []).append(rank)
    observed = "; ".join(f"{cores}: rank {', '.join(map(str, ranks))}" for cores, ranks in groups.items())
    nodes = numa_nodes(root)
    if not groups or "unknown" in groups:
        return unknown(check, observed or "no rank reported its cores")
    if len(groups) == 1 and len(nodes) > 1 and len(seen) > 1:
        advice = "each rank should run near its GPU: is this process bound to one socket?"
        return unknown(check, f"all ranks share the cores {observed}", advice)
    return passed(check, observed)
