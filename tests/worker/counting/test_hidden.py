"""Test ways to hide work from a counted step: each way is reported, or hides nothing (docs/limits.md)."""

import _thread
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite.results.counts import Counts
from perfsuite.worker.counting import hidden
from perfsuite.worker.counting.counter import StepCounter
from perfsuite.worker.hooks import calls
from tests.twin_counts import collective
from tests.worker.loops import INPUTS, Loop, in_a_thread

Train = Callable[[Loop], object]
REPLAYED = "a CUDA graph was replayed, and its operators are not seen"
GRADIENTS = "none of the counted operators computed the gradients of"
FLOPS = "weights of linear layers take at least"


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake CUDA graphs. A replay does the captured work, but torch's dispatcher does not see the work."""
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", without_the_dispatcher)
    calls.watch()


def without_the_dispatcher(work: Callable[[], object]) -> None:
    """Run the work so that this thread's dispatch modes do not see it."""
    with torch._C._DisableTorchDispatch():
        work()


def replay(captured: Any) -> None:
    """Call the watched method with the work of a replay. A real graph would need a GPU."""
    torch.cuda.CUDAGraph.replay(captured)


def clip(training: Loop) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def replayed_and_clipped(training: Loop) -> None:
    replay(training.backward)
    clip(training)


class Replayed(torch.autograd.Function):
    """A linear layer that replays graphs, as `make_graphed_callables` and inductor's graph trees build it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Any:
        ctx.save_for_backward(inputs, weight)
        out = torch.empty(inputs.shape[0], weight.shape[0])
        replay(lambda: torch.addmm(bias, inputs, weight.t(), out=out))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        of_weight = torch.empty_like(weight)
        of_bias = torch.empty(weight.shape[0])

        def captured() -> None:
            torch.mm(gradients[0].t(), inputs, out=of_weight)
            torch.sum(gradients[0], 0, out=of_bias)

        replay(captured)
        return None, of_weight, of_bias


def partly(training: Loop) -> None:
    """Train with the first layer replayed, forward and backward."""
    out = Replayed.apply(INPUTS, *training.model[0].parameters())  # type: ignore[no-untyped-call]
    training.model[2](out.relu()).square().mean().backward()


class Swallowing(TorchDispatchMode):
    """A dispatch mode that the training code enters. The modes below it do not see what it computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def below_a_mode(training: Loop) -> None:
    with Swallowing():  # type: ignore[no-untyped-call]
        training.backward()


def fill(gradients: list[Tensor]) -> None:
    """Write values from numpy into the gradients."""
    for gradient in gradients:
        gradient.numpy()[...] = 1


def gradients_of(training: Loop) -> list[Tensor]:
    for parameter in training.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in training.model.parameters()]


def by_numpy(training: Loop) -> None:
    fill(gradients_of(training))


def in_another_process(training: Loop) -> None:
    gradients = [gradient.share_memory_() for gradient in gradients_of(training)]
    child = os.fork()
    if child == 0:
        try:
            fill(gradients)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


