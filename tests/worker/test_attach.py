"""In this process, hooks and all but for the end of it; launched, in `test_script`."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import perfsuite.worker
from perfsuite import documents
from perfsuite.case.case import CaseFile, Topology
from perfsuite.errors import FileError, MismatchError
from perfsuite.frameworks.script import Script
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.rank_report import UNREPORTED, Evidence, Failure, Memory, RankReport
from perfsuite.results.run_dir import ANCESTOR_PID
from perfsuite.worker import memory, script_rank, timers
from perfsuite.worker.attach import Attached, Measured
from perfsuite.worker.claim import Claim
from perfsuite.worker.observe import Observer
from perfsuite.worker.recorder import Recorder
from perfsuite.worker.script_rank import ScriptRank, device_of
from tests.worker.attaching import ALONE, Start, attaching


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with attaching(tmp_path) as start:
        yield start


def report_of(attached: Attached) -> RankReport:
    return documents.read(attached.run_dir.rank(0), RankReport)


def failure_of(attached: Attached) -> Failure:
    failure = report_of(attached).failure
    assert failure is not None
    return failure


def measured(attached: Attached, loop: Callable[..., Any] | None = None, **how: Any) -> RankReport:
    """What a training that the measurement ends has reported."""
    with pytest.raises(Measured):
        (loop or train)(**how)
    report = report_of(attached)
    assert report.failure is None
    return report


def counting(start: Start) -> Attached:
    return start(ALONE.replace(max_warmup_steps=COUNTED_STEP))


def train(
    steps: int = 1000, *, before: Callable[[], None] = lambda: None, kind: Any = torch.optim.SGD
) -> Any:
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(steps):
        before()
        (model(torch.ones(2, 4)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_a_loop_is_measured_and_ended(start: Start) -> None:
    attached = start()
    report = measured(attached)
    assert len(report.step_s) == len(report.loss) == len(report.probe_s) == ALONE.total_steps
    assert report.loss[-1] < report.loss[0]
    assert report.notes == ()
    attached.exits()
    assert report_of(attached).failure is None, "its end is no news"


def test_what_a_step_of_a_script_does_is_counted(start: Start) -> None:
    report = measured(counting(start))
    assert report.counts is not None
    assert report.counts.step == COUNTED_STEP
    assert report.counts.flops == {"forward": 2 * 2 * 4 * 4, "backward": 2 * 2 * 4 * 4}
    assert report.counts.kernels["optimizer"] > 0
    assert report.notes == ()


@pytest.mark.parametrize("how", ["in the loop", "a hook of all optimizers", "another optimizer"])
def test_work_behind_the_optimizer_s_step_is_counted_in_the_next_step(start: Start, how: str) -> None:
    def work(*args: object) -> None:
        torch.ones(8, 8) @ torch.ones(8, 8)

    attached = counting(start)
    beside, calls = nn.Linear(8, 8), itertools.count()
    other = torch.optim.SGD(beside.parameters())
    other.register_step_pre_hook(work)

    def step_other() -> None:
        if next(calls) > 0:  # the first optimizer that steps is the clock
            other.step()

    before = {"in the loop": work, "another optimizer": step_other}.get(how, lambda: None)
    handle = register_optimizer_step_post_hook(work) if how == "a hook of all optimizers" else None
    try:
        counts = measured(attached, before=before).counts
    finally:
        if handle is not None:
            handle.remove()
    assert counts is not None
    assert counts.flops["forward"] == 2 * 2 * 4 * 4 + 2 * 8 * 8 * 8


@pytest.mark.parametrize(
    ("module", "lacks"),
    [
        (torch._C, "_len_torch_dispatch_stack"),
        (torch.utils._python_dispatch, "_push_mode"),
        (torch.utils._python_dispatch, "is_traceable_wrapper_subclass_type"),
    ],
)
def test_a_torch_without_what_counting_needs_costs_the_counts_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, module: Any, lacks: str
) -> None:
    """Another version of torch may lack what is private in this one."""
    for name in ("attach", "script_rank", "calls", "counter", "counting", "hidden"):
        monkeypatch.delattr(perfsuite.worker, name, raising=False)
        monkeypatch.delitem(sys.modules, f"perfsuite.worker.{name}", raising=False)
    monkeypatch.delattr(module, lacks)
    importlib.import_module("perfsuite.worker.attach")
    attached = counting(start)
    report = measured(attached)
    assert len(report.step_s) == ALONE.total_steps + COUNTED_STEP - ALONE.max_warmup_steps
    assert report.counts is None
    (note,) = report.notes
    assert note.startswith("what a step does was not counted: ImportError: cannot import name")


def test_an_optimizer_that_steps_in_backward_is_measured_and_not_counted(start: Start) -> None:
    attached = counting(start)
    model = nn.Linear(4, 4)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in optimizers:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with contextlib.suppress(Measured):
        for _ in range(1000):
            (model(torch.ones(2, 4)) - 1).square().mean().backward()
            model.zero_grad()
    report = report_of(attached)
    assert (report.failure, report.counts) == (None, None)
    assert len(report.step_s) == len(report.loss) == ALONE.total_steps + COUNTED_STEP - 2
    assert report.notes == ("what a step does was not counted: the optimizer steps in backward",)


def test_a_script_without_room_for_counting_is_told(start: Start) -> None:
    attached = start()
    attached.request = attached.request.replace(counts=True)
    report = measured(attached)
    assert report.counts is None
    assert report.notes == (
        "what a step does was not counted: max_warmup_steps=2 leaves no step before the measured ones for "
        "it: give 4 or more",
    )


def test_the_device_is_probed_after_all_is_measured_and_written(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(device: torch.device) -> dict[str, float]:
        assert device == torch.device("cpu")
        before.append(report_of(attached))
        torch.ones(256 * 2**20, dtype=torch.uint8)
        return {"matmul_tflops": 1.0}

    before: list[RankReport] = []
    attached = start()
    monkeypatch.setattr(script_rank, "device_probe", probe)
    with pytest.raises(Measured):
        train()
    after = report_of(attached)
    assert after.device_probe == {"matmul_tflops": 1.0}
    assert before == [after.replace(device_probe={})]
    assert after.memory is not None
    assert after.memory.peak < 256 * 2**20


def test_a_probe_that_fails_is_left_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_rank, "device_probe", Mock(side_effect=torch.OutOfMemoryError))
    assert measured(start()).device_probe == {}


def test_no_rank_probes_where_another_has_failed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for that one in the all-reduce."""
    probed: list[torch.device] = []
    monkeypatch.setattr(script_rank, "device_probe", probed.append)
    monkeypatch.setattr(ScriptRank, "are_all_measured", lambda rank: False)
    measured(start())
    assert probed == []


