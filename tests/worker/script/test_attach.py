"""Test the hooks in this process, except for the end of the process. `test_script` launches scripts."""

import contextlib
import importlib
import itertools
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from perfsuite import Script, Topology, documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import MismatchError
from perfsuite.results.counts import COUNTED_STEP, FIRST_COUNTED
from perfsuite.results.rank_report import Failure, RankEvidence, RankReport
from perfsuite.results.run_dir import ANCESTOR_PID, RANK
from perfsuite.worker.clock import startup_clock, timers
from perfsuite.worker.script.attach import Attached, Measured
from perfsuite.worker.script.script_rank import Claim, ScriptRank, device_of
from tests.samples import known
from tests.worker.attaching import ALONE, Start, Unprobed, attaching
from tests.worker.fake_gpu import GPU, FakeAllocator, FakeGPU
from tests.worker.loops import in_a_thread

TWO = ALONE.replace(topology=Topology(processes_per_node=2))
COUNTED = ALONE.replace(max_warmup_steps=COUNTED_STEP)
UNCOUNTED = "the work of a step was not counted: "
ODD = AttributeError("'int' object has no attribute 'values'")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with attaching(tmp_path) as start:
        yield start


def report_of(attached: Attached, rank: int = 0) -> RankReport:
    return documents.read(attached.run_dir.rank(rank), RankReport)


def failure_of(attached: Attached) -> Failure:
    return known(report_of(attached).failure)


def measured(attached: Attached, loop: Callable[..., Any] | None = None, **how: Any) -> RankReport:
    """Return the report of a training. The measurement ends the training."""
    with pytest.raises(Measured):
        (loop or train)(**how)
    report = report_of(attached)
    assert report.failure is None
    return report


def ended(attached: Attached) -> Failure:
    """Return the failure of a training that perfsuite ends with an error."""
    with pytest.raises(SystemExit, match="1"):
        train()
    return failure_of(attached)


def loss_of(model: Callable[..., Any]) -> Any:
    return (model(torch.ones(2, 4)) - 1).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(steps: int = 1000, *, before: Callable[[], object] = lambda: None, make: Any = sgd) -> Any:
    model = nn.Linear(4, 4)
    optimizer = make(model)
    for _ in range(steps):
        before()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train_with_new_optimizers() -> None:
    model = nn.Linear(4, 4)
    while True:
        optimizer = sgd(model)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()


def train_in_backward() -> None:
    model = nn.Linear(4, 4)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in optimizers:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    while True:
        loss_of(model).backward()
        model.zero_grad()


def train_by_copies() -> None:
    """Train copies, like an optimizer with fp32 master weights.

    Each copy gets the gradient of its parameter, and then each parameter gets the value of its copy.
    """
    model = nn.Linear(4, 4)
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    while True:
        loss_of(model).backward()
        pairs = [*zip(model.parameters(), copies, strict=True)]
        for parameter, copied in pairs:
            copied.grad = parameter.grad
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for parameter, copied in pairs:
                parameter.copy_(copied)


