"""Test engines of a library in this process.

The library is `motor` from tests/worker/motor.py. The framework that describes its engine is in another
package, `perf-motor`.
"""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from perfsuite.errors import MismatchError
from perfsuite.worker.hooks.imports import AfterImport
from perfsuite.worker.observation import engines, replicas
from perfsuite.worker.observation.observe import owner, wrapping
from tests.packages import Packages
from tests.worker import motor


@pytest.fixture
def driving(packages: Packages) -> Iterator[Any]:
    """Import the library while engines are watched, and yield it."""
    motor.install(packages)
    engines.watch()
    yield motor.driving()
    assert engines.notes == []
    engines._created.clear()


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    """Return an optimizer of a partition that no module owns."""
    return torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)


def told_by(optimizer: Any) -> list[str]:
    """Return a list that records which steps the clock gets from now on."""
    calls: list[str] = []

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        around = (lambda _: calls.append("before"), lambda _: calls.append("after"))
        if not engines.steps(optimizer, *around):
            calls.append("alone")

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    return calls


def test_clock_hears_engine_steps_from_the_second(driving: Any, optimizer: Any) -> None:
    calls = told_by(optimizer)
    engine = driving.Driver(optimizer)
    assert calls == [], "the engine made its state, but nothing was trained"
    for steps in range(3):
        engine.step()
        assert calls == ["before", "after"] * steps


def test_clock_hears_engines_of_a_single_file(packages: Packages, optimizer: Any) -> None:
    motor.install_as_one_file(packages)
    engines.watch()
    engine = importlib.import_module("motor").Driver(optimizer)
    calls = told_by(optimizer)
    for steps in range(3):
        engine.step()
        assert calls == ["before", "after"] * steps


def test_a_wrapper_with_the_engines_method_is_no_engine(driving: Any, optimizer: Any) -> None:
    engine = driving.Driver(driving.Gear(optimizer))
    calls = told_by(optimizer)
    for steps in range(3):
        engine.step()
        assert calls == ["before", "after"] * steps


def test_refuses_a_step_of_a_wrapper_alone(driving: Any, optimizer: Any) -> None:
    told_by(optimizer)
    with pytest.raises(
        MismatchError, match=r"^motor takes a step of SGD outside of Driver\.advance, in advance, so "
    ):
        driving.Gear(optimizer).step()


def test_a_step_next_to_an_engine_is_its_own(driving: Any, optimizer: Any) -> None:
    driving.Driver(optimizer)
    calls = told_by(optimizer)
    optimizer.step()
    assert calls == ["alone", "alone"]


def test_an_engine_is_what_trains(driving: Any, optimizer: Any) -> None:
    engine = driving.Driver(optimizer)
    assert owner(optimizer) is engine
    seen = {"wrapper": "Driver", "sharding": "motor in 2 parts", "wrapped_modules": "1"}
    assert wrapping(engine) == seen


def test_knows_the_engine_of_each_optimizer(driving: Any, optimizer: Any) -> None:
    other = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)
    engine = driving.Driver(optimizer)
    second = driving.Driver(other)
    assert (engines.of(optimizer), engines.of(other)) == (engine, second)


def test_keeps_no_engine_alive(driving: Any, optimizer: Any) -> None:
    driving.Driver(optimizer)
    assert engines.of(optimizer) is None


def test_notices_engines_of_a_half_imported_library(
    packages: Packages, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script imports the library. The library imports torch, and then perfsuite attaches."""
    motor.install(packages)
    monkeypatch.setattr(sys, "attach", engines.watch, raising=False)
    (packages.directory / "motor" / "__init__.py").write_text("import sys; sys.attach()\n")
    engine = motor.driving().Driver(optimizer)
    assert engines.of(optimizer) is engine


def test_looks_again_for_a_half_imported_engine(
    packages: Packages, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "attach", engines.watch, raising=False)
    motor.install_attaching(packages)
    driving = motor.driving()
    engines.look_again()
    engine = driving.Driver(optimizer)
    assert engines.of(optimizer) is engine


def test_notices_engines_of_an_imported_library(packages: Packages, optimizer: Any) -> None:
    motor.install(packages)
    driving = motor.driving()
    engines.watch()
    engine = driving.Driver(optimizer)
    assert engines.of(optimizer) is engine


def test_knows_an_older_engine_once_it_steps(packages: Packages, optimizer: Any) -> None:
    motor.install(packages)
    engine = motor.driving().Driver(optimizer)
    engines.watch()
    assert engines.of(optimizer) is None
    told_by(optimizer)
    engine.step()
    assert engines.of(optimizer) is engine


def test_reads_the_gradient_norm_an_engine_keeps(driving: Any, optimizer: Any) -> None:
    assert engines.gradient_norm(optimizer) is None, "the optimizer is in no engine"
    engine = driving.Driver(optimizer)
    engine.norm = 1.5
    assert engines.gradient_norm(optimizer) == 1.5


def test_refuses_a_library_that_steps_elsewhere(driving: Any, optimizer: Any) -> None:
    told_by(optimizer)
    with pytest.raises(
        MismatchError, match=r"^motor takes a step of SGD outside of Driver\.advance, in elsewhere, "
    ):
        driving.elsewhere(optimizer)


def test_says_why_an_engine_cannot_run_dry(driving: Any, optimizer: Any) -> None:
    assert engines.not_dry() is None, "no engine was created"
    driving.Driver(optimizer)
    assert engines.not_dry() == "a motor needs fuel"


def test_says_why_if_an_engine_cannot_be_created(driving: Any) -> None:
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'step'"):
        driving.Driver(None)
    assert engines.not_dry() == "a motor needs fuel"


def test_an_absent_class_becomes_a_note(packages: Packages) -> None:
    motor.install(packages)
    (packages.directory / "motor" / "driving.py").write_text("")
    engines.watch()
    motor.driving()
    (note,) = engines.notes
    assert note.startswith("some engines of libraries are unknown (AttributeError: ")
    assert "Driver" in note
    engines.notes.clear()


def test_a_librarys_part_of_a_parameter_is_this_ranks(driving: Any) -> None:
    model: Any = torch.nn.Linear(4, 4, bias=False)
    assert replicas.replicated(model) == {"weight"}
    part: Any = torch.ones(2)
    model.weight.motor_part = part
    assert replicas.local(model.weight) is part
    assert replicas.replicated(model) == set()


def test_watches_with_one_finder(driving: Any) -> None:
    engines.watch()
    assert sum(isinstance(finder, AfterImport) for finder in sys.meta_path) == 1


@pytest.mark.parametrize(
    ("scales", "expected"),
    [([], 1.0), ([None], 1.0), ([None, 8.0], 8.0), ([8.0, 8.0], 8.0), ([8.0, 4.0], None)],
)
def test_knows_the_factor_of_losses(
    driving: Any, optimizer: Any, scales: list[float | None], expected: float | None
) -> None:
    drivers = [driving.Driver(optimizer) for _ in scales]
    for driver, scale in zip(drivers, scales, strict=True):
        driver.scale = scale
    assert engines.loss_scale() == expected
