"""Collect the files of a launch into one `Run`, or into one profile."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from perfsuite import documents
from perfsuite.analysis import agreement
from perfsuite.analysis.cause import first_cause, is_peer, with_explanation, with_log, with_oom_kills
from perfsuite.analysis.cores import core_notes
from perfsuite.analysis.figures import (
    UNMEASURED_STEPS,
    extra_figures,
    figures_of,
    find_window,
    job_steps,
    lowest_device_probe,
    peak_for_mfu,
    settled,
    settling_notes,
)
from perfsuite.analysis.health import UNKNOWN, gpu_setup, unequal_gpus, with_nodes
from perfsuite.analysis.slopes import slopes_of
from perfsuite.case.case import Case, CaseFile
from perfsuite.case.framework import LossRule
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError, ReportError
from perfsuite.results.counts import COUNTED_STEP, Counts, merged, named_ranks
from perfsuite.results.metric import find_metric
from perfsuite.results.profile import LaunchProfile, RankProfileFile
from perfsuite.results.profile import merged as merged_profiles
from perfsuite.results.quantities import python_unless_alike
from perfsuite.results.rank_report import (
    COLD,
    SIMULATED_CLOCK,
    UNSET,
    Failure,
    Observed,
    RankReport,
    SpanTimes,
    is_of_start_up,
    summed_dtypes,
)
from perfsuite.results.run import LaunchFile, Run
from perfsuite.results.run_dir import FLIGHT_RECORDER_FILE, RunDir

T = TypeVar("T")
# If a rank's wall clock and the sum of its steps differ by a larger share than this, there is a note.
WALL_CLOCK_AGREES = 0.05
LOSS_STEPS = 3
"""The loss falls if its mean over the last steps is below its mean over the first steps. Each mean is over
this number of steps, or over a tenth of all steps if that is more. By this rule, the loss falls in each of
48 runs of 12 steps (the tiny models, with learning rates 1e-3 and 1e-4). If only the first and the last step
are compared, it falls in 46 of these runs."""
DIFFER_BY_RANK = ("cores", "CUDA_VISIBLE_DEVICES", FLIGHT_RECORDER_FILE)
"""Parts of the environment that differ between ranks, and are recorded only for rank 0."""
LOSS_NOT_OBSERVED = (
    "loss not observed, as requested by the case: nobody would notice if the model stopped learning"
)


def collect(
    run_dir: RunDir, machine: Machine, *, started_at: str, duration_s: float, failure: Failure | None
) -> Run:
    """Make one run from the reports of a launch's ranks. Raises `FileError` only for a bad `case.json`.

    `failure` is the reason why the launch was killed, or None. This reason becomes a note if every rank had
    already written its report. Anything else that went wrong in the launch becomes the `failure` of the run.
    """
    request = documents.read(run_dir.case, CaseFile)
    case = request.case
    took = round(duration_s, 3)
    bare = Run(case=case, machine=machine, started_at=started_at, duration_s=took, inject=request.inject)
    try:
        agents = agents_of(run_dir, case)
        bare = with_nodes(bare, agents, {})
        reports = reports_of(run_dir, case)
    except FileError as error:
        unread = Failure(kind="missing_report", message=str(error))
        return bare.replace(failure=unread if failure is None else with_log(failure, run_dir))
    per_node = case.topology.processes_per_node
    bare = with_nodes(bare, agents, {rank // per_node: report.host for rank, report in reports.items()})
    cause = cause_of(reports, agents, run_dir, case, failure)
    if cause is not None:
        its = agents if cause.rank is None else agents.keys() & {cause.rank // per_node}
        return bare.replace(failure=with_oom_kills(cause, sum(agents[node].oom_kills for node in its)))
    ranks = [reports[rank] for rank in sorted(reports)]
    try:
        run = _measured(bare, ranks, request)
    except ReportError as error:
        return bare.replace(failure=Failure(kind="ranks_disagree", message=str(error)))
    run = run.replace(notes=(*run.notes, *_notes_on_the_end(_ended(agents), failure)))
    return _with_training_checked(run, ranks)


def cause_of(
    reports: Mapping[int, RankReport],
    agents: Mapping[int, LaunchFile],
    run_dir: RunDir,
    case: Case,
    failure: Failure | None,
) -> Failure | None:
    """Return why a launch failed, with the ends of logs, or None. `failure`: why the launch was killed."""
    cause = first_cause(reports, _ended(agents), run_dir, case)
    if cause is None:
        return None
    by_ranks = [report.failure for report in reports.values() if report.failure is not None]
    if failure is not None and (cause not in by_ranks or is_peer(cause)):
        # Killed ranks report secondary errors, so prefer the reason why the launch was killed.
        cause = with_explanation(failure, run_dir, case)
    return with_log(cause, run_dir)


def _ended(agents: Mapping[int, LaunchFile]) -> list[Failure]:
    return [failure for agent in agents.values() for failure in agent.failures]


def collect_profile(run_dir: RunDir, failure: Failure | None) -> LaunchProfile:
    """Merge the profiles of a launch's ranks. Raises `ReportError` or `FileError` if one is missing."""
    case = documents.read(run_dir.case, CaseFile).case
    files = [run_dir.profile(rank) for rank in range(case.topology.world_size)]
    if all(file.exists() for file in files):
        profiles = [documents.read(file, RankProfileFile) for file in files]
        return merged_profiles(
            dict(enumerate(profile_file.profile for profile_file in profiles)), method=profiles[0].method
        )
    reports = reports_of(run_dir, case)
    agents = agents_of(run_dir, case)
    cause = cause_of(reports, agents, run_dir, case, failure) or failure
    if cause is not None:
        raise ReportError(f"{cause.kind}: {cause.message}")
    notes = list(dict.fromkeys(note for report in reports.values() for note in report.notes))
    raise ReportError("; ".join(notes) or "no rank wrote a profile")


