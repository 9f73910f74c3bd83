"""Find work of the counted step that the dispatch mode did not see. Such work makes the counts useless.

Some hidden work is not found, because it leaves no trace: it takes time, but computes no gradients and
exchanges no data.
Other Python threads that compute do not make the counts useless, because they often belong to loaders and
loggers. Only the number of these threads is returned.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
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

Gradients = list[tuple[Tensor, Tensor]]  # updated parameters, each with this rank's part of its gradient
UNSEEN_GRADIENTS = 0.1
"""If unseen work computed at least this share of the gradients' elements, it is reported. Less is allowed,
because some packages have kernels that bypass the dispatcher. These kernels compute the gradients of small
parameters, such as those of norms and of a Mamba's scan."""
ONE_SIDED = ("symm_mem.", "nvshmem.")  # prefixes of operators whose messages belong to no process group
SEVERAL = frozenset({
    "c10d.reduce_scatter_", "c10d.monitored_barrier_", "c10d.allgather_coalesced_",
    "c10d.allgather_into_tensor_coalesced_", "c10d.reduce_scatter_tensor_coalesced_",
})  # fmt: skip
"""Collectives that a backend, for example gloo, can split into several collectives."""


class Watch:
    """Watches one counted step, from its beginning."""

    def __init__(self, collectives_begun: Callable[[], int | None] = replicas.collectives_begun) -> None:
        self._threads = _cpu_s_of_threads()
        self._started = calls.started_threads
        calls.watch_packages()
        self._calls = calls.seen.copy()
        self._collectives_begun = collectives_begun
        self._collectives = collectives_begun()
        self.stepped: list[Any] = []  # the optimizers that have stepped

    def other_threads(self) -> int:
        """Return how many other Python threads started in the step, or used CPU time in it.

        A thread that only waits takes no CPU time. Any CPU time counts, because a thread that makes a small
        batch takes only a little.
        """
        now = _cpu_s_of_threads()
        busy = sum(now[thread] > before for thread, before in self._threads.items() if thread in now)
        return busy + calls.started_threads - self._started

    def reasons(self, counter: StepCounter, counts: Counts, model: nn.Module) -> tuple[str, ...]:
        """Return the reasons why the step did more work than `counts` says.

        Call this after `counter` was exited, and before the training continues.
        """
        one_sided = [name for name in counts.ops if name.startswith(ONE_SIDED)]
        gradients = _gradients(self.stepped)
        return (
            *(f"{said} ({times}x)" for said, times in (calls.seen - self._calls).items()),
            *self._other_collectives(counter, counts),
            *(f"{name} ran, and its messages are not counted" for name in one_sided),
            *_other_gradients(counter, model, gradients),
            *_too_few_flops(counter, counts, model, gradients),
        )

    def _other_collectives(self, counter: StepCounter, counts: Counts) -> Iterator[str]:
        """Report collectives that were not counted.

        The sequence numbers of process groups show how many collectives began, whoever called them.
        """
        now = self._collectives_begun()
        if now is None or self._collectives is None or not SEVERAL.isdisjoint(counter.collectives):
            return
        seen = sum(each.count for each in counts.collectives if each.ranks > 1)
        began = now - self._collectives
        if began > seen:
            yield (
                f"{began} collectives began in the process groups, but the counting saw only {seen} of them: "
                "the others were called by another thread, or without torch's dispatcher"
            )


def _cpu_s_of_threads() -> Mapping[int, float]:
    """Return the CPU seconds of all Python threads, except for this thread and perfsuite's threads.

    The keys are the ids of the threads. The seconds are read from /proc. Python's own clocks of threads are
    undefined once a thread has ended, and `threading` also lists threads of C++ code that have ended.
    """
    seconds = {}
    for thread in threading.enumerate():
        number = thread.native_id
        if number in (None, threading.get_native_id()) or thread.name.startswith("perfsuite"):
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            seconds[number] = int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) / 1e9
    return seconds


def _other_gradients(counter: StepCounter, model: nn.Module, gradients: Gradients) -> Iterator[str]:
    """Report gradients that an optimizer used, although no counted operator computed them."""
    if software.compiled_graphs():  # the kernels of compiled graphs are not seen
        return
    used = [(each, gradient) for each, gradient in gradients if gradient.numel() > 1]
    unseen = [(each, grad) for each, grad in used if not counter.computed(grad) and bool(grad.any())]
    missing, whole = (sum(gradient.numel() for _, gradient in some) for some in (unseen, used))
    if unseen and missing >= UNSEEN_GRADIENTS * whole:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        first = names.get(id(unseen[0][0]), "a parameter that is not in the model")
        yield (
            f"none of the counted operators computed the gradients of {len(unseen)} of {len(used)} "
            f"parameters, such as {first}"
        )


def _too_few_flops(
    counter: StepCounter, counts: Counts, model: nn.Module, gradients: Gradients
) -> Iterator[str]:
    """Report if too few FLOPs were seen. A linear weight's gradient takes at least 2 FLOPs per element."""
    if counts.without_flops:  # operators without a formula explain the missing FLOPs
        return
    weights = {id(layer.weight) for layer in filter(adapters.is_linear, model.modules())}
    products = [gradient for each, gradient in gradients if id(each) in weights]
    elements = sum(gradient.numel() for gradient in products if counter.computed(gradient))
    seen = sum(flops for phase, flops in counts.flops.items() if phase != "optimizer")
    if seen < 2 * elements:
        yield (
            f"the gradients of {elements:,} weights of linear layers take at least {2 * elements:,} FLOP, "
            f"but only {seen:,} were seen"
        )


def _gradients(optimizers: list[Any]) -> Gradients:
    """Return the dense gradients of the optimizers' parameters. Sparse gradients cannot be checked."""
    parameters = {id(p): p for p in parameters_of(*optimizers) if p.grad is not None}
    gradients = [(parameter, local(parameter.grad)) for parameter in parameters.values()]
    return [(parameter, gradient) for parameter, gradient in gradients if gradient.layout == torch.strided]