class InC(torch.autograd.Function):
    """The whole model as one kernel that is called without the dispatcher, for example through pybind."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Any:
        ctx.shapes = [parameter.shape for parameter in parameters]
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        made = list(map(torch.empty, ctx.shapes))
        fill(made)
        return tuple(made)


def by_a_kernel_in_c(training: Loop) -> None:
    InC.apply(*training.model.parameters()).backward()  # type: ignore[no-untyped-call]


def operator_of_a_package(name: str) -> Callable[[Tensor], Tensor]:
    """Return a fused operator of a package. Counting sees the operator, but has no formula for it."""

    def made(x: Tensor) -> Tensor:
        return x.detach().clone()

    return torch.library.custom_op(name, made, mutates_args=())


def computing(gradient_of: Callable[[Tensor], Tensor]) -> Train:
    """Return a loop whose gradients are computed by an operator."""

    def train(training: Loop) -> None:
        for parameter in training.model.parameters():
            parameter.grad = gradient_of(parameter)

    return train


# Asynchronous tensor parallelism sends with such an operator.
gathered = operator_of_a_package("symm_mem::hiding_all_gather")
put = operator_of_a_package("nvshmem::hiding_put")
by_an_operator_of_a_package = computing(operator_of_a_package("hiding::gradient"))
by_products_of_a_package = computing(operator_of_a_package("hiding::linear_backward"))
"""Their names show that they are products, so the missing formula is reported."""


class Buffer:
    """A buffer like that of DeepEP, which sends in its own kernels."""

    def dispatch(self, tokens: Tensor) -> Tensor:
        return tokens


def after(send: Callable[[Tensor], object]) -> Train:
    """Return a loop that sends messages without any process group."""

    def train(training: Loop) -> None:
        send(INPUTS)
        training.backward()

    return train


WAYS: dict[str, tuple[Train, str]] = {
    "a CUDA graph of forward and backward": (lambda training: replay(training.backward), REPLAYED),
    "the same, and gradients clipped outside": (replayed_and_clipped, GRADIENTS),
    "a graph of a part, make_graphed_callables, reduce-overhead": (partly, f"{REPLAYED} (2x)"),
    "dispatch switched off": (
        lambda training: without_the_dispatcher(training.backward),
        f"{GRADIENTS} 4 of 4 parameters, such as 0.weight",
    ),
    "another thread": (lambda training: in_a_thread(training.backward), GRADIENTS),
    "a dispatch mode of the training's own": (below_a_mode, GRADIENTS),
    "numpy": (by_numpy, GRADIENTS),
    "another process": (in_another_process, GRADIENTS),
    "an autograd function in C": (by_a_kernel_in_c, GRADIENTS),
    "a fused operator of a package": (by_an_operator_of_a_package, FLOPS),
    "symmetric memory": (after(gathered), "symm_mem.hiding_all_gather ran, and its messages"),
    "NVSHMEM": (after(put), "nvshmem.hiding_put ran"),
    "DeepEP": (
        after(lambda tokens: Buffer().dispatch(tokens)),
        "DeepEP's dispatch was called, and its messages are not counted (1x)",
    ),
}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_reports_each_way_to_hide_work(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", types.SimpleNamespace(Buffer=Buffer))
    train, rule = WAYS[way]
    counting = Loop().run(train)
    assert counting.notes == []
    assert any(rule in why for why in counting.hidden), counting.hidden


def by_torchscript(training: Loop) -> None:
    if not isinstance(training.model, torch.jit.ScriptModule):
        training.model = torch.jit.script(training.model)
    training.backward()


def by_autograd_grad(training: Loop) -> None:
    parameters = list(training.model.parameters())
    gradients = torch.autograd.grad(training.model(INPUTS).square().mean(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def by_parts(training: Loop) -> None:
    for rows in INPUTS.split(4):
        training.model(rows).square().mean().backward()


def without_the_first_layer(training: Loop) -> None:
    """Train a model whose first layer has gradients, but only zeros."""
    training.model[2](torch.ones(8, 32)).square().mean().backward()


def without_all_gradients(training: Loop) -> None:
    training.model.zero_grad()
    without_the_first_layer(training)


def scaled_and_clipped(training: Loop) -> None:
    (1024 * training.model(INPUTS).square().mean()).backward()
    for parameter in training.model.parameters():
        parameter.grad.div_(1024)
    clip(training)


def with_a_penalty_only(training: Loop) -> None:
    """Train a model whose first layer is used only in a penalty."""
    loss = training.model[2](torch.ones(8, 32)).square().mean() + training.model[0].weight.square().sum()
    loss.backward()


def with_zeroth_order_gradients(training: Loop) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            direction = torch.randn_like(parameter)
            before = training.model(INPUTS).square().mean()
            parameter.add_(direction, alpha=1e-3)
            after = training.model(INPUTS).square().mean()
            parameter.add_(direction, alpha=-1e-3)
            parameter.grad = direction * ((after - before) / 1e-3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("train", [
    Loop.backward, by_torchscript, by_autograd_grad, by_parts, without_the_first_layer,
    without_all_gradients, scaled_and_clipped, with_a_penalty_only, with_zeroth_order_gradients,
    by_products_of_a_package,
])  # fmt: skip
def test_honest_training_hides_nothing(train: Train) -> None:
    counting = Loop().run(train)
    assert (counting.notes, counting.hidden) == ([], ())


@pytest.mark.parametrize(
    "kind", ["lstm", "embedding", "convolutions", "attention", "scalar", "tied", "experts"]
)
@pytest.mark.parametrize("to_none", [True, False])
def test_models_of_all_kinds_hide_nothing(kind: str, to_none: bool) -> None:
    torch.manual_seed(0)
    tokens = torch.arange(12).view(3, 4)
    embedding = nn.Embedding(32, 8)
    head = nn.Linear(8, 32, bias=False)
    lstm = nn.LSTM(8, 8, batch_first=True)
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 3, 3))
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
    scale = nn.Parameter(torch.ones(()))
    if kind == "tied":
        head.weight = embedding.weight
    forwards: dict[str, tuple[list[Any], Callable[[], Tensor]]] = {
        "lstm": ([embedding, lstm, head], lambda: head(lstm(embedding(tokens))[0])),
        "embedding": ([embedding], lambda: embedding(tokens)),
        "convolutions": ([convolutions], lambda: convolutions(torch.ones(2, 3, 8, 8))),
        "attention": ([embedding, attention, head], lambda: head(attention(embedding(tokens)))),
        "scalar": ([head, nn.ParameterList([scale])], lambda: scale * head(torch.ones(2, 8))),
        "tied": ([embedding, head], lambda: head(embedding(tokens))),
        "experts": ([embedding, experts, head], lambda: head(experts[3](embedding(tokens)))),
    }
    modules, forward = forwards[kind]
    training = Loop()
    training.model = nn.ModuleList(modules)
    training.optimizer = torch.optim.AdamW(training.model.parameters())

    def train(_: Loop) -> None:
        training.model.zero_grad(set_to_none=to_none)
        forward().square().mean().backward()

    counting = training.run(train)
    assert (counting.notes, counting.hidden) == ([], ())


def test_rare_optimizers_may_keep_old_gradients() -> None:
    """An example is the optimizer of the other network of a GAN."""
    training = Loop()
    other = nn.Linear(4, 4)
    seldom = torch.optim.SGD(other.parameters())
    other(torch.ones(2, 4)).sum().backward()
    training.counting.before_optimizer_step(training.optimizer)
    training.counting.before_optimizer_step(seldom)
    assert training.run().hidden == ()


def test_small_gradients_of_kernels_hide_no_step() -> None:
    def train(training: Loop) -> None:
        training.backward()
        training.model.scan.grad = torch.empty(16)
        fill([training.model.scan.grad])

    training = Loop()
    training.model.register_parameter("scan", nn.Parameter(torch.ones(16)))
    training.optimizer.add_param_group({"params": [training.model.scan]})
    assert training.run(train).hidden == ()


def test_compiled_model_needs_no_visible_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(counters, "stats", {"unique_graphs": 1})
    assert Loop().run(by_numpy).hidden == ()


@pytest.mark.parametrize(
    ("seen", "operator", "begun", "is_reported"),
    [
        (1, "c10d.allreduce_", [10, 20], True),
        (10, "c10d.allreduce_", [10, 20], False),
        (11, "c10d.allreduce_", [10, 20], False),
        (1, "c10d.reduce_scatter_", [10, 20], False),  # one call begins several collectives
        (1, "c10d.allreduce_", [10, None], False),  # it is unknown how many collectives began
    ],
)
def test_collectives_that_began_and_were_not_seen(
    seen: int, operator: str, begun: list[int], is_reported: bool
) -> None:
    message = collective("all_reduce", count=seen)
    counts = Counts(flops={"backward": 10**9}, collectives=(message, message.replace(ranks=1, count=99)))
    counter: Any = types.SimpleNamespace(collectives={operator})
    watch = hidden.Watch(Mock(side_effect=begun))
    assert watch.reasons(counter, counts, nn.Linear(1, 1)) == is_reported * (
        "10 collectives began in the process groups, but the counting saw only 1 of them: the others were "
        "called by another thread, or without torch's dispatcher",
    )


def as_rank(rank: int, file: str) -> None:
    """Run every collective of gloo, and then collectives that counting does not see.

    Each is counted separately.
    """
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    group: Any = dist.group.WORLD
    one = torch.ones(8)
    four = torch.ones(4)
    sixteen = torch.ones(16)

    def pair() -> list[Tensor]:
        return [torch.ones(8), torch.ones(8)]

    def coalesced() -> None:
        c10d: Any = dist.distributed_c10d
        with c10d._coalescing_manager(group):
            dist.all_reduce(torch.ones(8))
            dist.all_reduce(torch.ones(8))

    shown: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(one),
        lambda: dist.broadcast(one, 0),
        lambda: dist.all_gather(pair(), one),
        lambda: dist.all_gather_into_tensor(sixteen, one),
        lambda: dist.reduce_scatter_tensor(four, one),
        lambda: dist.reduce_scatter(four, [torch.ones(4), torch.ones(4)]),
        lambda: dist.all_to_all_single(torch.ones(8), one),
        lambda: dist.gather(one, None if rank else pair()),
        lambda: dist.scatter(one, None if rank else pair()),
        lambda: dist.reduce(one, 0),
        lambda: dist.all_gather_object([None, None], {"rank": rank}),
        lambda: group.allreduce([one]).wait(),
        lambda: (dist.send if rank else dist.recv)(one, 1 - rank),
        *(dist.barrier, dist.monitored_barrier, coalesced),
    ]
    backend = group._get_backend(torch.device("cpu"))
    hiding: list[Callable[[], Any]] = [
        lambda: in_a_thread(lambda: dist.all_reduce(one)),
        lambda: without_the_dispatcher(lambda: dist.all_reduce(one)),
        lambda: backend.allreduce([one]).wait(),
    ]
    for number, call in enumerate([*shown, *hiding]):
        counter = StepCounter([])
        watch = hidden.Watch()
        with counter:
            call()
        reasons = watch.reasons(counter, counter.end_step(), nn.Linear(1, 1))
        assert counter.error is None
        assert len(reasons) == (number >= len(shown)), (number, reasons)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.launch
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # functions that torch is about to rename
def test_two_ranks_report_only_unseen_collectives(tmp_path: Path) -> None:
    start_processes(as_rank, (str(tmp_path / "meet"),), nprocs=2, start_method="fork")


def compute_until(is_over: threading.Event) -> None:
    while not is_over.is_set():
        pass


def until_asleep(thread: threading.Thread) -> None:
    """Wait until a thread sleeps, and has used no CPU time for a while."""
    task = Path(f"/proc/self/task/{thread.native_id}")
    before = ""
    while True:
        used = (task / "schedstat").read_text()
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        if state == "S" and used == before:
            return
        before = used
        time.sleep(0.02)


def test_counts_threads_that_compute_in_a_step() -> None:
    """Kernels of other threads are not counted.

    So moving work into a thread must not look like an improvement.
    """
    is_over = threading.Event()
    waiting = threading.Thread(target=is_over.wait)
    computing = threading.Thread(target=compute_until, args=(is_over,))
    try:
        waiting.start()
        until_asleep(waiting)
        watch = hidden.Watch()
        computing.start()
        assert watch.other_threads() == 1, "the new thread counts because it was started"
        watch = hidden.Watch()
        began_s = time.thread_time()
        while time.thread_time() < began_s + 0.2:
            pass
        assert watch.other_threads() == 1, "only the new thread computes, and the other one waits"
    finally:
        is_over.set()
        waiting.join()
        computing.join()


def test_counts_threads_that_compute_little() -> None:
    """A thread that makes one small batch in a step takes less than a millisecond."""
    requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
    batches: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def make_batches() -> None:
        while requests.get():
            batches.put(torch.ones(4))

    maker = threading.Thread(target=make_batches)
    maker.start()
    try:
        watch = hidden.Watch()
        requests.put(True)
        batches.get(timeout=60)
        assert watch.other_threads() == 1
    finally:
        requests.put(False)
        maker.join()


def test_own_threads_are_not_those_of_the_training() -> None:
    watch = hidden.Watch()
    thread = threading.Thread(target=time.thread_time, name="perfsuite-spans")
    thread.start()
    thread.join()
    assert watch.other_threads() == 0


def test_threads_that_python_did_not_start_may_end() -> None:
    """Python 3.11 still lists threads of C++ code after they have ended.

    Python's CPU-time clock of such a thread is undefined, so it must not be read.
    """
    ended = threading.Event()

    def work() -> None:
        threading.current_thread()
        ended.set()

    for _ in range(12):
        ended.clear()
        _thread.start_new_thread(work, ())
        ended.wait(20)
    assert hidden.Watch().other_threads() == 0
