"""Writes what a dry run predicts in words: memory, and the least time of a step."""

from __future__ import annotations

from functools import partial

from perfsuite.case.case import Unit
from perfsuite.results.amounts import amount, duration, rate
from perfsuite.results.dry_facts import DryFacts, Fit, Roofline

_size = partial(amount, unit="bytes")


def lines(facts: DryFacts, unit: Unit = "tokens") -> list[str]:
    """Return a prediction line by line; `unit` is what the case counts."""
    memory = [] if facts.fit is None else _memory(facts.fit)
    return memory if facts.roofline is None else [*memory, *_speed(facts.roofline, unit)]


def _memory(fit: Fit) -> list[str]:
    outside = [f"{part.name} {_size(part.low)} to {_size(part.high)}" for part in fit.outside]
    whole = f"the whole model, before it is sharded {_size(fit.built)}"
    return [
        f"{fit.verdict}: rank {fit.rank} needs {_size(fit.least)} to {_size(fit.most)} of {_size(fit.card)}",
        *([whole] if fit.built > fit.allocated else []),
        f"reserved by the caching allocator {_size(fit.reserved)} ({_size(fit.reserved_expandable)} with "
        f"expandable segments), allocated {_size(fit.allocated)}, live tensors {_size(fit.live)}",
        f"outside the allocator: {', '.join(outside)}",
    ]


def _speed(limit: Roofline, unit: Unit) -> list[str]:
    """The two limits, and which of them counts."""
    compute = f"{limit.flops / 1e12:.3g} TFLOP at {limit.peak_flops / 1e12:.4g} TFLOP/s"
    wire = f"{_size(limit.wire_bytes)} between GPUs of a machine"
    if limit.link_bytes_per_s is None:
        wire += ", whose link is unknown: not counted"
    elif limit.wire_bytes:
        wire += f" at {limit.link_bytes_per_s / 1e9:.0f} GB/s take {duration(limit.wire_s)}"
    if limit.between_machines_bytes:
        wire += f"; {_size(limit.between_machines_bytes)} between machines are not counted"
    return [
        f"a step takes {duration(limit.step_s)} at least, by {limit.bound_by}: at most "
        f"{rate(limit.tokens_per_s)} {unit}/s",
        f"{compute} take {duration(limit.compute_s)}",
        wire,
    ]
