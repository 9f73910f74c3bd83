import gc
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.flop_counter import FlopCounterMode

from perfsuite.errors import PrivateNameError
from perfsuite.results.counts import (
    COUNTED_STEP,
    FIRST_COUNTED,
    Counts,
    InCycles,
    StepMemory,
    StepsToCount,
)
from perfsuite.results.quantities import FLOOR
from perfsuite.worker.counting.counter import StepCounter
from perfsuite.worker.counting.steps import COMPILED, Counting, _memory_unless_alike, warm_up
from perfsuite.worker.hooks import calls, dynamo
from perfsuite.worker.observation import engines, second_step, software
from tests.counted import make_memory
from tests.packages import Packages
from tests.samples import known
from tests.worker import motor
from tests.worker.counting.test_hidden import by_numpy
from tests.worker.loops import INPUTS, Loop, in_a_thread, memory


def test_counts_two_steps_and_reports_the_second() -> None:
    loop = Loop()
    counting = loop.run()
    assert loop.counted_at == [FIRST_COUNTED, COUNTED_STEP]
    counts = known(counting.result())
    assert counts.step == COUNTED_STEP
    assert counts.flops["forward"] == 2 * (2 * 8 * 16 * 32)
    assert "aten.ones" not in counts.ops, "the result is asked for between steps"
    assert counting.notes == []
    assert Loop().run(steps=FIRST_COUNTED).result() is None, "a launch that ended too early has no counts"
    warm_up()
    assert_nothing_is_left()


def with_more_work_in(*steps: int) -> Callable[[Loop], None]:
    def train(loop: Loop) -> None:
        loop.backward()
        if loop.number in steps:
            torch.ones(10).sum()

    return train


def test_consecutive_steps_are_counted() -> None:
    loop = Loop(StepsToCount(until=7, late=None))

    counts = known(loop.run(with_more_work_in(6), steps=9).result())

    assert loop.counted_at == [3, 4, 5, 6, 7]
    assert counts.step == COUNTED_STEP
    assert counts.also_counted == (5, 6, 7)
    assert [*counts.spans] == ["step 6"]
    assert sum(known(counts.spans["step 6"].kernels).values()) == sum(known(counts.kernels).values()) + 2
    assert_nothing_is_left()