def train_in_fp16(*overflows: int, lr: float = 0.1) -> None:
    """Train with a loss scaler. In the given passes, the gradients overflow."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu")
    for number in itertools.count():
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        if number in overflows:
            known(model.weight.grad).fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()


def backward_of_a_sum(times: int) -> None:
    loss = torch.ones(3, requires_grad=True).sum()
    for _ in range(times):
        loss.backward(retain_graph=True)


def test_a_loop_is_measured_and_counted_and_ended(start: Start) -> None:
    attached = start(COUNTED)
    report = measured(attached)
    assert len(report.step_s) == len(report.loss) == len(report.probe_s) == COUNTED.total_steps
    assert report.loss[-1] < report.loss[0]
    counts = known(report.counts)
    assert counts.step == COUNTED_STEP
    assert counts.flops == {"forward": 2 * 2 * 4 * 4, "backward": 2 * 2 * 4 * 4}
    assert known(counts.kernels)["optimizer"] > 0
    assert report.notes == ()
    attached.exits()
    assert report_of(attached).failure is None, "the exit of a measured script is not a failure"


@pytest.mark.parametrize("overflow", [0, 1, 2, 3, 8, COUNTED.total_steps - 1])
def test_an_overflow_of_fp16_changes_no_result(tmp_path: Path, overflow: int) -> None:
    """The passes are those before the first steps, before the counted step and the late one, and later."""
    reports = []
    for name, overflows in (("without", ()), ("with", (overflow,))):
        with attaching(tmp_path / name) as start:
            reports.append(measured(start(COUNTED), partial(train_in_fp16, *overflows)))
    expected, report = reports
    counts = [known(each.counts) for each in reports]
    evidence = [known(each.evidence) for each in reports]
    assert report.loss == pytest.approx(expected.loss)
    assert (counts[0].kernels, counts[0].flops) == (counts[1].kernels, counts[1].flops)
    assert counts[0].also_counted == counts[1].also_counted
    assert evidence[0].samples == evidence[1].samples
    assert report.gradient_squares == pytest.approx(expected.gradient_squares)


def test_skipped_steps_are_noted(start: Start) -> None:
    (note,) = measured(start(COUNTED), partial(train_in_fp16, 3, 4, 8)).notes
    assert note.endswith("is part of the next step: step 4 (2 skipped), step 7 (1 skipped)")


def test_a_skipped_step_of_another_optimizer_is_told(start: Start) -> None:
    def trained() -> None:
        for number in itertools.count():
            for model, optimizer in pairs:
                optimizer.zero_grad()
                scaler.scale(loss_of(model)).backward()
                if number == COUNTED_STEP - 2 and model is pairs[1][0]:
                    known(model.weight.grad).fill_(torch.inf)
                scaler.step(optimizer)
            scaler.update()

    attached = start(COUNTED.replace(framework=Script(path="train.py", loss=None)))
    pairs = [(model, sgd(model)) for model in (nn.Linear(4, 4), nn.Linear(4, 4))]
    scaler = torch.amp.GradScaler("cpu")
    report = measured(attached, trained)
    assert report.counts is None
    assert f"{UNCOUNTED}a loss scaler skipped a step of SGD" in report.notes


def test_loss_of_an_unknown_scaler_is_unknown(start: Start) -> None:
    def trained() -> None:
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        while True:
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model)
            (loss * 1024).backward()
            for parameter in model.parameters():
                known(parameter.grad).div_(1024)
            optimizer.step()
            optimizer.zero_grad()

    report = measured(start(ALONE.replace(precision="fp16-mixed")), trained)
    assert (report.loss, report.loss_is_unknown) == ((), True)
    assert report.notes[-1].startswith("the loss is unknown: the model computes in float16, and ")


@pytest.mark.usefixtures("new_objects_alone")
def test_copied_weights_have_no_gradient_norm(start: Start) -> None:
    report = measured(start(COUNTED), train_by_copies)
    assert report.loss[-1] < report.loss[0]
    assert (report.gradient_squares, report.unclipped_squares) == (None, None)
    assert any(
        note.startswith("the norm of the gradients is unknown: the optimizer SGD updates copies")
        for note in report.notes
    )


def test_batches_of_other_threads_are_noted(start: Start) -> None:
    def before() -> None:
        in_a_thread(lambda: next(iter(loader)))
        next(iter(loader))

    loader: Any = torch.utils.data.DataLoader([torch.ones(1)] * 4)  # type: ignore[arg-type]
    report = measured(start(ALONE), before=before)
    assert (report.data_wait_s, report.data_wait_is_unknown) == ((), True)
    assert report.notes[-1].startswith("data wait is unknown: loaders gave batches to other threads")


def test_start_up_ends_with_the_first_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = startup_clock.StartUpClock(0, before=startup_clock.IMPORTS, now=itertools.count(1).__next__)
    monkeypatch.setattr(startup_clock, "_clock", clock)
    report = measured(start(COUNTED))
    assert clock.is_over
    spans = ["start-up", "start-up: build and first step", "start-up: imports"]
    assert sorted(report.spans) == spans, "neither a loader nor a process group was seen"
    assert known(report.counts).spans["start-up"].modules == {}


def test_profiled_script_has_no_figures(start: Start) -> None:
    attached = start(ALONE.replace(steps=1000), profile=True)
    report = measured(attached)
    assert (report.step_s, report.notes) == ((), ())
    assert attached.steps < 20
    assert attached.run_dir.profile(0).exists()


def test_work_after_the_step_counts_in_the_next(start: Start) -> None:
    """The work is done in the loop, in a hook of another optimizer, and in a hook of both optimizers."""

    def work(*args: object) -> None:
        torch.ones(8, 8) @ torch.ones(8, 8)

    def before() -> None:
        work()
        if next(calls) > 0:  # the first optimizer that steps is the clock
            other.step()

    attached = start(COUNTED)
    beside = nn.Linear(8, 8)
    calls = itertools.count()
    other = sgd(beside)
    other.register_step_pre_hook(work)
    hook = register_optimizer_step_post_hook(work)
    counts = known(measured(attached, before=before).counts)
    hook.remove()
    assert counts.flops["forward"] == 2 * 2 * 4 * 4 + 4 * (2 * 8 * 8 * 8)


@pytest.mark.parametrize(
    ("module", "lacks"),
    [
        (torch._C, "_len_torch_dispatch_stack"),
        (torch.utils._python_dispatch, "_push_mode"),
        (torch.utils._python_dispatch, "is_traceable_wrapper_subclass_type"),
    ],
)
def test_missing_torch_names_cost_only_the_counts(
    start: Start, monkeypatch: pytest.MonkeyPatch, module: Any, lacks: str
) -> None:
    """Another version of torch could lack names that are private in this version."""
    counting = ("counting.counter", "counting.steps", "counting.hidden", "counting.loader_workers")
    for name in ("script.attach", "script.script_rank", "hooks.calls", *counting):
        package, _, attribute = f"perfsuite.worker.{name}".rpartition(".")
        monkeypatch.delattr(sys.modules[package], attribute, raising=False)
        monkeypatch.delitem(sys.modules, f"perfsuite.worker.{name}", raising=False)
    monkeypatch.delattr(module, lacks)
    importlib.import_module("perfsuite.worker.script.attach")
    report = measured(start(COUNTED))
    assert (len(report.step_s), report.counts) == (COUNTED.total_steps, None)
    (note,) = report.notes
    assert re.match(rf"{UNCOUNTED}torch \S+ has no torch\S*\.{lacks}, a private name \(seen in torch ", note)


@pytest.mark.parametrize(
    ("loop", "case", "why"),
    [
        (train_in_backward, COUNTED, "the optimizer steps in backward"),
        (train_with_new_optimizers, COUNTED, "the script built a new optimizer in the first steps"),
        (
            train,
            ALONE,
            "max_warmup_steps=2 leaves no step to count before the measured steps. Give 4 or more",
        ),
    ],
)
def test_what_cannot_be_counted_has_a_reason(start: Start, loop: Any, case: Any, why: str) -> None:
    report = measured(start(case, counts=True), loop)
    assert report.counts is None
    assert UNCOUNTED + why in report.notes
    assert len(report.step_s) == len(report.loss) == case.total_steps


def test_a_replayed_graph_is_noticed_in_a_script(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    attached = start(COUNTED)
    graph: Any = object()  # a build for CUDA makes a graph only on a machine with a GPU
    report = measured(attached, before=lambda: torch.cuda.CUDAGraph.replay(graph))
    assert report.hidden == ("a CUDA graph was replayed, and its operators are not seen (1x)",)


def test_the_device_is_probed_when_all_is_written(start: Start) -> None:
    def probe(device: torch.device) -> dict[str, float]:
        assert device == torch.device("cpu")
        before.append(report_of(attached))
        torch.ones(256 * 2**20, dtype=torch.uint8)
        return {"matmul_tflops": 1.0}

    before: list[RankReport] = []
    attached = start(new_rank=partial(ScriptRank, probe=probe))
    after = measured(attached)
    assert after.device_probe == {"matmul_tflops": 1.0}
    assert before == [after.replace(device_probe={})]
    assert known(after.memory).peak < 256 * 2**20


@pytest.mark.parametrize("others_failed", [False, True])
def test_probe_needs_all_ranks_and_may_fail(start: Start, others_failed: bool) -> None:
    """The probe would wait in its all-reduce for a rank that failed."""

    class BesideOthers(ScriptRank):
        def are_all_measured(self) -> bool:
            return not others_failed

    probe = Mock(side_effect=torch.OutOfMemoryError)
    assert measured(start(new_rank=partial(BesideOthers, probe=probe))).device_probe == {}
    assert probe.called is not others_failed


def test_counting_without_data_gives_no_loss(start: Start) -> None:
    """For example, Lightning's `measure_flops` does a forward and a backward of a copy on the meta device."""

    def measure_flops() -> None:
        copy = nn.Linear(4, 4, device="meta")
        copy(torch.ones(2, 4, device="meta")).sum().backward()

    assert len(measured(start(), before=measure_flops).loss) == ALONE.total_steps


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: loss.backward(torch.ones_like(loss)),
        lambda loss: torch.autograd.backward([loss]),
        lambda loss: torch.autograd.backward(tensors=loss, grad_tensors=torch.ones(())),
    ],
)
def test_a_loss_is_one_however_backward_is_called(start: Start, backward: Callable[[Any], None]) -> None:
    """Older code passes a scalar's gradient, and recomputation calls backward within another backward."""

    def trained() -> None:
        while True:
            x = torch.ones(2, 4).requires_grad_()
            backward(checkpoint(lambda x: (model(x) - 1).square().mean(), x, use_reentrant=True))
            optimizer.step()

    attached = start()
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    assert len(measured(attached, trained).loss) == ALONE.total_steps