def test_what_counts_operations_without_data_is_no_loss(start: Start) -> None:
    """As Lightning's `measure_flops`: forward and backward of a copy on the meta device."""

    def measure_flops() -> None:
        copy = nn.Linear(4, 4, device="meta")
        copy(torch.ones(2, 4, device="meta")).sum().backward()

    attached = start()
    measure_flops()
    assert len(measured(attached, before=measure_flops).loss) == ALONE.total_steps


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: loss.backward(torch.ones_like(loss)),
        lambda loss: torch.autograd.backward([loss]),
        lambda loss: torch.autograd.backward(tensors=loss, grad_tensors=torch.ones(())),
    ],
)
def test_a_loss_is_one_however_backward_is_called(start: Start, backward: Callable[[Any], None]) -> None:
    """The gradient of a scalar is given, as in older code; recomputation calls backward within one."""
    attached = start()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (model(x) - 1).square().mean()  # type: ignore[no-any-return]

    def trained() -> None:
        for _ in range(1000):
            backward(checkpoint(loss, torch.ones(2, 4).requires_grad_(), use_reentrant=True))
            optimizer.step()

    assert len(measured(attached, trained).loss) == ALONE.total_steps


def test_a_second_models_backward_before_training_is_no_loss(start: Start) -> None:
    attached = start()
    (nn.Linear(4, 4)(torch.ones(2, 4)).sum() * 1e6 + 1e9).backward()
    assert measured(attached).loss[0] < 1e3


def test_the_clock_can_be_named_and_another_rate_is_noted(start: Start) -> None:
    attached = start(ALONE.replace(framework=Script(path="train.py", clock="Adam", loss=None)))
    critic = nn.Linear(2, 2)
    often = torch.optim.RMSprop(critic.parameters())

    def train_critic() -> None:
        for _ in range(5):
            critic(torch.ones(1, 2)).sum().backward()
            often.step()

    report = measured(attached, before=train_critic, kind=torch.optim.Adam)
    assert len(report.step_s) == ALONE.total_steps
    assert report.observed is not None
    assert report.observed.settings["optimizer"] == "Adam"
    assert len(report.notes) == 1
    assert report.notes[0].startswith("RMSprop stepped 5 times for each step of the clock, Adam: ")


