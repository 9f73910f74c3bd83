"""Test which losses a loss scaler has scaled, and which steps it has skipped, with scalers on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsuite.worker.observation import scalers
from tests.samples import known

SCALE = 1024.0
GradScaler = torch.amp.GradScaler


class OfAScript(GradScaler):
    """A scaler with methods of its own, like FSDP1's."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs).to(torch.float16)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return super().step(optimizer, *args, **kwargs)


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Follow scalers. Return the optimizers whose steps they skip."""
    for name in ("__init__", "scale", "step"):
        monkeypatch.setattr(GradScaler, name, getattr(GradScaler, name))
    for name in ("_skipped", "has_scaled"):
        monkeypatch.setattr(scalers, name, getattr(scalers, name))
    skipped: list[Any] = []
    scalers.watch(skipped.append)
    hook = register_optimizer_step_post_hook(lambda *_: scalers.stepped())
    yield skipped
    hook.remove()


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def new(kind: type[GradScaler] = GradScaler, **how: Any) -> GradScaler:
    return kind("cpu", init_scale=SCALE, **how)


def loss_before(scaled: Tensor) -> Tensor | None:
    return known(scalers.before_scaling(scaled)).loss


pytestmark = pytest.mark.usefixtures("skipped")


@pytest.mark.parametrize("kind", [GradScaler, OfAScript])
def test_knows_the_loss_before_scaling(weight: nn.Parameter, kind: type[GradScaler]) -> None:
    loss = weight.sum()
    assert loss_before(new(kind).scale(loss)) is loss


def test_knows_each_loss_of_a_list(weight: nn.Parameter) -> None:
    losses = [weight.sum(), weight.prod()]
    scaled = new().scale(losses)
    assert [loss_before(each) for each in scaled] == losses


def test_knows_the_scaler_of_lazily_scaled_losses(weight: nn.Parameter) -> None:
    scaler = new()
    (scaled,) = scaler.scale(iter([weight.sum()]))
    assert scalers.before_scaling(scaled) == (scaler, None)


def test_knows_the_scaler_of_a_changed_loss(weight: nn.Parameter) -> None:
    scaler = new()
    loss = (scaler.scale(weight.sum()) + scaler.scale(weight.prod())) / 4
    assert scalers.before_scaling(loss) == (scaler, None)


@pytest.mark.parametrize("enabled", [True, False])
def test_another_loss_is_not_scaled(weight: nn.Parameter, *, enabled: bool) -> None:
    other = weight.prod()
    new(enabled=enabled).scale(weight.sum() if enabled else other)
    assert scalers.before_scaling(other) is None


def test_reads_the_scale() -> None:
    assert float(scalers.scale_of(new(), torch.device("cpu"))) == SCALE


@pytest.mark.parametrize("kind", [GradScaler, OfAScript])
def test_an_overflow_skips_one_step(skipped: list[Any], weight: nn.Parameter, kind: type[GradScaler]) -> None:
    scaler = new(kind)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert skipped == [optimizer]


def test_a_fused_optimizer_skips_no_step(skipped: list[Any], weight: nn.Parameter) -> None:
    """Such an optimizer is called, and decides by itself that it changes no parameter."""
    scaler = new()
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert skipped == []


def test_an_error_in_a_step_is_no_skipped_step(skipped: list[Any], weight: nn.Parameter) -> None:
    with pytest.raises(AssertionError, match=r"Attempted step but _scale is None"):
        new().step(torch.optim.SGD([weight], lr=0.1))
    assert (skipped, scalers._attempts) == ([], [])


def test_an_unusual_scaler_can_be_created() -> None:
    class Unusual(GradScaler):
        __hash__ = None  # type: ignore[assignment]

    assert new(Unusual).is_enabled()