def test_clock_can_be_named_and_notes_another_rate(start: Start) -> None:
    def train_critic() -> None:
        for _ in range(5):
            critic(torch.ones(1, 2)).sum().backward()
            often.step()

    attached = start(ALONE.replace(framework=Script(path="train.py", clock="Adam", loss=None)))
    critic = nn.Linear(2, 2)
    often = torch.optim.RMSprop(critic.parameters())
    report = measured(
        attached, before=train_critic, make=lambda model: torch.optim.Adam(model.parameters(), lr=0.1)
    )
    assert len(report.step_s) == ALONE.total_steps
    assert known(report.observed).settings["optimizer"] == "Adam"
    rate, unobserved = report.notes
    assert rate.startswith(
        "RMSprop took 55 steps in 12 training steps. Each step of Adam ends a training step. "
    )
    assert unobserved == "dtypes and gradients are checked for Adam, but not for RMSprop"


def test_separates_two_alternating_optimizers(start: Start) -> None:
    def trained() -> None:
        for optimizer in itertools.cycle((first, second)):
            turns.append(optimizer)
            loss_of(lambda x: more(model(x))).backward()
            optimizer.step()
            second.zero_grad()

    torch.manual_seed(0)  # some weights would diverge
    attached = start(ALONE.replace(framework=Script(path="train.py", loss=None)))
    model = nn.Linear(4, 4)
    more = nn.Linear(4, 4)
    both = [*model.parameters(), *more.parameters()]
    first = torch.optim.SGD(model.parameters(), lr=0.01)
    second = torch.optim.SGD(both, lr=0.01)
    turns: list[Any] = []
    assert len(measured(attached, trained).step_s) == ALONE.total_steps
    assert turns.count(first) == ALONE.total_steps, "each turn of the first optimizer is a step of the clock"


