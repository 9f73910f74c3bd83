"""Helpers: count the work of a step.

The work is either a function or a training that is driven like a rank's.
"""

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from perfsuite.results.counts import COUNTED_STEP, Counts, StepMemory, StepsToCount
from perfsuite.worker.counting.counter import StepCounter
from perfsuite.worker.counting.steps import ONE_STEP, Counting
from tests.samples import known

INPUTS = torch.ones(8, 16)


def memory(counts: Counts) -> StepMemory:
    return known(counts.memory)


def counted(step: Callable[[], object]) -> Counts:
    """Return the counts of this work as one step."""
    with StepCounter([]) as counter:
        step()
    counts: Counts = counter.end_step()
    assert counter.error is None
    return counts


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_a_copy(work: Callable[[], object]) -> Any:
    """Return the result of `work` in a copy of this process, which has no other threads.

    What the work changes ends with the copy.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sending.send(work()))
    child.start()
    sending.close()
    result = receiving.recv()
    child.join()
    return result


class Loop:
    """A training loop with a `Counting` around its steps. Tests replace the model or the training."""

    def __init__(self, steps: StepsToCount = ONE_STEP) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.counting = Counting(lambda: self.model, steps)
        self.number = 0  # the number of the running step, starting at 1
        self.counted_at: list[int] = []  # the steps in which a counter was active

    def backward(self) -> None:
        self.model(INPUTS).square().mean().backward()

    def run(self, train: Callable[["Loop"], object] = backward, steps: int = COUNTED_STEP + 1) -> Counting:
        for self.number in range(1, steps + 1):
            if isinstance(_get_current_dispatch_mode(), StepCounter):
                self.counted_at.append(self.number)
            self.optimizer.zero_grad(set_to_none=False)
            train(self)
            self.counting.before_optimizer_step(self.optimizer)
            self.optimizer.step()
            self.counting.end_step()
            assert not isinstance(_get_current_dispatch_mode(), StepCounter)
            torch.ones(100).sum()  # between steps: not counted
            self.counting.begin_step()
        return self.counting