def newest_profile(run_dirs: Iterable[RunDir]) -> LaunchProfile | None:
    """Return the profile of the first launch that has a profile, or None."""
    for run_dir in run_dirs:
        with contextlib.suppress(ReportError):
            return collect_profile(run_dir, None)
    return None


def agents_of(run_dir: RunDir, case: Case) -> dict[int, LaunchFile]:
    """Return the agents' files, by node. Raises `FileError` if a file is unreadable or of another node."""
    files = run_dir.all_launches(case.topology.nodes)
    agents = {node: documents.read(file, LaunchFile) for node, file in files.items()}
    for node, launch in agents.items():
        if launch.node != node:
            raise FileError(f"{files[node]}: it was written on node {launch.node}, expected {node}")
    return agents


def reports_of(run_dir: RunDir, case: Case) -> dict[int, RankReport]:
    """Return the existing reports, by rank. Raises `FileError` if one is unreadable or is of another rank."""
    paths = [(rank, run_dir.rank(rank)) for rank in range(case.topology.world_size)]
    reports = {rank: documents.read(path, RankReport) for rank, path in paths if path.exists()}
    for rank, report in reports.items():
        if report.rank != rank:
            raise FileError(f"{run_dir.rank(rank)}: it is the report of rank {report.rank}, expected {rank}")
    return reports


def _notes_on_the_end(ended: Sequence[Failure], failure: Failure | None) -> Iterator[str]:
    if ended:
        who = [
            late_failure.message
            if late_failure.rank is None
            else f"rank {late_failure.rank}: {late_failure.message}"
            for late_failure in ended
        ]
        yield f"processes failed after reporting: {', '.join(who)}"
    if failure is not None:
        yield f"every rank had reported, but the job did not end: {failure.message}"


def _with_training_checked(run: Run, ranks: Sequence[RankReport]) -> Run:
    case = run.case
    apart = agreement.clock_differs(ranks) or agreement.trained_apart(ranks, case)
    unlike = apart or agreement.tokens_differ(ranks, case)
    if unlike is not None:
        return run.replace(failure=Failure(kind="mismatch", message=unlike))
    unseen = agreement.phase_never_ran(ranks, case)
    if unseen is not None:
        return run.replace(failure=Failure(kind="mismatch", message=unseen))
    rule = case.framework.promises.loss
    if rule is None:
        return run.replace(notes=(*run.notes, LOSS_NOT_OBSERVED))
    if any(report.loss_is_unknown for report in ranks):  # a note of the rank says why
        return run
    return run.replace(failure=_bad_loss(run.loss, rule, case))


