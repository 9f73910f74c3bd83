import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from perfsuite.case.case import Case
from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import Workload
from perfsuite.frameworks.common import loop
from perfsuite.frameworks.common.model import build_model, synthetic_batches
from tests.frameworks.common.test_model import ALONE, CPU, TINY


def workload(case: Case) -> Workload:
    return loop.data_parallel_workload(case, ALONE, build_model(case, CPU), autocast=True)


def losses(case: Case, steps: int = 4) -> list[float]:
    return [float(loss) for loss in workload(case).run(steps)]


class Echo(torch.nn.Module):
    """A model whose loss is the mean of the tokens, times a weight."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.events = events

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        self.events.append("forward")
        return SimpleNamespace(loss=self.weight * labels.float().mean())


PARTS = 3  # micro-batches of a step. They do not divide the number of distinct batches
IN_PARTS = TINY.replace(gradient_accumulation=PARTS)


def traced() -> tuple[Workload, list[str]]:
    """Return a training with several micro-batches per step, and a list of its events."""
    events: list[str] = []

    @contextmanager
    def sync(is_last: bool) -> Iterator[None]:
        events.append("reduced (" if is_last else "kept (")
        yield
        events.append(")")

    def backward(loss: Tensor) -> Tensor:
        events.append("backward")
        (loss / PARTS).backward()
        return loss / PARTS

    made = loop.training(
        IN_PARTS, ALONE, Echo(events), backward=backward, sync=sync, step=lambda: events.append("step")
    )
    return made, events


def test_reduces_gradients_after_the_last_batch() -> None:
    made, events = traced()
    made.run(1)
    assert " ".join(events) == (
        "kept ( forward backward ) kept ( forward backward ) reduced ( forward backward ) step"
    )


def test_losses_are_means_of_batches_that_repeat() -> None:
    means = [float(batch.float().mean()) for batch in synthetic_batches(IN_PARTS, 0, CPU)]
    repeated = itertools.cycle(means)
    steps = len(means) // PARTS  # the last of them begins again with the first batch
    expected = [fmean(itertools.islice(repeated, PARTS)) for _ in range(1 + steps)]
    made, _ = traced()
    assert [float(loss) for loss in made.run(1)] == pytest.approx(expected[:1])
    assert [float(loss) for loss in made.run(steps)] == pytest.approx(expected[1:])


def test_no_step_waits_for_the_device() -> None:
    """A fake tensor has no value, so reading it, for example with `.item()`, would raise an error."""
    with FakeTensorMode():
        made, _ = traced()
        assert all(isinstance(loss, FakeTensor) and not loss.requires_grad for loss in made.run(3))


def test_micro_batches_train_as_one_large_batch() -> None:
    """Until a sequence repeats, training is given the same tokens, whether in two parts or in one."""
    whole = losses(TINY.replace(micro_batch=2))
    parts = losses(TINY.replace(micro_batch=1, gradient_accumulation=2))
    assert parts == pytest.approx(whole, rel=1e-4)
    assert parts[-1] < parts[0]


def test_gradient_scaler_leaves_losses_unscaled() -> None:
    whole = losses(TINY)
    scaled = losses(TINY.replace(precision="fp16-mixed"))
    assert scaled == pytest.approx(whole, rel=1e-3)
    assert scaled != whole


def test_skipped_scaler_steps_are_not_steps() -> None:
    diverging = workload(TINY.replace(precision="fp16-mixed", learning_rate=1000))
    with pytest.raises(MismatchError, match=r"^fp16-mixed: .* gradients were not finite .* skipped"):
        diverging.run(5)
