"""Note which ranks on GPUs may run far from their GPU, and which ranks share too few cores. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from perfsuite.results.counts import named_ranks, numbers
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import Health, Run

FEWEST_CORES = 2
"""Number of cores that each rank should have. A rank's Python, its backward pass and NCCL run in different
threads, and each of these can delay a kernel."""
MORE_CORES = (
    "give the job all cores of the machine (--exclusive or --cpus-per-task of salloc and sbatch, "
    "--cpuset-cpus of a container)"
)
BIND = (
    "bind each rank to cores near its GPU, for example with torchrun --numa-binding=node, or with "
    "os.sched_setaffinity in the script"
)


def core_notes(run: Run, reports: Sequence[RankReport]) -> list[str]:
    """Return notes on the cores of the ranks; empty on a CPU, whose ranks share the cores."""
    if run.machine.device == "cpu":
        return []
    per_node = run.case.topology.processes_per_node
    healths = [(f"{node.name}: ", node.health) for node in run.nodes] or [("", run.health)]
    notes = []
    for number, (node, health) in enumerate(healths):
        if health is not None:
            # The ranks of each node are consecutive.
            of_node = {
                report.rank % per_node: report for report in reports if report.rank // per_node == number
            }
            sentences = (*_few_cores(len(of_node), health), *_far_cores(of_node, health))
            notes += [f"{node}{sentence}" for sentence in sentences]
    return notes


def advice_on_few(cores: int, ranks: int, of_machine: int | None) -> str | None:
    """Return advice if the cores are so few that the ranks' threads often wait for a core; else None."""
    if cores >= FEWEST_CORES * ranks:
        return None
    late = f"ranks with fewer than {FEWEST_CORES} cores can start kernels late"
    return f"{late}, but this machine has no other cores" if cores == of_machine else f"{late}: {MORE_CORES}"


def _few_cores(ranks: int, health: Health) -> Iterator[str]:
    advice = None
    if health.cores is not None:
        advice = advice_on_few(health.cores, ranks, health.cores_of_machine)
    if advice is not None:
        cores = f"{health.cores} core{'s' * (health.cores != 1)}"
        all_cores = "" if health.cores_of_machine is None else f" (the machine has {health.cores_of_machine})"
        yield f"the job may use {cores} for {ranks} ranks{all_cores}; {advice}"


def _far_cores(reports: Mapping[int, RankReport], health: Health) -> Iterator[str]:
    """Yield a sentence for each group of ranks that may also run on cores that are not near their GPU.

    `reports` maps the number of each GPU to the report of the rank that uses the GPU. Ranks that did not
    report their cores are left out.
    """
    near = {card.index: card.near_cores for card in health.devices}
    groups: dict[tuple[str, str], list[int]] = {}
    for gpu, report in reports.items():
        cores = None if report.observed is None else report.observed.environment.get("cores")
        if cores is not None:
            groups.setdefault((cores, near.get(gpu, "")), []).append(report.rank)
    for (cores, near_cores), ranks in groups.items():
        allowed = set(numbers(cores))
        usable = allowed & set(numbers(near_cores)) if near_cores else allowed
        who = named_ranks(sorted(ranks))
        if usable != allowed:
            sharing = list(near.values()).count(near_cores)
            advice = BIND if len(usable) >= sharing else f"for cores near every GPU, {MORE_CORES}"
            yield (
                f"{who} may run on {len(allowed)} cores ({len(usable)} near the GPU). On the other cores, "
                f"steps that wait for the host are slower: {advice}"
            )
        # A rank that shares its cores with no other rank may have been bound to them, and needs no note.
        elif not near_cores and len(ranks) > 1:
            yield (
                f"{who} may each run on all {len(allowed)} cores, and NVML does not report which of them are "
                f"near their GPUs. If the machine has several sockets, {BIND}"
            )