TODO = (
    ". Lower max_warmup_steps or steps, or give the script more data. If it resumes from files of an earlier "
    "launch, pass {launch_dir} in its arguments, command or env, so that it writes its files to a directory "
    "that is new in each launch"
)


@pytest.mark.parametrize(
    ("clock", "trainings", "message"),
    [
        (None, [8], f"the script ended after 8 of 12 optimizer steps{TODO}"),
        (None, [4, 4, 4], f"the script ended after 4 of 12 optimizer steps{TODO}. Optimizers that stepped: "
                             "SGD (4 steps), SGD:2 (4 steps), SGD:3 (4 steps)"),
        ("Adamw", [20], "clock='Adamw': no such optimizer stepped. Optimizers that stepped: SGD (20 steps)"),
    ],
    ids=["one model", "several models, as by cross-validation", "no such clock"],
)  # fmt: skip
def test_a_script_that_ends_early_is_told_why(
    start: Start, clock: str | None, trainings: list[int], message: str
) -> None:
    attached = start(ALONE.replace(framework=Script(path="train.py", clock=clock)))
    kept = [train(steps=steps) for steps in trainings]
    attached.exits()
    failure = failure_of(attached)
    assert (failure.message, failure.traceback) == (message, None), (
        "there is no traceback, because the script did not fail"
    )
    assert len(kept) == len(trainings)