class Output:
    """The output of a step, which refers to itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


def test_reports_tensors_in_reference_cycles() -> None:
    def train(loop: Loop) -> None:
        loop.backward()
        Output(torch.ones(1000).mul(2))

    in_cycles = memory(known(Loop().run(train).result())).in_cycles

    assert in_cycles == InCycles(bytes=4000, holders=("`Output.tensor`",))
    assert_nothing_is_left()


def test_a_plain_loop_leaves_no_cycles() -> None:
    assert memory(known(Loop().run().result())).in_cycles == InCycles(bytes=0)


def test_counts_a_late_step_without_memory() -> None:
    loop = Loop(StepsToCount(until=4, late=9))

    counts = known(loop.run(with_more_work_in(9), steps=10).result())

    assert loop.counted_at == [3, 4, 9]
    assert counts.also_counted == (9,)
    assert counts.spans["step 9"].memory is None
    assert counts.spans["step 9"].ops == {
        **counts.ops,
        "aten.ones": 1,
        "aten.sum": counts.ops["aten.sum"] + 1,
    }
    assert loop.counting.has_counted_late
    assert_nothing_is_left()


def helper() -> None:
    """A function that a step calls."""


@pytest.mark.parametrize("steps", [StepsToCount(until=7, late=None), StepsToCount(until=4, late=6)])
def test_counts_python_calls_of_a_later_step(steps: StepsToCount) -> None:
    def train(loop: Loop) -> None:
        loop.backward()
        for _ in range(1000 if loop.number == 6 else 0):
            helper()

    counts = known(Loop(steps).run(train, steps=9).result())

    assert [*counts.spans] == ["step 6"]
    functions = known(counts.spans["step 6"].python).functions
    assert functions[f"{__name__}.helper"] == 1000


def test_a_later_import_is_no_work_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "perfsuite_imported_late.py").write_text("")

    def train(loop: Loop) -> None:
        loop.backward()
        if loop.number == 6:
            importlib.import_module("perfsuite_imported_late")

    loop = Loop(StepsToCount(until=7, late=None))
    functions = known(known(known(loop.run(train, steps=8).result()).in_step(6)).python).functions

    assert not [name for name in functions if name.startswith("importlib")]


def test_a_few_bytes_more_are_no_other_step() -> None:
    kept: list[torch.Tensor] = []

    def train(loop: Loop) -> None:
        loop.backward()
        kept.append(torch.ones(1))

    counts = known(Loop(StepsToCount(until=7, late=None)).run(train, steps=8).result())

    assert not counts.spans


def test_an_equal_late_step_adds_nothing() -> None:
    counts = known(Loop(StepsToCount(until=4, late=9)).run(steps=10).result())

    assert counts.also_counted == (9,)
    assert not counts.spans


def test_short_training_keeps_its_steps() -> None:
    counting = Loop(StepsToCount(until=15, late=None)).run(steps=6)

    assert known(counting.result()).also_counted == (5, 6)


def test_later_steps_error_keeps_earlier_ones() -> None:
    loop = Loop(StepsToCount(until=9, late=None))

    def train(loop: Loop) -> None:
        loop.backward()
        if loop.number == 6:
            loop.counting._counter.error = LookupError("a name")  # type: ignore[union-attr]

    counts = known(loop.run(train, steps=10).result())

    assert counts.also_counted == (5,)
    assert loop.counting.notes == ["steps were not counted from step 6 on: LookupError: a name"]
    assert_nothing_is_left()


def test_unseen_work_excludes_a_later_step() -> None:
    def train(loop: Loop) -> None:
        if loop.number == 6:
            by_numpy(loop)
        else:
            loop.backward()

    counting = Loop(StepsToCount(until=7, late=None)).run(train, steps=8)

    assert known(counting.result()).also_counted == (5, 7)
    assert counting.hidden == ()
    (note,) = counting.notes
    assert note.startswith("step 6 was not counted: none of the counted operators computed the gradients of")


def test_a_replaced_optimizer_is_not_kept_alive() -> None:
    loop = Loop()
    loop.run()
    first = weakref.ref(loop.optimizer)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.counting.rebuilt(loop.optimizer)
    gc.collect()
    assert first() is None


def counts_with_another() -> Counts:
    """Return the counts of a training with another model, whose optimizer does not end training steps."""
    other = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(other.parameters())

    def train(loop: Loop) -> None:
        other(INPUTS).sum().backward()
        loop.counting.before_other_step(optimizer)
        optimizer.step()
        loop.counting.after_other_step()
        loop.backward()

    return known(Loop().run(train).result())


def test_the_steps_of_another_optimizer_are_optimizer_work() -> None:
    alone = known(Loop().run().result())
    counts = counts_with_another()
    assert known(counts.kernels)["optimizer"] > known(alone.kernels)["optimizer"]


def test_step_counters_of_another_optimizer_are_no_host_reads() -> None:
    assert counts_with_another().host_reads == {}


def test_another_optimizer_is_not_kept_alive() -> None:
    loop = Loop()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    loop.counting.before_other_step(optimizer)
    died = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert died() is None


def test_the_norm_after_a_closure_is_read() -> None:
    loop = Loop()
    seen = []

    def closure() -> float:
        loop.optimizer.zero_grad()
        loop.backward()
        seen.append(float(nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)) ** 2)
        return 0.0

    for _ in range(COUNTED_STEP):
        loop.counting.before_optimizer_step(loop.optimizer, (loop.optimizer, closure))
        loop.optimizer.step(closure)
        loop.counting.end_step()
        loop.counting.begin_step()
    assert loop.counting.gradient_squares == pytest.approx(1e-6, rel=1e-3)
    assert loop.counting.unclipped_squares == pytest.approx(seen[-1])


class Cycle:
    """An object in a reference cycle. Only the garbage collector frees its tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


def memory_with_garbage(objects: int) -> StepMemory:
    """Return the memory of a training whose steps also make this many small cycles after each backward."""

    def train(loop: Loop) -> None:
        for _ in range(3):
            Cycle(loop.model(INPUTS)).tensor.sum().backward()
            for _ in range(objects):
                Cycle(torch.Tensor())

    return known(known(Loop().run(train).result()).memory)


def test_memory_does_not_depend_on_when_garbage_is_collected() -> None:
    assert memory_with_garbage(objects=1) == memory_with_garbage(objects=2000)


def test_the_collector_is_on_again_after_a_counted_step() -> None:
    before = gc.get_threshold()
    Loop().run()
    assert gc.get_threshold() == before


