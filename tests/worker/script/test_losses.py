import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from perfsuite.errors import MismatchError
from perfsuite.worker.hooks import calls
from perfsuite.worker.observation import engines, scalers
from perfsuite.worker.script.losses import Losses


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Losses:
    """Return `Losses` that get what `perfsuite.worker.script.attach` would pass to them."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    seen = Losses()

    def told(loss: torch.Tensor, *_: object, **__: object) -> None:
        if loss.numel() == 1:
            seen.see(loss)

    calls.before(torch.autograd, "backward", told)
    return seen


def sgd(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_step_loss_sums_its_micro_batches(losses: Losses) -> None:
    weight = torch.ones(2, requires_grad=True)
    for _ in range(4):
        for micro in (1.0, 2.0):
            loss = (weight * micro).sum()
            loss.backward()
            with torch.no_grad():
                loss.mul_(1000)  # a script can do this to average the loss over ranks
        (weight * 3).backward(torch.ones(2))  # not a loss
        torch.autograd.backward(weight.sum() * 0)
        losses.end_step(sgd(weight))
    assert weight.grad is not None
    assert weight.grad.tolist() == [24, 24]
    assert losses.of_steps(3) == (6, 6, 6, 6)


@pytest.mark.parametrize(
    ("passes", "said", "is_early"),
    [
        ((1, 1, 1), "the case says 4, but backward was called on 1 losses per step", False),
        ((1, 2, 2), "the case says 4, but backward was called on 2 losses per step", True),
        ((4, 4, 4, 0), "not called on a scalar in step 3. If", False),
    ],
)
def test_losses_unlike_the_case_mismatch(
    losses: Losses, passes: tuple[int, ...], said: str, is_early: bool
) -> None:
    """As long as the first steps differ from each other, there is no mismatch yet.

    A scaler of fp16 gradients skips steps until its scale fits.
    """
    weight = torch.ones((), requires_grad=True)
    for number in passes:
        for _ in range(number):
            weight.backward()
        losses.end_step(sgd(weight))
    with pytest.raises(MismatchError, match=said):
        losses.of_steps(4)
    with contextlib.nullcontext() if is_early else pytest.raises(MismatchError, match=said):
        losses.check(4, more_come=True)


def test_losses_of_one_step_can_have_different_shapes(losses: Losses) -> None:
    weight = nn.Parameter(torch.ones(1))
    for _ in range(3):
        weight.sum().backward()
        weight.reshape(1, 1).backward()
        losses.end_step(sgd(weight))
    assert losses.of_steps(2) == (2, 2, 2)


def test_work_before_the_first_step_is_no_training(losses: Losses) -> None:
    """An example is a library that calls backward on a copy of the model to count its operations."""
    model = nn.Linear(2, 1)
    copy = nn.Linear(2, 1)
    for _ in range(3):
        (copy(torch.ones(2)) * 1000).sum().backward()
    for _ in range(4):
        model(torch.zeros(2)).sum().backward()
        losses.end_step(sgd(*model.parameters()))
    assert losses.of_steps(1) == pytest.approx([model.bias.item()] * 4)


@pytest.mark.parametrize("first", [True, False])
def test_omits_another_models_loss_in_every_step(losses: Losses, *, first: bool) -> None:
    """The other model could be a discriminator, for example. Its optimizer is then not the clock."""
    model = torch.ones(3, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    for _ in range(4):
        for trained in (other, model) if first else (model, other):
            (torch.tanh(trained * (2.0 if trained is model else 1000.0)) * 1.0).sum().backward()
        losses.end_step(sgd(model))
    assert losses.of_steps(1) == pytest.approx([3 * torch.tanh(torch.tensor(2.0)).item()] * 4)


def test_all_losses_count_under_sharding(losses: Losses) -> None:
    """An example is FSDP, which steps shards, but computes with gathered parameters."""
    gathered = torch.ones(2, requires_grad=True)
    shard = torch.ones(1, requires_grad=True)
    (gathered * 50).sum().backward()  # before the first step, there is one more loss than in the second step
    for _ in range(3):
        gathered.sum().backward()
        losses.end_step(sgd(shard))
    assert losses.of_steps(1) == (2, 2, 2)


class Halving(torch.amp.GradScaler):
    """A scaler whose scaled losses are in fp16, like FSDP1's."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs).half()


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a loss scaler that perfsuite follows."""
    kind = torch.amp.GradScaler
    for name in ("__init__", "scale", "step"):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    monkeypatch.setattr(scalers, "has_scaled", False)
    scalers.watch_new()
    return Halving("cpu", init_scale=2.0**16)


def trained(losses: Losses, scaled: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, ...]:
    """Return the losses of three steps whose unscaled losses are 6."""
    weight = torch.ones(2, requires_grad=True)
    for _ in range(3):
        scaled(weight.sum() * 3).backward()
        losses.end_step(sgd(weight))
    return losses.of_steps(1)


def test_the_factor_of_a_scaler_is_removed(losses: Losses, scaler: Any) -> None:
    """The scaled loss is infinite in fp16, but this makes no gradient infinite."""
    assert trained(losses, scaler.scale) == (6, 6, 6)
    assert losses.were_scaled


def test_changes_after_scaling_are_kept(losses: Losses, scaler: Any) -> None:
    scaler.scale(torch.ones(1))
    scaler.update(new_scale=1024.0)
    assert trained(losses, lambda loss: scaler.scale(loss) / 4) == (1.5, 1.5, 1.5)


def test_the_factor_of_an_engine_is_removed(losses: Losses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "loss_scale", lambda: 8.0)
    assert trained(losses, lambda loss: loss * 8) == (6, 6, 6)
    assert losses.were_scaled


def test_losses_of_several_engines_are_unknown(losses: Losses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "loss_scale", lambda: None)
    trained(losses, lambda loss: loss)
    assert str(losses.unknown).startswith("the loss is unknown: several engines train")


@pytest.mark.parametrize("skipped", range(4))
def test_a_pass_without_a_step_does_not_count(losses: Losses, skipped: int) -> None:
    weight = torch.ones(2, requires_grad=True)
    for step in range(4):
        if step == skipped:
            (weight.sum() * 1000).backward()
            losses.skip_step()
        weight.sum().backward()
        losses.end_step(sgd(weight))
    assert losses.of_steps(1) == (2, 2, 2, 2)
