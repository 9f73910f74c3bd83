"""Find work of the counted step that its dispatch mode did not see; the counts then prove nothing.

No rule finds work that trains nothing, exchanges nothing and leaves no trace here: only a clock sees that.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from perfsuite.frameworks.common import adapters
from perfsuite.results.counts import Counts
from perfsuite.worker.counting.counter import StepCounter
from perfsuite.worker.hooks import calls
from perfsuite.worker.observation import replicas, software
from perfsuite.worker.observation.optimizers import parameters_of
from perfsuite.worker.observation.replicas import local

Gradients = list[tuple[Tensor, Tensor]]  # parameters that stepped, with this rank's part of each gradient
UNSEEN_GRADIENTS = 0.1
"""Share of the gradients' elements that unseen work may have computed. Kernels of packages that bypass the
dispatcher compute gradients of small parameters, such as those of norms and of a Mamba's scan."""
ONE_SIDED = ("symm_mem.", "nvshmem.")  # name prefixes of operators whose messages belong to no group
SEVERAL = frozenset({
    "c10d.reduce_scatter_", "c10d.monitored_barrier_", "c10d.allgather_coalesced_",
    "c10d.allgather_into_tensor_coalesced_", "c10d.reduce_scatter_tensor_coalesced_",
})  # fmt: skip
"""Collectives that a backend may split into several, as gloo does."""


class Watch:
    """Watches one counted step, from its beginning."""

    def __init__(self) -> None:
        calls.watch_packages()
        self._calls = calls.seen.copy()
        self._collectives = replicas.collectives_begun()
        self.stepped: list[Any] = []  # the optimizers

    def reasons(self, counter: StepCounter, counts: Counts, model: nn.Module) -> tuple[str, ...]:
        """Return why the step did more than `counts` says. Call it first of all after `counter` is left."""
        one_sided = [name for name in counts.ops if name.startswith(ONE_SIDED)]
        gradients = _gradients(self.stepped)
        return (
            *(f"{said} ({times}x)" for said, times in (calls.seen - self._calls).items()),
            *self._other_collectives(counter, counts),
            *(f"{name} ran, whose messages are not counted" for name in one_sided),
            *_other_gradients(counter, model, gradients),
            *_too_few_flops(counter, counts, model, gradients),
        )

    def _other_collectives(self, counter: StepCounter, counts: Counts) -> Iterator[str]:
        """Compare with the process groups' sequence numbers, which count the collectives of all callers."""
        now = replicas.collectives_begun()
        if now is None or self._collectives is None or not SEVERAL.isdisjoint(counter.collectives):
            return
        seen = sum(each.count for each in counts.collectives if each.ranks > 1)
        began = now - self._collectives
        if began > seen:
            yield (
                f"{began} collectives began in the process groups, and {seen} of them were seen: others are "
                "called by another thread, or without torch's dispatcher"
            )


def _other_gradients(counter: StepCounter, model: nn.Module, gradients: Gradients) -> Iterator[str]:
    """Report gradients that an optimizer used but that no seen operator computed from other tensors."""
    if software.compiled_graphs():  # their kernels are not seen
        return
    used = [(each, gradient) for each, gradient in gradients if gradient.numel() > 1]
    unseen = [(each, grad) for each, grad in used if not counter.computed(grad) and bool(grad.any())]
    missing, whole = (sum(gradient.numel() for _, gradient in some) for some in (unseen, used))
    if unseen and missing >= UNSEEN_GRADIENTS * whole:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        first = names.get(id(unseen[0][0]), "one that the model does not have")
        yield (
            f"no operator that was seen computed the gradients of {len(unseen)} of {len(used)} parameters, "
            f"as {first}"
        )


def _too_few_flops(
    counter: StepCounter, counts: Counts, model: nn.Module, gradients: Gradients
) -> Iterator[str]:
    """Report too few FLOPs: the gradient of a linear weight takes at least 2 per element, without forward."""
    if counts.without_flops:  # explains why fewer are seen
        return
    weights = {id(layer.weight) for layer in filter(adapters.is_linear, model.modules())}
    products = [gradient for each, gradient in gradients if id(each) in weights]
    elements = sum(gradient.numel() for gradient in products if counter.computed(gradient))
    seen = sum(flops for phase, flops in counts.flops.items() if phase != "optimizer")
    if seen < 2 * elements:
        yield (
            f"the gradients of {elements:,} weights of linear layers take at least {2 * elements:,} FLOP, "
            f"and {seen:,} were seen"
        )


def _gradients(optimizers: list[Any]) -> Gradients:
    """Return the dense gradients of the optimizers' parameters. A sparse one shows nothing."""
    parameters = {id(p): p for p in parameters_of(*optimizers) if p.grad is not None}
    gradients = [(parameter, local(parameter.grad)) for parameter in parameters.values()]
    return [(parameter, gradient) for parameter, gradient in gradients if gradient.layout == torch.strided]
