"""The faults of `perfsuite selftest` that change the work of a step. Counts show them in one launch."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from perfsuite.case.case import Case, Topology
from perfsuite.case.fault import Structural
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, checked, failed, unknown
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.fsdp2 import FSDP2
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import Launching, launch_once
from perfsuite.results.count_baseline import from_runs
from perfsuite.results.run import Run
from perfsuite.verdict import exact


class Base(NamedTuple):
    """A case, and the finding that its counts must show for each fault."""

    case: Case
    faults: Mapping[Structural, str]  # fault -> text that the `field` of its finding must contain


def bases(machine: Machine) -> tuple[Base, ...]:
    """Return the cases, on two ranks if the machine has room."""
    replicated = Case(
        model="llama-tiny",
        framework=DDP(),
        sequence_length=32,
        micro_batch=2,
        activation_checkpointing="full",
        topology=Topology(processes_per_node=min(2, machine.devices)),
        hardware="gpu" if machine.device == "cuda" else "cpu",
        max_warmup_steps=4,
        steps=10,
        timeout_s=300,
    )
    sharded = replicated.replace(framework=FSDP2(), precision="bf16", activation_checkpointing="none")
    of_replicated: dict[Structural, str] = {
        "checkpointing-lost": "FLOPs in recompute",
        "host-read": "host reads in forward",
        "small-buckets": "all_reduce",
        "optimizer-foreach": "kernels in optimizer",
        "eager-attention": "kernels",
        "weight-copy": "peak",
    }
    return (
        Base(replicated, of_replicated),
        Base(sharded, {"reshard-toggled": "all_gather", "fp32-communication": "reduce_scatter"}),
    )


def inject_structural(
    machine: Machine, *, tried: Sequence[Base] | None = None, launch: Callable[..., Run] = launch_once
) -> Iterator[Row]:
    """Test each fault, and each case without a fault, in one launch each. Yields a row per launch.

    `tried` are the cases with their faults, by default `bases`.
    """
    with tempfile.TemporaryDirectory(prefix="perfsuite-selftest-") as directory:
        for base in bases(machine) if tried is None else tried:
            reason = unsupported(base.case, machine)
            if reason is not None:
                yield from (unknown(f"inject {kind}", "not tested here", reason) for kind in base.faults)
            else:
                yield from _counted(base, machine, Path(directory), launch)


def _counted(base: Base, machine: Machine, directory: Path, launch: Callable[..., Run]) -> Iterator[Row]:
    def launched(name: str, inject: str | None = None) -> Run:
        return launch(base.case, machine, directory / f"{base.case.id}-{name}", Launching(inject=inject))

    before = launched("before")
    name = base.case.framework.name
    why = _why_nothing_counted(before)
    if why is not None:
        yield failed(name, why)
        return
    for kind, field in base.faults.items():
        yield _row(f"inject {kind}", launched(kind, kind), before, field)
    yield _row(f"{name} without a fault", launched("clean"), before, None)


def _row(name: str, run: Run, before: Run, field: str | None) -> Row:
    """Return the row of a launch. The gate must find `field`, or nothing at all if `field` is None."""
    expected = f"expected {field or 'no finding'}"
    why = _why_nothing_counted(run)
    if why is not None:
        return failed(name, why, expected)
    check = exact.check([run], from_runs([before]))
    findings = check.findings if check is not None else ()
    named = [finding for finding in findings if field is not None and field in finding.field]
    observed = "; ".join(shown.sentence for shown in (named[:1] or findings)) or "the counts are the same"
    return checked(name, observed, ok=bool(named) if field else not findings, advice=expected)


def _why_nothing_counted(run: Run) -> str | None:
    if run.failure is not None:
        return run.failure.message
    return None if run.counts else "; ".join(("nothing was counted", *run.notes))
