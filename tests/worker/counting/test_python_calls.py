import cProfile
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.results.counts import COUNTED_STEP, PythonCalls
from perfsuite.worker.counting.counter import StepCounter
from perfsuite.worker.counting.python_calls import PythonCounter
from perfsuite.worker.counting.steps import Counting
from perfsuite.worker.observation import software
from tests.samples import known
from tests.worker.loops import in_a_thread

Step = Callable[[], object]
pytestmark = pytest.mark.usefixtures("no_profiler")


def training() -> tuple[list[nn.Parameter], Step, torch.optim.Optimizer]:
    """Return the parameters of a small model, a step of it, and its optimizer. Two steps have been made."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return list(model.parameters()), step, optimizer


def called(*steps: Step) -> PythonCalls | None:
    """Return the calls of these steps. All belong to the phase "forward"."""
    counter = PythonCounter(lambda: "forward")
    for step in steps:
        counter.start()
        step()
        counter.stop()
    return counter.result()


def names(*steps: Step) -> dict[str, int]:
    """Return the calls of these steps, by the name of each function of this file."""
    functions = known(called(*steps)).functions.items()
    return {name.rpartition(".")[2]: count for name, count in functions if name.startswith(__name__)}


def helper() -> None:
    """A function that a step calls."""


def test_perfsuite_adds_no_python_call_to_a_step() -> None:
    """perfsuite itself sees each operator, and squares the gradients before the optimizer's step."""
    parameters, step, optimizer = training()
    plain = Counter[str]()

    def see(frame: Any, event: str, _: Any) -> None:
        is_ours = frame.f_globals["__name__"].startswith(
            "perfsuite."
        )  # hooks of another test can still be there
        if event == "call" and frame.f_code.co_name != "__eq__" and not is_ours:
            plain[f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(see)
    step()
    sys.setprofile(None)
    counting = Counting(lambda: nn.ParameterList(parameters))
    handle = optimizer.register_step_pre_hook(counting.before_optimizer_step)
    for _ in range(COUNTED_STEP):
        step()
        counting.end_step()
        counting.begin_step()
    handle.remove()
    assert counting.gradient_squares is not None
    python_calls = known(known(counting.counts).python)
    assert python_calls.functions == dict(sorted(plain.items()))
    assert sum(python_calls.calls.values()) == plain.total()


def test_counts_no_function_of_perfsuites_folders() -> None:
    def step() -> None:
        OwnList[int]()
        helper()

    assert names(step, step) == {"step": 1, "helper": 1}
    functions = known(called(step, step)).functions
    assert not [name for name in functions if name.startswith("perfsuite.")]


def test_calls_have_the_phase_they_are_made_in() -> None:
    parameters, _, optimizer = training()
    parameters[0].register_hook(lambda gradient: helper())
    optimizer.register_step_pre_hook(lambda *_: counter.before_optimizer())
    counter = StepCounter([optimizer], parameters)
    with counter:
        parameters[0].sum().backward()
        for _ in range(3):
            helper()
        optimizer.step()
    python_calls = known(counter.end_step().python)
    assert python_calls.version == "{}.{}".format(*sys.version_info)
    assert python_calls.functions[f"{__name__}.helper"] == 4
    assert python_calls.calls["backward"] == 2  # the hook and the function that it calls
    assert python_calls.calls["forward"] > 3
    assert python_calls.calls["optimizer"] > 0


def test_ignores_calls_of_only_one_step() -> None:
    def more() -> None:
        helper()
        helper()

    assert names(more, helper) == names(helper, more) == {"helper": 1}
    assert names(more, more) == {"more": 1, "helper": 2}


def test_sees_no_finalizers_or_key_comparisons() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            helper()

    class Key:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            helper()
            return self is other

    def step() -> None:
        Cycle()
        gc.collect()
        assert len({Key(), Key()}) == 2

    seen = names(step)
    assert (seen["step"], seen["__init__"], seen["__hash__"]) == (1, 1, 2)
    assert not {"__del__", "__eq__", "helper"} & set(seen)
    assert not any(callback.__name__.startswith("_collection_") for callback in gc.callbacks)


def test_callbacks_of_the_collector_are_not_seen() -> None:
    """Collections happen at any time. Some libraries count them with a callback."""

    def note(*_: object) -> None:
        helper()

    gc.callbacks.append(note)
    try:
        seen = names(gc.collect)
    finally:
        gc.callbacks.remove(note)
    assert not {"note", "helper"} & set(seen)


def test_other_threads_are_seen_since_python_3_12() -> None:
    sees_all = sys.version_info >= (3, 12)
    seen = known(called(lambda: in_a_thread(helper)))
    assert (f"{__name__}.helper" in seen.functions) == sees_all
    assert seen.all_threads == sees_all


@pytest.mark.parametrize(("hidden", "seen"), [((), 2), ((json.__file__,), 1)], ids=["none", "json"])
def test_hidden_files_hide_all_that_they_call(hidden: tuple[str, ...], seen: int) -> None:
    counter = PythonCounter(lambda: "forward", hidden)
    counter.start()
    json.loads("1", object_hook=None, parse_int=lambda text: helper())
    helper()
    counter.stop()
    assert known(counter.result()).functions[f"{__name__}.helper"] == seen


def test_operator_calls_are_unseen_in_one_thread() -> None:
    counter = PythonCounter(lambda: "forward")

    def unseen() -> None:
        helper()
        in_a_thread(more)

    def more() -> None:
        """A function that must not be counted, because another thread calls it."""

    counter.start()
    counter.unseen(unseen)
    helper()
    counter.stop()
    functions = known(counter.result()).functions
    assert functions[f"{__name__}.helper"] == 1
    assert any(name.endswith("more") for name in functions) == (sys.version_info >= (3, 12))


def test_cprofile_keeps_its_place() -> None:
    with cProfile.Profile() as profiler:
        assert called(helper) is None
    assert any(entry.code is helper.__code__ for entry in profiler.getstats())


def test_users_profiler_stays_and_ends_counting() -> None:
    seen = list[str]()

    def theirs(frame: Any, event: str, _: Any) -> None:
        seen.append(frame.f_code.co_name)

    sys.setprofile(theirs)
    assert called(helper) is None
    assert sys.getprofile() is theirs
    sys.setprofile(None)
    assert "helper" in seen
    assert called(helper, lambda: sys.setprofile(theirs)) is None, "a profiler that appears in a step"
    assert sys.getprofile() is theirs
    sys.setprofile(None)
    needs_its_place = sys.version_info < (3, 12)
    assert (called(lambda: sys.setprofile(None)) is None) == needs_its_place, (
        "a profiler that disappears in a step"
    )


def test_dry_run_counts_no_python_of_fake_tensors() -> None:
    with FakeTensorMode():
        counter = StepCounter([])
        with counter:
            assert torch.ones(2).device.type == "cpu"
            helper()
        seen = known(counter.end_step().python)
    assert seen.functions == {f"{__name__}.helper": 1}


@pytest.mark.usefixtures("compiling")
def test_counting_compiles_nothing_again() -> None:
    """Dynamo watches calls around a compiled function, so it would compile the function that counts calls."""
    parameters, _, optimizer = training()
    model = torch.compile(nn.Linear(4, 4), backend="eager")
    model(torch.ones(2, 4))
    before = software.compiled_counts()
    counter = StepCounter([optimizer], parameters)
    for _ in range(2):
        with counter:
            model(torch.ones(2, 4))
        python_calls = known(counter.end_step().python)
    assert python_calls.calls["forward"] > 0
    assert software.compiled_counts() == known(before)