@pytest.mark.parametrize("number", [FIRST_COUNTED, COUNTED_STEP])
def test_a_collector_that_a_counted_step_disables_stays_off(number: int) -> None:
    def train(loop: Loop) -> None:
        loop.backward()
        if loop.number == number:
            gc.disable()

    try:
        Loop().run(train)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_collector_that_the_training_has_disabled_stays_off() -> None:
    gc.disable()
    try:
        Loop().run()
        assert not gc.isenabled()
    finally:
        gc.enable()


# Inductor imports a module that uses `torch.jit`.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_optimizer_step_is_not_counted() -> None:
    loop = Loop()

    @torch.compile(backend="eager")
    def step() -> None:
        loop.backward()
        loop.counting.before_optimizer_step(loop.optimizer)
        loop.optimizer.step()
        loop.counting.end_step()
        loop.counting.begin_step()

    dynamo.watch()
    try:
        for _ in range(COUNTED_STEP + 1):
            step()
    finally:
        torch._dynamo.reset()
        counters.clear()
    assert why_uncounted(loop.counting) == COMPILED


def test_new_optimizer_ends_later_counting() -> None:
    loop = Loop(StepsToCount(until=9, late=None))

    def train(loop: Loop) -> None:
        loop.backward()
        if loop.number == 7:
            loop.counting.rebuilt(loop.optimizer)

    assert known(loop.run(train, steps=10).result()).also_counted == (5, 6)


@pytest.mark.parametrize(
    ("steps", "until", "late"),
    [
        (StepsToCount.of_timed(max_warmup=5, total=25), 4, 25),
        # Otherwise too few steps would be left to measure.
        (StepsToCount.of_timed(max_warmup=5, total=15), 4, None),
        (StepsToCount.consecutive(12, total=25), 15, None),
        (StepsToCount.consecutive(1, total=25), 4, None),
        (StepsToCount.consecutive(12, total=12), 8, None),  # the last four steps are needed to count objects
    ],
)
def test_the_steps_that_a_launch_counts(steps: StepsToCount, until: int, late: int | None) -> None:
    assert steps == (until, late)


def test_only_stalls_inside_the_step_count() -> None:
    calls.watch()

    def train(loop: Loop) -> None:
        loop.backward()
        in_a_thread(gc.collect)

    loop = Loop()
    loop.counting.end_step = between(loop.counting.end_step, gc.collect)  # type: ignore[method-assign]
    assert known(loop.run(train).result()).stalls == {"gc.collect": 1}


def between(end_step: Any, work: Any) -> Any:
    """Return a function that ends a step and then does `work` before the next step begins."""
    return lambda: (end_step(), work())


def why_uncounted(counting: Counting) -> str:
    """Return why nothing was counted, and check that no hooks are left."""
    assert counting.result() is None
    assert_nothing_is_left()
    (note,) = counting.notes
    return note.removeprefix("the work of a step was not counted: ")


def assert_nothing_is_left() -> None:
    assert _get_current_dispatch_mode() is None
    assert "resize_" not in vars(torch.UntypedStorage)
    assert not hasattr(_BaseDataLoaderIter.__next__, "__wrapped__")
    assert not any("LiveMemory" in repr(callback) for callback in gc.callbacks)


