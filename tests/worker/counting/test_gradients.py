"""Test the norm that gradients have before they are clipped, in the counted step of a loop."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from perfsuite.results.counts import COUNTED_STEP
from perfsuite.worker.counting import gradients
from perfsuite.worker.counting.gradients import NormBeforeClipping
from perfsuite.worker.counting.steps import Counting
from perfsuite.worker.observation import scalers
from perfsuite.worker.observation.optimizers import parameters_of
from tests.packages import Packages
from tests.samples import known
from tests.worker import motor
from tests.worker.loops import INPUTS, Loop

Clip = Callable[[nn.Module], object]


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Notice clipping and backward, and restore both functions afterwards."""
    for owner in (nn.utils, nn.utils.clip_grad):
        for name in gradients.CLIPPING:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    gradients.watch()
    yield
    assert gradients._reader is None, "perfsuite left its reader behind"


def norms(clip: Clip | None = None, scale: float = 1.0) -> tuple[Counting, float]:
    """Run a loop that clips like this.

    Return its counting, and the squared norm before clipping in the counted step.
    """
    seen = list[float]()

    def step(loop: Loop) -> None:
        (loop.model(INPUTS).square().mean() * scale).backward()
        seen.append(sum(float(known(parameter.grad).square().sum()) for parameter in loop.model.parameters()))
        if clip is not None:
            clip(loop.model)

    counting = Loop().run(step)
    return counting, seen[COUNTED_STEP - 1]


def clip_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, 1e-3)


def clip_with_norm(model: nn.Module) -> None:
    parameters = list(model.parameters())
    total = nn.utils.get_total_norm([known(parameter.grad) for parameter in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 1e-3, total)


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-5),
        lambda model: nn.utils.clip_grad.clip_grad_norm_(model.parameters(), 1e-3),
        clip_with_norm,
        clip_each,
    ],
)
def test_the_norm_is_read_before_clipping(clip: Clip) -> None:
    counting, before = norms(clip)
    assert counting.unclipped_squares == pytest.approx(before)
    assert known(counting.gradient_squares) < 0.1 * before
    assert counting.notes == []


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model.parameters(),
        lambda model: [*model.parameters()],
        lambda model: model,
        lambda model: model.weight,
    ],
    ids=["generator", "list", "module", "tensor"],
)
def test_clipping_for_another_optimizer_is_ignored(given: Callable[[nn.Module], Any]) -> None:
    """A generator and its discriminator, for example, are clipped separately."""
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    own = nn.Parameter(torch.ones(1))
    own.grad = torch.full((1,), 3.0)
    norm = NormBeforeClipping(
        torch.optim.SGD([own]), lambda function, *args: function(*args), lambda: parameters_of(optimizer)
    )
    norm.enter()
    try:
        gradients._clips(given(other))
        own.grad = torch.full((1,), 5.0)
        gradients._clips([own])
    finally:
        norm.leave()
    assert norm.result(None) == 25


def test_noticing_a_clip_consumes_no_parameters() -> None:
    model = nn.Linear(2, 2)
    parameters = model.parameters()
    assert gradients._clipped_parameters(parameters) == [*model.parameters()]
    assert [*parameters] == [*model.parameters()]


def test_unclipped_norm_is_that_of_the_optimizer() -> None:
    counting, before = norms()
    assert counting.unclipped_squares == counting.gradient_squares == pytest.approx(before)


def test_reading_adds_no_kernel_to_the_step() -> None:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    ops = known(norms(clip)[0].counts).ops
    assert ops.get("aten._foreach_norm", 0) + ops.get("aten.linalg_vector_norm", 0) <= 3, (
        "only the kernels of the clipping"
    )


def test_custom_clipping_leaves_the_norm_unknown() -> None:
    def scaled(model: nn.Module) -> None:
        for parameter in model.parameters():
            known(parameter.grad).mul_(0.1)

    counting, _ = norms(scaled)
    assert counting.unclipped_squares is None
    assert counting.gradient_squares is not None
    assert "none of the known clipping functions was called" in counting.notes[0]


def test_unseen_backward_leaves_the_norm_unknown() -> None:
    def step(loop: Loop) -> None:
        parameters = list(loop.model.parameters())
        computed = torch.autograd.grad(loop.model(INPUTS).square().mean(), parameters)
        for parameter, gradient in zip(parameters, computed, strict=True):
            parameter.grad = gradient

    counting = Loop().run(step)
    assert counting.unclipped_squares is None
    assert counting.gradient_squares is not None
    assert counting.notes == []