def _measured(bare: Run, reports: list[RankReport], request: CaseFile) -> Run:
    """Return the run with the measurements of its ranks. Raises `ReportError` if they disagree."""
    case = bare.case
    if any(report.loss_is_unknown for report in reports):
        reports = [report.replace(loss=()) for report in reports]
    for wrong in _disagreements(reports, case):
        raise ReportError(wrong)
    if reports[0].clock == SIMULATED_CLOCK:
        bare = bare.replace(health=None)  # nothing was computed, so the state of the machine does not matter
    elif bare.health is None:
        bare = bare.replace(health=UNKNOWN)
    reports = _named_cold(reports)
    series = job_steps([report.step_s for report in reports])
    counted = {report.rank: report.counts for report in reports if report.counts is not None}
    why_hidden = agreement.hidden(reports, case)
    unmeasured = COUNTED_STEP if counted else UNMEASURED_STEPS
    end = min(report.timed_steps or len(series) for report in reports)
    if bare.machine.device == "cuda":
        unmeasured = settled(series, unmeasured)
    window = find_window(series[:end], case.max_warmup_steps, unmeasured=unmeasured)
    run = bare.replace(
        step_s=tuple(series),
        # pragma: no mutate True: all ranks have the same number of values, as checked above
        probe_s=tuple(max(probes) for probes in zip(*(report.probe_s for report in reports), strict=True)),
        # pragma: no mutate True: all ranks have the same number of values, as checked above
        cpu_s=tuple(sum(ranks) for ranks in zip(*(report.cpu_s for report in reports), strict=True)),
        data_wait_s=_data_wait_s(reports),
        spans=_longest_spans([report.spans for report in reports]),
        # pragma: no mutate True: all ranks have the same number of values, as checked above
        loss=tuple(fmean(losses) for losses in zip(*(report.loss for report in reports), strict=True)),
        window=(window.start, end),
        memory=tuple(report.memory for report in reports if report.memory is not None),
        flops=reports[0].flops,
        observed=_with_machine(_of_all_ranks(reports), bare),
        autotuned=reports[0].autotuned,
        dtypes=summed_dtypes(report.dtypes for report in reports),
        device_probe=lowest_device_probe(reports),
        rank_probes=tuple(report.device_probe for report in reports),
        counts=() if why_hidden else merged(_with_alike_start_ups(counted)),
        other_threads=max(report.other_threads for report in reports),
        hidden=why_hidden,
        notes=(
            *bare.notes,
            *_notes(reports, steady=window.steady),
            *dict.fromkeys(note for report in reports for note in report.notes),
            *agreement.token_notes(reports, case),
            *agreement.input_notes(reports, case),
            *agreement.claim_notes(reports, case),
            *core_notes(bare, reports),
        ),
    )
    peak_flops, *peak_notes = peak_for_mfu(run, request.peak_flops)
    notes = (*run.notes, *filter(None, peak_notes), *settling_notes(run), *unequal_gpus(run))
    run = run.replace(figures=figures_of(run, reports, peak_flops), notes=notes)
    run = run.replace(slopes=slopes_of(run, reports))
    metrics = [metric for metric in map(find_metric, request.metrics) if metric is not None]
    return run.replace(figures=run.figures.replace(extra=extra_figures(run, reports, metrics)))


def _with_alike_start_ups(counted: Mapping[int, Counts]) -> dict[int, Counts]:
    """Return the counts by rank. Random differences between the ranks' start-ups are removed.

    These differences arise because the number of Python calls in a start-up depends on memory addresses. If
    they are removed, ranks that did the same work have equal counts, and `merged` puts them into one entry.
    """
    first = next(iter(counted.values()), Counts())

    def alike(name: str, part: Counts) -> Counts:
        of_first = first.spans.get(name)
        if of_first is None or not is_of_start_up(name):
            return part
        return part.replace(python=python_unless_alike(part.python, of_first.python))

    return {
        rank: counts.replace(spans={name: alike(name, part) for name, part in counts.spans.items()})
        for rank, counts in counted.items()
    }