def test_a_clock_that_does_not_step_is_named_at_the_end_with_those_that_did(start: Start) -> None:
    attached = start(ALONE.replace(framework=Script(path="train.py", clock="Adamw")))
    train(steps=20)
    attached.exits()
    assert (
        failure_of(attached).message
        == "clock='Adamw': no such optimizer stepped. Those that stepped: SGD (20 steps)"
    )


def test_a_training_that_builds_its_optimizer_anew_is_measured(start: Start) -> None:
    attached = counting(start)
    model = nn.Linear(4, 4)

    def trained() -> None:
        while True:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                (model(torch.ones(2, 4)) - 1).square().mean().backward()
                optimizer.step()

    assert measured(attached, trained).notes == (
        "what a step does was not counted: the script built a new optimizer in the first steps",
    )


def test_a_training_of_several_models_tells_the_optimizers_that_it_had(start: Start) -> None:
    """As by cross-validation."""
    attached = start()
    kept = [train(steps=4) for _ in range(3)]
    attached.exits()
    failure = failure_of(attached)
    assert len(kept) == 3
    assert failure.message.startswith(
        "the script ended after 4 of 12 optimizer steps: lower max_warmup_steps"
    )
    said = ". Those that stepped: SGD (4 steps), SGD:2 (4 steps), SGD:3 (4 steps)"
    assert failure.message.endswith(said)


def test_a_rank_that_leaves_its_process_group_keeps_its_number(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes were started by the script itself, without torchrun's variables."""
    two = ALONE.replace(topology=Topology(processes_per_node=2))
    attached = start(two)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(Observer, "before_optimizer_step", lambda *args: None)
    train(steps=1)
    monkeypatch.undo()
    attached.crashed(RuntimeError("after destroy_process_group"))
    report = documents.read(attached.run_dir.rank(1), RankReport)
    assert (report.rank, report.world_size, report.steps) == (1, 2, 1)
    assert not attached.run_dir.rank(0).exists()


def test_two_optimizers_in_turn_of_which_one_steps_more_are_told_apart(start: Start) -> None:
    attached = start(ALONE.replace(framework=Script(path="train.py", loss=None)))
    model, more = nn.Linear(4, 4), nn.Linear(4, 4)
    both = [*model.parameters(), *more.parameters()]
    first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(both, lr=0.1)
    turns: list[Any] = []

    def trained() -> None:
        for optimizer in itertools.cycle((first, second)):
            turns.append(optimizer)
            (more(model(torch.ones(2, 4))) - 1).square().mean().backward()
            optimizer.step()

    assert len(measured(attached, trained).step_s) == ALONE.total_steps
    assert turns.count(first) == ALONE.total_steps, "each step of the clock is its own"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "bf16"}, "compute_dtype: the case asks for 'bfloat16', but 'float32' ran."),
        ({"gradient_accumulation": 2}, "the case says 2, but backward was called on 1 losses a step"),
    ],
)
def test_what_the_first_steps_show_is_told_then(start: Start, changes: Any, said: str) -> None:
    """And not after the last one of a long launch."""
    attached = start(ALONE.replace(**changes))
    with pytest.raises(SystemExit, match="1"):
        train()
    failure = failure_of(attached)
    assert failure.kind == "mismatch"
    assert said in failure.message
    assert attached.steps <= 3


