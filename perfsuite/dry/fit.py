"""Predict the memory that a rank needs on its GPU, and judge whether the card has enough. Pure.

The prediction adds cuBLAS's workspaces, CUDA's context and NCCL's buffers to the counted memory of a step.
The sizes of these three come from published sources.
"""

from collections.abc import Sequence

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.dry.allocator import replay
from perfsuite.results.counts import Counts, merged
from perfsuite.results.device_log import Entry, peak_of_live
from perfsuite.results.dry_facts import DryFacts, Fit, FitWord, MemoryPart, roofline
from perfsuite.results.rank_report import RankReport

MIB = 1 << 20
TIGHT_FROM = 0.8
"""Share of the card's memory above which a case is `tight`. The remainder covers memory that is not
predicted: kernels need scratch memory, and drivers differ in the memory that they reserve."""

CONTEXT = MemoryPart(
    name="CUDA context",
    low=300 * MIB,
    high=1400 * MIB,
    source=(
        "driver and loaded kernels; about 300 MB since CUDA 11.7 (pytorch issue 107667), "
        "1.3 GiB measured on an H100 (CUDA 13.0, cuDNN's attention)"
    ),
)
NCCL_LOW = 100 * MIB
NCCL_HIGH = 1024 * MIB
"""Memory of one communicator, in bytes. Each connection of a channel has buffers of 10 to 12 MiB (nccl issue
1685). A ring has a few channels over PCIe, and up to 32 over NVLink. One report measured 1.6 GB for a
communicator and the CUDA context together (nccl issue 864)."""


def predict(
    log: Sequence[Entry],
    counts: Counts,
    machine: Machine,
    rank: int,
    *,
    built: int = 0,
    builds_as_launched: bool = False,
) -> Fit | None:
    """Predict a rank's memory from `log` and `counts`. Returns None on a CPU.

    `built` is the size in bytes of the model that the rank builds before it is sharded.
    `builds_as_launched` says whether the log shows the memory that a launch needs to build the model.
    """
    if machine.device == "cpu":
        return None
    workspace = workspace_bytes(machine)
    cache = replay(log, workspace_bytes=workspace)
    late = replay(log, workspace_bytes=workspace, events_end="at the end of the step")
    expandable = replay(log, workspace_bytes=workspace, expandable_segments=True)
    later, later_step = _later_peak(counts)
    fit = Fit(
        rank=rank,
        live=peak_of_live(log),
        allocated=cache.peak_allocated,
        reserved=cache.peak_reserved,
        # In `late`, blocks become free later than in `cache`. This can leave fewer gaps, so `late` can even
        # need less memory than `cache`.
        reserved_upper=max(cache.peak_reserved, late.peak_reserved),
        reserved_expandable=expandable.peak_reserved,
        built=built,
        start=cache.peak_before_reset if builds_as_launched else 0,
        later=later,
        later_step=later_step,
        outside=(CONTEXT, *_nccl(counts)),
        card=machine.memory_bytes,
        card_is_nominal=machine.product is not None and machine.product.usable_gib is None,
        verdict="fits",
    )
    verdict = judge(least=fit.least, most=fit.most, card=fit.card)
    # With fusion, compiled code might need less memory than its operators.
    if counts.compiled is not None and verdict == "does not fit":
        verdict = "tight"
    return fit.replace(verdict=verdict)


def judge(*, least: int, most: int, card: int) -> FitWord:
    """Judge whether a card has enough memory. `least` and `most` are as in `Fit`, in bytes.

    If even `least` does not fit, no setting of the allocator helps. If the card is almost full, the allocator
    returns its cache to CUDA again and again. This stalls steps long before an allocation fails.
    """
    if least > card:
        return "does not fit"
    return "tight" if most > TIGHT_FROM * card else "fits"


def workspace_bytes(machine: Machine) -> int:
    """Return the size in bytes of a cuBLAS handle's workspace.

    The sizes are those of torch's `parseChosenWorkspaceSize` (CublasHandlePool.cpp).
    """
    capability = machine.compute_capability
    return 32 * MIB if capability is not None and capability >= (9, 0) else 2 * 4 * MIB + 8 * 16 * 1024


def facts_of(reports: Sequence[RankReport], case: Case, machine: Machine) -> DryFacts:
    """Combine the ranks' reports.

    Return the highest memory prediction of a rank, and the lower bound for the time of a step (the roofline).
    """
    fits = [report.fit for report in reports if report.fit is not None]
    counts = merged({report.rank: report.counts for report in reports if report.counts is not None})
    return DryFacts(
        fit=max(fits, key=lambda fit: fit.most, default=None),
        roofline=roofline(counts, case, machine, tokens=reports[0].tokens_per_step),
    )


def _later_peak(counts: Counts) -> tuple[int, int | None]:
    """Return the highest peak of live tensors in counted steps that follow the log, and the step's number.

    Returns 0 and None if no such step has a known peak.
    """
    highest: tuple[int, int | None] = (0, None)
    for step in counts.also_counted:
        its = counts.in_step(step)
        if its is not None and its.memory is not None and its.memory.peak > highest[0]:
            highest = (its.memory.peak, step)
    return highest


def _nccl(counts: Counts) -> tuple[MemoryPart, ...]:
    groups = {(each.ranks, each.apart) for each in counts.collectives if each.ranks > 1}
    if not groups:
        return ()
    return (
        MemoryPart(
            name=f"NCCL, {len(groups)} communicator{'s' if len(groups) > 1 else ''}",
            low=len(groups) * NCCL_LOW,
            high=len(groups) * NCCL_HIGH,
            source="buffers for each channel and connection (nccl issues 1685 and 864)",
        ),
    )