def test_rank_keeps_its_number_without_its_group(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script itself started its processes, without torchrun's variables."""

    class Unobserved(ScriptRank):
        def before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
            """Observe nothing, because the process group is made up."""

    attached = start(TWO, new_rank=Unobserved)
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, Mock(return_value=value))
    train(steps=1)
    monkeypatch.undo()
    attached.crashed(RuntimeError("after destroy_process_group"))
    report = report_of(attached, rank=1)
    assert (report.rank, report.world_size, report.steps) == (1, 2, 1)
    assert not attached.run_dir.rank(0).exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "bf16"}, "compute_dtype: the case asks for 'bfloat16', but 'float32' ran."),
        ({"gradient_accumulation": 2}, "the case says 2, but backward was called on 1 losses per step"),
    ],
)
def test_what_the_first_steps_show_is_told_then(start: Start, changes: Any, said: str) -> None:
    """The failure is reported early instead of after the last step of a long launch."""
    attached = start(ALONE.replace(**changes))
    failure = ended(attached)
    assert failure.kind == "mismatch"
    assert said in failure.message
    assert attached.steps <= 3


@pytest.mark.parametrize(("of_the_other", "is_told"), [(None, False), (8, True), (40, False)])
def test_judges_tokens_once_all_ranks_know_theirs(
    start: Start, monkeypatch: pytest.MonkeyPatch, of_the_other: int | None, is_told: bool
) -> None:
    """The case claims 48 tokens on two ranks together, and this rank has 8."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    framework = Script(path="train.py", loss=None)
    attached = start(TWO.replace(sequence_length=4, micro_batch=6, framework=framework))
    for number, tokens in enumerate((8, of_the_other)):
        if tokens is not None:
            evidence = RankEvidence(data_parallel=2, tokens=tokens, forwards=1)
            Claim(attached.run_dir, number).give(evidence)
    train(steps=1)
    said = "the case claims 48 a step .* but in the second step the model was given 16"
    with pytest.raises(MismatchError, match=said) if is_told else contextlib.nullcontext():
        known(attached.rank).check_first_steps()


@pytest.mark.parametrize("tell", [Attached.crashed, lambda attached, _: attached.exits()])
def test_an_uncaught_error_tells_the_steps(start: Start, monkeypatch: pytest.MonkeyPatch, tell: Any) -> None:
    """The steps are reported even if another hook received the error."""
    attached = start()
    error = torch.OutOfMemoryError("CUDA out of memory")
    train(steps=8)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    tell(attached, error)
    assert (failure_of(attached).kind, report_of(attached).steps) == ("out_of_memory", 8)


def test_counting_ends_with_the_process(start: Start) -> None:
    attached = start(COUNTED)
    train(steps=FIRST_COUNTED)
    assert _get_current_dispatch_mode() is not None
    attached.exits()
    assert _get_current_dispatch_mode() is None
    assert sys.getprofile() is None


def test_agents_rank_reports_its_crash(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single process has no variable RANK."""
    start().crashed(KeyError("RANK"))
    assert not start().run_dir.rank(0).exists(), "the process might be a helper"
    monkeypatch.setenv(RANK, "0")
    attached = start()
    attached.crashed(KeyError("RANK"))
    assert failure_of(attached).message == (
        "KeyError: 'RANK'. RANK is not set, because a single process is started as `python` would start it. "
        'If the script needs torchrun, give command=("torchrun", "--standalone", "--nproc-per-node=1", ...) '
        "in the case"
    )