@pytest.mark.parametrize("clips", [True, False])
def test_a_skipped_attempt_of_fp16_is_forgotten(clips: bool) -> None:
    seen = list[float]()

    def step(loop: Loop) -> None:
        for factor in (torch.inf, 1.0):
            loop.optimizer.zero_grad()
            (loop.model(INPUTS).square().mean() * factor).backward()
            seen.append(
                sum(float(known(parameter.grad).square().sum()) for parameter in loop.model.parameters())
            )
            if clips or factor != 1.0:
                nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)

    counting = Loop().run(step)
    assert counting.unclipped_squares == pytest.approx(seen[2 * COUNTED_STEP - 1])
    assert counting.notes == []


def test_keeps_a_norm_that_overflows_in_the_step() -> None:
    counting, before = norms(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), torch.inf)
    assert not math.isfinite(before)
    assert not math.isfinite(known(counting.unclipped_squares))


class Unreadable(torch.amp.GradScaler):
    """A loss scaler that cannot be read, so the scale of the gradients is unknown."""

    def is_enabled(self) -> bool:
        raise LookupError("no")


@pytest.fixture
def unreadable_scaler() -> Iterator[None]:
    scaler = Unreadable("cpu")
    yield
    scalers.living.discard(scaler)  # the traceback of its error keeps it alive


@pytest.mark.usefixtures("unreadable_scaler")
def test_a_norm_that_cannot_be_read_is_unknown() -> None:
    counting, _ = norms(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
    assert counting.unclipped_squares is None
    assert counting.counts is not None, "the step is counted nevertheless"
    assert counting.notes == ["the norm of the gradients before clipping is unknown: LookupError: no"]


def test_notices_functions_of_libraries_that_clip(packages: Packages) -> None:
    motor.install(packages)
    driving = motor.driving()
    gradients.watch()
    assert hasattr(driving.Driver.clip, "is_watched")
    assert driving.Driver.clip(None) == "clipped"


class Scaler:
    """A fake of torch's loss scaler for fp16, with the parts that its scale is read from."""

    def __init__(self, scale: float | None, stage: str | None = None, *, enabled: bool = True) -> None:
        self._scale = None if scale is None else torch.tensor(scale)
        self._enabled = enabled
        state = {} if stage is None else {"stage": SimpleNamespace(name=stage)}
        self._per_optimizer_states = {id(OPTIMIZER): state} if state else {}

    def is_enabled(self) -> bool:
        return self._enabled


OPTIMIZER = SimpleNamespace()


@pytest.mark.parametrize(
    ("scalers", "scale"),
    [
        ([], 1.0),
        ([Scaler(1024.0)], 1024.0),
        ([Scaler(1024.0, "READY")], 1024.0),
        ([Scaler(1024.0, "UNSCALED")], 1.0),
        ([Scaler(None)], 1.0),
        ([Scaler(1024.0, enabled=False)], 1.0),
        ([Scaler(1024.0), Scaler(8.0)], None),
        ([Scaler(1024.0), Scaler(8.0, "UNSCALED")], 1.0),
        ([SimpleNamespace(is_enabled=lambda: True)], None),
    ],
)
def test_removes_the_known_scale_of_fp16(scalers: list[Any], scale: float | None) -> None:
    assert gradients.scale_of(OPTIMIZER, scalers) == scale


def test_a_fused_optimizer_names_its_scale() -> None:
    assert gradients.scale_of(SimpleNamespace(grad_scale=torch.tensor(64.0)), []) == 64.0


def test_torch_has_its_scalers_private_names() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert gradients.scale_of(optimizer, [scaler]) == 1.0, "the scaler has scaled nothing"
    scaler.scale(weight.sum()).backward()
    assert gradients.scale_of(optimizer, [scaler]) == 256.0
    scaler.unscale_(optimizer)
    assert gradients.scale_of(optimizer, [scaler]) == 1.0


def test_knows_the_scale_of_a_later_built_scaler() -> None:
    gradients.watch()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    weight = nn.Parameter(torch.ones(2))
    reader = gradients.NormBeforeClipping(torch.optim.SGD([weight], lr=0.1), lambda function: function())
    scaler.scale(weight.sum()).backward()
    assert reader.read() == pytest.approx(2.0)
