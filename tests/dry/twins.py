"""Compare a dry run on pretended CPU tensors with a real launch of the same case."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from perfsuite import Case, documents
from perfsuite.dry.machine import pretended, why_not_dry
from perfsuite.results.count_baseline import CountBaseline, versions_of
from perfsuite.results.counts import Counts, RankCounts, of_rank
from perfsuite.results.run import Run
from tests.dry.runs import passed
from tests.frameworks.test_base import measured, observed
from tests.samples import known
from tests.worker.loops import memory

BASELINES = Path(__file__).parents[2] / "baselines"
LATER = "max_warmup_steps5-steps20-1x2"


def check_twin(name: str, directory: Path, *, twice_held_bytes: int = 0) -> None:
    """Compare a dry run of a case with its reviewed launch.

    If the installed versions are not those of the reviewed launch, compare with a launch made now.
    """
    reviewed = documents.read(BASELINES / "counts" / "cpu" / f"{name}.json", CountBaseline)
    case = reviewed.case
    reason = why_not_dry(case, pretended(case)[0])
    if reason is not None:
        pytest.skip(reason)  # torchtitan needs a newer torch than the lowest
    dry = passed(case, directory / "dry")
    is_of_its_versions = versions_of(dry) == reviewed.versions
    real = reviewed.counts if is_of_its_versions else measured(case, directory / "real").counts
    check_ranks(dry, real, twice_held_bytes=twice_held_bytes)


def check_ranks(dry: Run, real: Sequence[RankCounts], *, twice_held_bytes: int = 0) -> None:
    """Assert that a dry run has the same counts as a launch.

    A dry run may hold `twice_held_bytes` twice at its peak.
    """
    assert dry.counts
    for entry in dry.counts:
        for rank in entry.ranks:
            is_ddp = "DistributedDataParallel" in observed(dry).settings["wrapper"]
            _check(
                entry.counts, known(of_rank(real, rank)), is_ddp=is_ddp, case=dry.case, held=twice_held_bytes
            )


def _check(dry: Counts, real: Counts, *, is_ddp: bool, case: Case, held: int) -> None:
    for name in ("collectives", "flops", "host_reads", "device_copies"):
        assert getattr(dry, name) == getattr(real, name), name
    # If tensors are split, DTensor's collectives make copies that no dispatch mode sees.
    splits_tensors = case.framework.model_dump().get("tensor_parallel", 1) > 1
    kernels = Counter[str](real.kernels)
    ops = Counter[str](real.ops)
    if not splits_tensors:
        kernels, ops = _without_gloos_copies(real)
    assert Counter[str](dry.kernels) == kernels
    if is_ddp:
        assert _divided_by_the_hook(Counter(dry.ops)) == _divided_by_the_hook(ops)
    else:
        assert Counter(dry.ops) == ops
    pretended_memory = memory(dry)
    real_memory = memory(real)
    if not splits_tensors:  # with split tensors, gloo's threads hold tensors for varying times
        assert 0 <= pretended_memory.peak - real_memory.peak <= held
    assert pretended_memory.growth == real_memory.growth


def _without_gloos_copies(counts: Counts) -> tuple[Counter[str], Counter[str]]:
    """Return kernels by phase and calls by operator, without gloo's copies of the tensors that it scatters.

    NCCL makes no such copies.
    """
    kernels = Counter[str](counts.kernels)
    ops = Counter[str](counts.ops)
    for collective in counts.collectives:
        if collective.kind == "reduce_scatter":
            kernels[collective.phase] -= collective.count
            ops["aten.copy_"] -= collective.count
    return kernels, ops


def _divided_by_the_hook(ops: Counter[str]) -> Counter[str]:
    """Return the calls as if DDP divided gradients in a communication hook.

    With a hook, DDP copies gradients into its buckets and then divides the buckets. Without one, it does both
    at once.
    """
    together = ops["aten.mul"] + ops["aten.copy_"]
    return ops + Counter({"aten.mul": -ops["aten.mul"], "aten.copy_": together - ops["aten.copy_"]})