def test_a_step_captured_in_a_cuda_graph_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture is reported before anything touches the device, unless perfsuite gave up earlier."""
    attached = start()
    attached.give_up(ODD)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    train(steps=3)
    attached = start()
    assert ended(attached).message == (
        "the script captures its optimizer's step in a CUDA graph. perfsuite recognises the "
        "end of a training step by the call of the optimizer, but a replay of the graph does not call the "
        "optimizer. Capture only forward and backward, or turn the graph off"
    )
    assert attached.rank is None


def test_loop_without_an_optimizer_fails_early(start: Start) -> None:
    attached = start(TWO)
    backward_of_a_sum(300)  # this process might be a helper of a rank
    attached = start(ALONE.replace(gradient_accumulation=11))
    backward_of_a_sum(110)
    assert not attached.run_dir.rank(0).exists()
    with pytest.raises(SystemExit, match="1"):
        backward_of_a_sum(1)
    assert failure_of(attached).message == (
        "no optimizer of torch has stepped after 110 backward passes (the case says "
        "gradient_accumulation=11). perfsuite measures the time between steps of a torch.optim.Optimizer, so "
        "training without such an optimizer cannot be measured"
    )


def test_unwritable_report_is_in_the_scripts_log(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """An example is a script that has switched to another user."""
    start().run_dir.rank(0).mkdir()
    with pytest.raises(Measured):
        train()
    assert "FileError: cannot write " in capsys.readouterr().err


def test_second_process_fails_the_launch(start: Start) -> None:
    """The processes can be two consecutive stages or two workers.

    The first one is measured, and reports that there is a second one.
    """
    first = start()
    train(steps=3)
    first.state = "aside"  # the first one continues in its own process
    second = start()
    second.run_dir.training(0).write_text("trains 1 another-host\n" + second.run_dir.training(0).read_text())
    failure = ended(second)
    assert failure.kind == "mismatch"
    assert "two processes of this command trained as rank 0, but only one process" in failure.message
    second.state = "aside"
    first.state = "measuring"
    rank = known(first.rank)
    first._write(rank, rank.report)
    assert failure_of(first).message == failure.message


def test_successor_process_is_measured_and_noted(start: Start) -> None:
    first = start()
    train(steps=3)
    first.exits()
    assert report_of(first).failure is not None
    first.state = "aside"
    text = first.run_dir.training(0).read_text()
    first.run_dir.training(0).write_text(text.replace(str(os.getpid()), str(2**22 + 1)))
    assert measured(start()).notes == (
        "another process trained as rank 0 earlier, and ended without being measured",
    )


@pytest.mark.parametrize("how", ["started by the rank", "forked by the rank", "under a path"])
def test_the_child_of_a_rank_is_left_alone(start: Start, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    attached = start()
    if how == "started by the rank":
        attached.run_dir.training(0).write_text(f"trains {os.getppid()} {socket.gethostname()}\n")
    elif how == "forked by the rank":
        train(steps=3)
        attached._pid = 1
    else:
        monkeypatch.setenv(ANCESTOR_PID, str(os.getpid()))  # the id of any ancestor of this process works
        monkeypatch.setenv("RANK", "0")
        backward_of_a_sum(200)
    train(steps=50)
    attached.crashed(ValueError())
    attached.exits()
    assert not attached.run_dir.rank(0).exists()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(["cuda:3"], "cuda:3"), (["cpu", "cuda:2", "cuda:3"], "cuda:2"), (["cpu"], "cuda:0")],
)
def test_which_device_trains(monkeypatch: pytest.MonkeyPatch, devices: list[str], expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    groups = [{"params": [SimpleNamespace(device=torch.device(device))]} for device in devices]
    assert device_of(SimpleNamespace(param_groups=groups)) == torch.device(expected)


def test_other_allocator_hides_peak_memory(
    start: Start, gpu: FakeGPU, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is missing and the reason is reported, but the script goes on training."""
    refuses = Mock(side_effect=RuntimeError("CUDAPluggableAllocator does not support resetPeakStats.\nmore"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", refuses)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    report = measured(
        start(new_rank=Unprobed, device="cuda"), before=lambda: gpu.work(milliseconds=1.0, ahead_ms=0.0)
    )
    assert report.memory is None
    assert report.notes == (
        "peak memory is unknown: torch's allocator is not in use (CUDAPluggableAllocator does not support "
        "resetPeakStats.)",
    )


@pytest.mark.usefixtures("gpu", "allocator")
def test_clock_and_memory_are_of_one_device(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    attached = start(device="cuda")
    train(steps=1)
    recorder: Any = known(attached.rank).recorder
    assert isinstance(recorder.timer, timers.CudaTimer)
    assert recorder.timer.device == recorder.memory.device == GPU


@pytest.mark.usefixtures("allocator")
def test_peaks_are_kept_before_a_script_resets_them(start: Start) -> None:
    """torch's function is replaced before the script can import it."""
    attached = start()
    assert not hasattr(torch.cuda.reset_peak_memory_stats, "is_watched")
    Attached(attached.run_dir, CaseFile(case=ALONE, device="cuda"))
    assert hasattr(torch.cuda.reset_peak_memory_stats, "is_watched")


@pytest.mark.parametrize("method", ["before_optimizer_step", "result"])
def test_no_error_of_ours_is_a_crash(start: Start, method: str) -> None:
    class Misobserved(ScriptRank):
        def observe(self) -> None:
            super().observe()
            setattr(self.observer, method, Mock(side_effect=ODD))

    attached = start(new_rank=Misobserved)
    with pytest.raises(Measured):
        train()
    failure = failure_of(attached)
    assert (failure.kind, failure.message) == (
        "error",
        "perfsuite could not observe this script because of an error in perfsuite: "
        "AttributeError: 'int' object has no attribute 'values'",
    )
    assert "raise effect\nAttributeError: 'int'" in str(failure.traceback)
    attached.exits()
    assert failure_of(attached) == failure


def test_times_a_late_phase_from_its_definition(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("imported_late")
    module.generate = lambda: None
    script = Script(path="train.py", phases={"rollout": f"{module.__name__}:generate"})
    attached = start(ALONE.replace(framework=script))
    calls = itertools.count()

    def before() -> None:
        if next(calls) == 3:
            monkeypatch.setitem(sys.modules, module.__name__, module)
        module.generate()

    report = measured(attached, before=before)
    first, *_ = report.spans["rollout"].steps
    assert first == 4
    assert "imported_late:generate was defined during the first 4 steps" in "; ".join(report.notes)


@pytest.fixture
def searching(start: Start) -> Iterator[Callable[..., Attached]]:
    """Attach to a script. Its case names a phase that is never found."""
    profiler = sys.getprofile()
    around_import = startup_clock.around_import
    sys.setprofile(None)
    script = Script(path="train.py", phases={"rollout": "never_imported:generate"})
    yield partial(start, ALONE.replace(framework=script))
    sys.setprofile(profiler)
    startup_clock.around_import = around_import


def test_the_search_ends_before_the_rank_is_made(searching: Callable[..., Attached]) -> None:
    profilers = []

    def new_rank(*arguments: Any, **how: Any) -> ScriptRank:
        profilers.append(sys.getprofile())
        return ScriptRank(*arguments, **how)

    searching(new_rank=new_rank)
    before = sys.getprofile()
    is_watched = startup_clock.around_import is not None
    train(steps=1)
    assert before is not None
    assert is_watched
    assert profilers == [None]


def test_the_search_ends_in_a_child_of_a_rank(searching: Callable[..., Attached]) -> None:
    attached = searching()
    attached.run_dir.training(0).write_text(f"trains {os.getppid()} {socket.gethostname()}\n")
    train(steps=1)
    assert attached.state == "aside"
    assert sys.getprofile() is None