@pytest.mark.parametrize(("of_the_other", "is_told"), [(None, False), (8, True), (40, False)])
def test_tokens_are_told_when_all_ranks_know_theirs(
    start: Start, monkeypatch: pytest.MonkeyPatch, of_the_other: int | None, is_told: bool
) -> None:
    """48 are claimed for two ranks, and this one has 8."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    two = {"topology": Topology(processes_per_node=2), "framework": Script(path="train.py", loss=None)}
    attached = start(ALONE.replace(sequence_length=4, micro_batch=6, **two))
    if of_the_other is not None:
        Claim(attached.run_dir, 1).give(Evidence(data_parallel=2, tokens=of_the_other, forwards=1))
    Claim(attached.run_dir, 0).give(Evidence(data_parallel=2, tokens=8, forwards=1))
    train(steps=1)
    assert attached.rank is not None
    said = r"the case claims 48 a step .* but the model was given 16 in the second step"
    with pytest.raises(MismatchError, match=said) if is_told else contextlib.nullcontext():
        attached.rank.check_first_steps()


def test_an_error_that_another_hook_of_uncaught_errors_takes_is_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = start()
    train(steps=8)
    monkeypatch.setattr(sys, "last_value", torch.OutOfMemoryError("CUDA out of memory"), raising=False)
    attached.exits()
    failure = failure_of(attached)
    assert failure.kind == "out_of_memory"


def test_an_optimizer_s_step_in_a_cuda_graph_is_told_before_anything_touches_the_device(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = start()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(SystemExit, match="1"):
        train()
    assert failure_of(attached).message == (
        "the script captures its optimizer's step in a CUDA graph. A replay calls no optimizer, whose step "
        "is the clock: such training cannot be measured. Capture forward and backward alone, and call "
        "optimizer.step() outside of the graph, or switch the graph off"
    )
    assert attached.rank is None


def test_what_a_script_captures_after_an_error_of_ours_does_not_end_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = start()
    attached.give_up(ValueError("odd"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    train(steps=3)


def test_a_replayed_graph_is_noticed_in_a_script(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    attached = counting(start)
    graph: Any = object()  # a build for CUDA makes a graph only where there is a GPU
    report = measured(attached, before=lambda: torch.cuda.CUDAGraph.replay(graph))
    assert report.hidden == ("a CUDA graph was replayed, whose operators are not seen (1x)",)


def test_a_loop_without_an_optimizer_of_torch_is_told_at_once(start: Start) -> None:
    attached = start(ALONE.replace(gradient_accumulation=11))
    loss = torch.ones(3, requires_grad=True).sum()
    for _ in range(110):
        loss.backward(retain_graph=True)
    assert not attached.run_dir.rank(0).exists()
    with pytest.raises(SystemExit, match="1"):
        loss.backward()
    assert failure_of(attached).message == (
        "no optimizer of torch has stepped after 110 backward passes (the case says "
        "gradient_accumulation=11): the clock is the step of a torch.optim.Optimizer, and what trains "
        "without one cannot be measured"
    )


def test_what_may_be_a_helper_of_a_rank_may_go_without_an_optimizer(start: Start) -> None:
    attached = start(ALONE.replace(topology=Topology(processes_per_node=2)))
    for _ in range(300):
        torch.ones(3, requires_grad=True).sum().backward()
    assert not attached.run_dir.rank(0).exists()


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (1, ": lower max_warmup_steps or steps, or give it more data; or, where it goes on from files of an "
            "earlier run, have it keep them in {launch_dir}, a new directory in each launch"),
        (2, ", but not so in the launch before: that may have left files which this one went on from. Have "
            "the script keep its files in {launch_dir} (in its arguments, command or env), a new "
            "directory in each launch"),
    ],
)  # fmt: skip
def test_a_script_that_ends_early_is_told_of_files_that_are_left(
    start: Start, launch: int, said: str
) -> None:
    attached = start(launch=launch)
    train(steps=8)
    attached.exits()
    assert failure_of(attached).message == f"the script ended after 8 of 12 optimizer steps{said}"


def test_a_script_that_fails_tells_the_steps_that_it_had_made(start: Start) -> None:
    attached = start()
    train(steps=8)
    attached.crashed(RuntimeError("Connection closed by peer"))
    assert report_of(attached).steps == 8


def test_a_script_whose_report_cannot_be_written_tells_it_in_its_log(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has become another user, say."""

    def refused(path: Path, document: Any) -> NoReturn:
        raise FileError(f"cannot write {path}: Permission denied")

    start()
    monkeypatch.setattr(documents, "write", refused)
    with pytest.raises(Measured):
        train(steps=12)
    said = capsys.readouterr().err
    assert f"{UNREPORTED} error: perfsuite could not observe this script" in said
    assert "FileError: cannot write " in said


def test_a_process_that_trains_beside_another_ends_and_fails_the_launch(start: Start) -> None:
    """Two stages after each other, or two workers at once: the first one is measured, and told."""
    first = start()
    train(steps=3)
    first.state = "aside"  # it goes on in its own process
    second = start()
    second.run_dir.training(0).write_text("trains 1 another-host\n" + second.run_dir.training(0).read_text())
    with pytest.raises(SystemExit, match="1"):
        train()
    failure = failure_of(second)
    assert failure.kind == "mismatch"
    assert "two processes of this command trained as rank 0: one process of each rank" in failure.message
    second.state, first.state = "aside", "measuring"
    assert first.rank is not None
    first._write(first.rank, first.rank.report)
    told = report_of(first).failure
    assert told is not None
    assert told.message == failure.message