@pytest.mark.parametrize(("more", "is_alike"), [(FLOOR // 3, True), (FLOOR * 2 // 3, False)])
def test_later_memory_may_hide_half_of_the_bound(more: int, is_alike: bool) -> None:
    """Both sides of a comparison (the baseline and a launch of today) can hide some memory."""
    reported = make_memory(peak=2**30)
    later = reported.replace(peak=2**30 + more)
    assert (_memory_unless_alike(later, reported) == reported) is is_alike


@pytest.mark.parametrize("ahead", [0, 1])
def test_batches_of_the_steps_before_are_data(ahead: int) -> None:
    """The loader can be a batch ahead.

    Memory of data does not count as memory of the training, so data that is freed hides no growth.
    """

    def train(loop: Loop) -> None:
        batches.append(next(loader))
        held[:] = [batches.pop(0)["x"]]  # the data is held until the next step has its own
        loop.model(held[0]).square().mean().backward()
        kept.append(loop.model[0].bias.detach() * 2)

    held: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    loader = iter(DataLoader([{"x": row} for row in torch.ones(100, 16)], batch_size=8))  # type: ignore[arg-type]
    batches = [next(loader) for _ in range(ahead)]
    counts = known(Loop().run(train).result())
    assert memory(counts).growth == 4 * 32, "the growth is only what each step keeps"
    assert_nothing_is_left()


def test_squares_gradients_out_of_sight() -> None:
    """Squaring the gradients is not counted."""

    def squared(optimizer: Any, *_: Any) -> None:
        seen.append(sum(float(parameter.grad.square().sum()) for parameter in loop.model.parameters()))

    loop = Loop()
    seen = list[float]()
    loop.optimizer.register_step_pre_hook(squared)
    counting = loop.run()
    assert counting.gradient_squares == pytest.approx(seen[COUNTED_STEP - 1])
    assert "aten.linalg_vector_norm" not in known(counting.counts).ops


def test_takes_the_norm_that_an_engine_keeps(packages: Packages) -> None:
    motor.install(packages)
    engines.watch()
    loop = Loop()
    engine = motor.driving().Driver(loop.optimizer)
    engine.norm = 3.0
    counting = loop.run()
    assert (counting.gradient_squares, counting.unclipped_squares, counting.notes) == (9, 9, [])


def test_first_optimizer_to_step_counts() -> None:
    loop = Loop()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])

    def step_other(loop: Loop) -> None:
        loop.backward()
        if loop.number > 1:
            loop.counting.before_optimizer_step(other)

    counts = known(loop.run(step_other).result())
    without = known(Loop().run().result())
    assert counts.kernels == without.kernels  # the other optimizer's call began no phase


def test_foreign_dispatch_mode_prevents_counting() -> None:
    mode = FlopCounterMode(display=False)

    def enter(loop: Loop) -> None:
        loop.backward()
        if loop.number == FIRST_COUNTED:
            mode.__enter__()

    counting = Loop().run(enter)
    mode.__exit__(None, None, None)
    assert "its own TorchDispatchMode" in why_uncounted(counting)


def test_uncountable_step_is_a_note() -> None:
    loop = Loop()
    loop.counting = Counting(lambda: None)
    assert why_uncounted(loop.run()).startswith("AttributeError")


def test_a_compiled_model_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Loop().run()
    monkeypatch.setitem(counters, "stats", {"unique_graphs": 3})
    counts = known(counting.result())
    assert (counts.memory, counts.compiled) == (None, software.compiled_counts())
    assert known(counts.compiled).graphs == 3


def test_uncountable_graphs_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Loop().run()
    monkeypatch.setitem(counters, "stats", {"unique_graphs": 3})
    monkeypatch.delattr(torch._dynamo.utils, "get_compilation_metrics")
    assert why_uncounted(counting).startswith("the graphs of torch.compile are unknown (torch ")


@pytest.mark.parametrize("outside", [0, FIRST_COUNTED - 1, COUNTED_STEP - 1])
def test_does_not_count_an_optimizer_in_backward(outside: int) -> None:
    """Autograd removes a dispatch mode that is entered within backward, and restores one that is left there.

    The first `outside` steps are made outside of backward, and all later steps within it.
    """

    def step(weight: torch.Tensor) -> None:
        counting.before_optimizer_step(optimizer)
        optimizer.step()
        counting.end_step()
        counting.begin_step()

    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    counting = Counting(lambda: nn.ParameterList([weight]))
    weight.register_post_accumulate_grad_hook(step)
    weight.grad = torch.ones(4)
    for _ in range(outside):
        step(weight)
    for _ in range(6):
        weight.sum().backward()
    left = _get_current_dispatch_mode()
    if left is not None:
        _pop_mode()
        assert isinstance(left, StepCounter)
        assert not left.is_entered
    assert why_uncounted(counting)


def test_reports_a_removed_dispatch_mode() -> None:
    def take(loop: Loop) -> None:
        loop.backward()
        if loop.number == FIRST_COUNTED:
            _pop_mode()

    reason = why_uncounted(Loop().run(take))
    assert reason == "perfsuite's TorchDispatchMode was removed during the step"


def test_counts_nothing_without_a_backward_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_step, "current_graph_task", None)
    with pytest.raises(PrivateNameError, match=r"has no torch\._C\._current_graph_task_id"):
        Counting(lambda: None)


def test_reports_threads_of_any_counted_step() -> None:
    calls.watch()

    def train(loop: Loop) -> None:
        loop.backward()
        if loop.number == 6:
            in_a_thread(lambda: None)

    counting = Loop(StepsToCount(until=8, late=None)).run(train, steps=9)

    assert counting.other_threads == 1
