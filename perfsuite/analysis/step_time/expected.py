"""Predict the time of a case's step from a dry run, or say why that is impossible."""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.analysis.step_time.kernels import Device
from perfsuite.analysis.step_time.links import Links
from perfsuite.analysis.step_time.prediction import by_host, step_time
from perfsuite.analysis.step_time.streams import HostTimes, MachineSpeeds, reported_step
from perfsuite.case import hardware
from perfsuite.case.case import Case
from perfsuite.errors import PredictionError
from perfsuite.results.counts import Counts
from perfsuite.results.device_log import Communicate, Entry
from perfsuite.results.dry_facts import Expected, Parallelism

OF_EXPERTS = ("aten._grouped_mm", "aten._scaled_grouped_mm")  # prefixes of operators
OF_ACTIVATIONS = ("all_reduce", "reduce_scatter", "all_to_all")  # collectives of activations in forward
OF_PARAMETERS = ("all_gather", "reduce_scatter")
FEW_BYTES = 0.01  # small all-reduces, such as that of the loss, send at most this share of all bytes


def speeds(machine: hardware.Machine, case: Case, host: HostTimes | None = None) -> MachineSpeeds:
    """Return the speeds of a machine for a case. Raises `PredictionError` if the GPU's speeds are unknown."""
    device = Device.of(machine.device_name, machine.product)
    links = Links.of(
        device.speed.collective_gb_s, machine.interconnect, devices=case.topology.processes_per_node
    )
    return MachineSpeeds(device, links, host or HostTimes())


def expected(
    log: Sequence[Entry], counts: Counts, case: Case, machine: hardware.Machine, tokens: int
) -> Expected:
    """Return the expected time of a step. `tokens` is the number of tokens of all ranks in one step.

    Raises `PredictionError`, which says what is missing.
    """
    reason = why_unknown(counts, case, machine)
    if reason is not None:
        raise PredictionError(reason)
    its = speeds(machine, case)
    step = reported_step(log)
    return Expected(
        tokens=tokens,
        published=its.device.speed.published,
        parallelism=parallelism(step),
        by_host=by_host(step, its),
        **step_time(step, its)._asdict(),
    )


def parallelism(step: Sequence[Entry]) -> Parallelism:
    """Return how the ranks share the work of a step."""
    calls = [entry for entry in step if isinstance(entry, Communicate) and entry.ranks > 1]
    total = sum(call.bytes for call in calls)
    within_layers = sum(
        call.bytes for call in calls if call.phase == "forward" and call.kind in OF_ACTIVATIONS
    )
    if within_layers > FEW_BYTES * total:
        return "within layers"
    if any(call.kind in OF_PARAMETERS for call in calls):
        return "sharded"
    return "replicated" if calls else "none"


def why_unknown(counts: Counts, case: Case, machine: hardware.Machine) -> str | None:
    """Return why the time of a step cannot be predicted from its log, or None if it is predictable."""
    if counts.compiled is not None:
        return "the model is compiled, and a dry run does not know how its kernels are fused"
    if any(collective.kind in ("send", "recv") for collective in counts.collectives):
        return "the ranks of a pipeline wait for each other, which the log of one rank does not show"
    if any(operator.startswith(OF_EXPERTS) for operator in counts.ops):
        return "a dry run assumes that the experts get equally many tokens"
    if counts.without_flops:
        return f"no formula gives the FLOPs of {', '.join(sorted(counts.without_flops))}"
    if machine.emulates(case.precision):
        return "the GPU emulates bf16, and no datasheet gives its speed"
    return None
