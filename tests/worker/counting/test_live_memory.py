import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Event, Thread
from typing import Any

import pytest
import torch

from perfsuite.results.counts import InCycles, Phase
from perfsuite.worker.counting.live_memory import LiveMemory, entered
from tests.worker.loops import in_a_thread

floats = torch.zeros


@pytest.fixture
def memory() -> LiveMemory:
    return LiveMemory(lambda: "forward")


def test_reports_the_peak_with_its_parts() -> None:
    phases: list[Phase] = ["forward"]
    memory = LiveMemory(lambda: phases[-1])
    weight = floats(10)
    batch = floats(2)
    memory.assign(weight, "parameter")
    memory.see(batch, "kept")
    activation = floats(5)
    memory.see(activation, "forward", born=True)
    phases.append("backward")
    gradient = floats(10)
    memory.see(gradient, "backward", born=True)
    del activation
    memory.assign(gradient, "gradient")
    step = memory.end_step()
    assert step.peak == 4 * 27
    assert step.peak_in == "backward"
    assert step.at_peak == {"parameter": 40, "kept": 8, "forward": 20, "gradient": 40}
    assert step.saved_for_backward == 20
    assert (step.growth, step.allocations) == (40, 2)


def test_shared_storage_counts_once(memory: LiveMemory) -> None:
    one = floats(10)
    sparse = torch.eye(3).to_sparse()
    for tensor in (one, one[2:4], one.view(2, 5), sparse):
        memory.see(tensor, "forward", born=True)
    memory.assign(sparse, "gradient")
    memory.communicated(sparse)
    assert memory.end_step().peak == 40


def test_gpu_model_leaves_host_memory_uncounted(memory: LiveMemory) -> None:
    memory.counts_host = False
    batch = floats(100)
    step_counter = floats(1)
    on_device = torch.zeros(10, device="meta")
    memory.assign(step_counter, "optimizer state")
    for tensor in (batch, step_counter, on_device):
        memory.see(tensor, "forward", born=True)
    assert memory.end_step().at_peak == {"forward": 40, "optimizer state": 4}


def test_late_storage_was_made_out_of_sight(memory: LiveMemory) -> None:
    early = floats(1)
    hidden = floats(100)
    memory.see(early, "kept")
    assert memory.end_step().growth == 0
    memory.see(hidden, "kept")
    assert memory.end_step().growth == 400


def test_sent_memory_is_communication(memory: LiveMemory) -> None:
    weight = floats(1)
    bucket = floats(2)
    memory.assign(weight, "parameter")
    memory.see(bucket, "backward", born=True)
    memory.communicated(weight)
    memory.communicated(bucket)
    memory.resized(weight.untyped_storage(), 12)
    assert memory.end_step().at_peak == {"parameter": 12, "communication": 8}


def test_resizing_frees_and_takes_memory(memory: LiveMemory) -> None:
    def seen(*how: Any) -> AbstractContextManager[None]:
        memory.resized(*how)
        return nullcontext()

    flat = floats(4)
    memory.see(flat, "kept")
    with entered(torch.UntypedStorage, "resize_", seen):
        flat.untyped_storage().resize_(0)
        flat.untyped_storage().resize_(32)
    assert flat.untyped_storage().nbytes() == 32
    step = memory.end_step()
    assert step.at_peak == {"unsharded": 32}
    assert (step.allocations, step.growth) == (1, 16)
    assert "resize_" not in vars(torch.UntypedStorage)


def test_memory_freed_elsewhere_ends_when_used_last(memory: LiveMemory) -> None:
    held = [floats(100)]
    later = floats(10)
    memory.see(held[0], "forward", born=True)
    memory.see(held[0], "kept")
    memory.see(later, "forward", born=True)
    in_a_thread(held.clear)
    step = memory.end_step()
    assert (step.peak, step.growth) == (400, 40)
    assert memory.error is None


def test_work_beside_a_waiting_thread_is_the_trainings(memory: LiveMemory) -> None:
    buffer = floats(100)
    activation = floats(10)

    def wait() -> None:
        with memory.waiting():
            memory.see(buffer, "kept")
            begun.set()
            seen.wait(10)

    begun = Event()
    seen = Event()
    thread = Thread(target=wait)
    thread.start()
    assert begun.wait(10)
    memory.see(activation, "forward", born=True)
    seen.set()
    thread.join()
    assert memory.end_step().at_peak == {"forward": 40}


def test_forgotten_storages_are_no_longer_watched(memory: LiveMemory) -> None:
    old = floats(1)
    new = floats(2)
    memory.see(old, "kept")
    memory.see(new, "forward", born=True)
    assert memory.end_step().growth == 8
    del new
    assert memory.end_step().growth == -8
    memory.forget()
    del old
    assert memory.end_step().growth == 0


class Output:
    """The output of a step, which can refer to itself."""

    def __init__(self, tensor: torch.Tensor, *, is_cyclic: bool) -> None:
        self.tensor = tensor
        self.itself = self if is_cyclic else None


@pytest.fixture
def watched(memory: LiveMemory) -> Iterator[LiveMemory]:
    memory.watch_collector()
    yield memory
    memory.forget()


def output(memory: LiveMemory, *, is_cyclic: bool = True) -> Output:
    made = Output(floats(100), is_cyclic=is_cyclic)
    memory.see(made.tensor, "forward", born=True)
    return made


def test_output_of_a_cycle_needs_the_collector(watched: LiveMemory) -> None:
    kept = output(watched)
    watched.end_step()
    kept = output(watched)
    watched.end_step()
    assert watched.in_cycles() == InCycles(bytes=400, holders=("`Output.tensor`",))
    assert kept.itself is kept


def test_output_without_a_cycle_needs_no_collector(watched: LiveMemory) -> None:
    kept = output(watched, is_cyclic=False)
    watched.end_step()
    kept = output(watched, is_cyclic=False)
    watched.end_step()
    assert watched.in_cycles() == InCycles(bytes=0)
    assert kept.itself is None


def test_collection_within_a_step_counts_as_one(watched: LiveMemory) -> None:
    output(watched)
    gc.collect()
    watched.end_step()
    watched.end_step()
    assert watched.in_cycles().bytes == 400


def test_garbage_of_earlier_steps_is_not_counted(watched: LiveMemory) -> None:
    made = Output(floats(100), is_cyclic=True)
    watched.see(made.tensor, "kept")
    del made
    watched.end_step()
    watched.end_step()
    assert watched.in_cycles() == InCycles(bytes=0)


def test_memory_that_training_keeps_is_no_garbage(watched: LiveMemory) -> None:
    kept = [output(watched)]
    watched.end_step()
    watched.end_step()
    assert watched.in_cycles() == InCycles(bytes=0)
    assert len(kept) == 1


def test_forgetting_removes_the_collectors_callback(memory: LiveMemory) -> None:
    before = [*gc.callbacks]
    memory.watch_collector()
    assert len(gc.callbacks) == len(before) + 1
    memory.forget()
    assert gc.callbacks == before