def test_a_process_that_goes_on_after_one_that_ended_is_measured_with_a_note(start: Start) -> None:
    first = start()
    train(steps=3)
    first.exits()
    assert report_of(first).failure is not None
    first.state = "aside"
    text = first.run_dir.training(0).read_text()
    first.run_dir.training(0).write_text(text.replace(str(os.getpid()), str(2**22 + 1)))
    second = start()
    report = measured(second)
    assert report.notes == ("another process trained as rank 0 before, and ended without being measured",)


@pytest.mark.parametrize("how", ["started by the rank", "forked by the rank", "under a path"])
def test_the_child_of_a_rank_is_left_alone(start: Start, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    attached = start()
    if how == "started by the rank":
        attached.run_dir.training(0).write_text(f"trains {os.getppid()} {socket.gethostname()}\n")
    elif how == "forked by the rank":
        train(steps=3)
        attached._pid = 1
    else:
        monkeypatch.setenv(ANCESTOR_PID, "1")
        monkeypatch.setenv("RANK", "0")
        for _ in range(200):
            torch.ones(3, requires_grad=True).sum().backward()
    train(steps=50)
    attached.crashed(ValueError())
    attached.exits()
    assert not attached.run_dir.rank(0).exists()


def test_the_device_is_that_of_the_parameters_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(*devices: str) -> Any:
        return SimpleNamespace(
            param_groups=[{"params": [SimpleNamespace(device=torch.device(device))]} for device in devices]
        )

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert device_of(optimizer("cuda:3")) == torch.device("cuda", 3)
    assert device_of(optimizer("cpu", "cuda:2", "cuda:3")) == torch.device("cuda", 2)
    assert device_of(optimizer("cpu")) == torch.device("cuda", 0), "its state is on the host"


def test_an_allocator_of_the_scripts_own_leaves_peak_memory_unknown(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure is then missing, and the reason is told; the script trains on."""

    def refuses(device: torch.device) -> NoReturn:
        raise RuntimeError("CUDAPluggableAllocator does not yet support resetPeakStats.\nmore")

    monkeypatch.setattr(script_rank, "device_of", lambda optimizer: torch.device("cuda", 0))
    monkeypatch.setattr(memory, "CudaMemory", refuses)
    monkeypatch.setattr(timers, "clock_for", lambda device: (timers.HostTimer(), None))
    attached = start()
    attached.request = attached.request.replace(device="cuda")
    monkeypatch.setattr(ScriptRank, "probed", lambda rank: {})
    report = measured(attached)
    assert report.memory is None
    assert report.notes == (
        "peak memory is unknown: torch's allocator is not in use (CUDAPluggableAllocator does not yet "
        "support resetPeakStats.)",
    )


def test_clock_and_memory_are_those_of_that_device(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class MemoryOfGPU:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def release(self) -> None: ...

        def read(self) -> Memory: ...  # type: ignore[empty-body]

    third = torch.device("cuda", 3)
    kept: list[bool] = []
    monkeypatch.setattr(script_rank, "device_of", lambda optimizer: third)
    monkeypatch.setattr(memory, "CudaMemory", MemoryOfGPU)
    monkeypatch.setattr(memory, "keep_peaks", lambda: kept.append(True))
    monkeypatch.setattr(Recorder, "start", lambda recorder: None)
    attached = start()
    attached.request = attached.request.replace(device="cuda")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Attached, "_end_step", lambda *args: None)
        train(steps=1)
    assert attached.rank is not None
    recorder = attached.rank.recorder
    assert isinstance(recorder.timer, timers.CudaTimer)
    assert recorder.timer.device == third
    assert isinstance(recorder.memory, MemoryOfGPU)
    assert recorder.memory.device == third
    on_gpu = CaseFile(case=ALONE, device="cuda")
    assert kept == []
    Attached(attached.run_dir, on_gpu)
    assert kept == [True], "before the script can hold torch's own function"


@pytest.mark.parametrize("method", ["before_optimizer_step", "result"])
def test_what_observing_raises_is_no_crash_of_the_script(
    start: Start, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fails(*args: Any) -> None:
        raise AttributeError("'int' object has no attribute 'values'")

    monkeypatch.setattr(Observer, method, fails)
    attached = start()
    with pytest.raises(SystemExit):
        train()
    failure = failure_of(attached)
    assert (failure.kind, failure.message) == (
        "error",
        "perfsuite could not observe this script, which is an error in perfsuite: "
        "AttributeError: 'int' object has no attribute 'values'",
    )
    assert failure.traceback is not None
    assert "in fails" in failure.traceback
    attached.exits()
    assert report_of(attached).failure == failure