def _data_wait_s(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """Return the wait for data of each step, on the rank that waits longest. Empty if it is unknown."""
    if any(report.data_wait_is_unknown for report in reports):
        return ()
    return _longest([report.data_wait_s for report in reports if report.data_wait_s])


def _longest(seconds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """For each step or occurrence, return the seconds of the rank on which it took longest."""
    # pragma: no mutate True: all ranks have the same number of values, as `collect` has checked
    return tuple(max(of_ranks) for of_ranks in zip(*seconds, strict=True))


def _named_cold(reports: list[RankReport]) -> list[RankReport]:
    """Mark the start-ups of all ranks as cold if any rank compiled a graph: the others wait for that rank."""
    if not any(report.compiled_anew for report in reports):
        return reports
    renamed = []
    for report in reports:
        counts = report.counts
        if counts is not None:
            counts = counts.replace(spans=_cold(counts.spans))
        renamed.append(report.replace(spans=_cold(report.spans), counts=counts))
    return renamed


def _cold(spans: Mapping[str, T]) -> dict[str, T]:
    return {f"{COLD}{name}" if is_of_start_up(name) else name: span for name, span in spans.items()}


def _longest_spans(of_ranks: Sequence[Mapping[str, SpanTimes]]) -> dict[str, SpanTimes]:
    """Return all ranks' spans. The duration of each occurrence is from the rank where it took longest.

    If a span occurred a different number of times on different ranks, for example because only one rank
    writes a log, the rank with the most seconds represents all ranks.
    """
    longest: dict[str, SpanTimes] = {}
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        times = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        whole = max(times, key=lambda span_times: sum(span_times.seconds))
        if (
            len({(span_times.steps, span_times.waits) for span_times in times})
            == len({len(span_times.seconds) for span_times in times})
            == 1
        ):
            whole = whole.replace(
                # pragma: no mutate True: their lengths were compared just above
                seconds=tuple(map(max, zip(*(span_times.seconds for span_times in times), strict=True)))
            )
        longest[name] = whole
    return longest


def _of_all_ranks(reports: Sequence[RankReport]) -> Observed | None:
    """Return rank 0's observations, with the code and the environments of all ranks.

    The code is a digest of all ranks' code, or None if any of it is unknown. If a version or variable has
    another value on other ranks, this value is added under a name such as `kernel of ranks 8-15`.
    """
    observed = reports[0].observed
    if observed is None:
        return None
    codes = [None if report.observed is None else report.observed.code for report in reports]
    return observed.replace(
        code=None if None in codes else documents.digest([*codes]),
        environment={**observed.environment, **_other_values(observed, reports[1:])},
    )


def _other_values(observed: Observed, others: Sequence[RankReport]) -> dict[str, str]:
    """Return the other ranks' versions and variables that differ from rank 0's, which `observed` contains.

    The names in the result contain the ranks, as in `kernel of ranks 8-15`. Only rank 0 records the versions
    of imported packages. All ranks record all variables.
    """
    variables = [name for name in observed.environment if name.isupper()]
    ranks_with = defaultdict[tuple[str, str], list[int]](list)
    for report in others:
        environment = {} if report.observed is None else report.observed.environment
        for name in dict.fromkeys((*environment, *variables)):
            value = environment.get(name, UNSET)
            if name not in DIFFER_BY_RANK and value != observed.environment.get(name, UNSET):
                ranks_with[name, value].append(report.rank)
    return {f"{name} of {named_ranks(ranks)}": value for (name, value), ranks in sorted(ranks_with.items())}


def _with_machine(observed: Observed | None, run: Run) -> Observed | None:
    if observed is None:
        return None
    kept = dict(observed.environment)
    kept.pop(FLIGHT_RECORDER_FILE, None)  # it differs in every launch
    driver = {} if run.machine.driver is None else {"driver": run.machine.driver}
    return observed.replace(environment={**kept, **driver, **gpu_setup(run.health)})


def _disagreements(reports: list[RankReport], case: Case) -> Iterator[str]:
    """Yield signs that the reports are not from one job that ran this case."""
    of_ranks: dict[str, Sequence[object]] = {
        "the number of steps": [len(report.step_s) for report in reports],
        "the number of losses": [len(report.loss) for report in reports],
        "the number of probes": [len(report.probe_s) for report in reports],
        "the number of CPU times": [len(report.cpu_s) for report in reports],
        "tokens per step": [report.tokens_per_step for report in reports],
        "the world size": [report.world_size for report in reports],
        "the clock": [report.clock for report in reports],
    }
    for what, values in of_ranks.items():
        if len(set(values)) > 1:
            # pragma: no mutate True: there is one value for each rank
            by_rank = ", ".join(f"rank {r.rank}: {value}" for r, value in zip(reports, values, strict=True))
            yield f"ranks disagree on {what} ({by_rank})"
    world = case.topology.world_size
    nodes = case.topology.nodes
    first = reports[0]  # pragma: no mutate [0] to [-1]: if ranks disagree, an earlier message reports this
    if first.world_size != world:
        yield f"a world size of {world} was requested, but the actual size was {first.world_size}"
    if nodes > 1:  # pragma: no mutate > to >=: the ranks of one node are on one host
        hosts = {report.host for report in reports}
        if len(hosts) != nodes:
            yield f"{nodes} nodes were requested, but the ranks ran on {', '.join(sorted(hosts))}"
    for report in reports:
        bad = [seconds for seconds in report.step_s if not 0 < seconds < math.inf]
        if bad:
            yield f"rank {report.rank}: a step cannot take {bad[0]} s"
    if first.loss and len(first.loss) != case.total_steps:
        yield f"{case.total_steps} losses were requested, but {len(first.loss)} were recorded"
    if len(first.step_s) != case.total_steps:
        yield f"{case.total_steps} steps were requested, but {len(first.step_s)} were taken"


def _notes(reports: list[RankReport], *, steady: bool) -> Iterator[str]:
    if not steady:
        yield "step times were still drifting at the end: raise max_warmup_steps or steps"
    for report in reports:
        summed = sum(report.step_s)
        if abs(report.wall_s - summed) > WALL_CLOCK_AGREES * report.wall_s:
            wall = f"{report.wall_s:.3f} s"
            yield f"rank {report.rank}: the steps add up to {summed:.3f} s, but the wall clock shows {wall}"
    retries = max((report.memory.alloc_retries or 0 for report in reports if report.memory), default=0)
    if retries:
        yield f"{retries} allocator retries: memory is nearly full, which slows down steps"
    if all(report.memory is not None and report.memory.peak == 0 for report in reports):
        yield (
            "a peak memory of 0 bytes cannot be compared: training fitted into memory that the process had "
            "before the workload was built. Use a larger model or micro_batch"
        )


def _bad_loss(loss: Sequence[float], rule: LossRule, case: Case) -> Failure | None:
    if not loss:
        return Failure(kind="loss", message="no loss was recorded")
    bad = [step for step, value in enumerate(loss) if not math.isfinite(value)]
    if bad:
        return Failure(kind="loss", message=f"the loss is {loss[bad[0]]} at step {bad[0]}")
    count = max(LOSS_STEPS, len(loss) // 10)
    first = fmean(loss[:count])
    last = fmean(loss[-count:])
    if rule == "finite" or last < first:
        return None
    advice = "give more steps or another learning_rate"
    if not case.framework.promises.builds_model:
        advice = 'give loss="finite" if it need not fall (random data, a learning rate that warms up, a GAN)'
    means = f"its mean is {first:.4f} in the first {count} steps and {last:.4f} in the last {count} steps"
    return Failure(kind="loss", message=f"the loss does not fall: {means}; {advice}")
