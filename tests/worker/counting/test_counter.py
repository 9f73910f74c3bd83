import importlib
import runpy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import _create_empty_block_mask
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from perfsuite.results.counts import Counts, StepMemory
from perfsuite.worker.counting import counter as counter_module
from perfsuite.worker.counting import gradients
from perfsuite.worker.counting.collectives import OPERATORS
from perfsuite.worker.counting.counter import BY_A_MASK, COPIES, FLOPS, HOST_READS, StepCounter
from tests.fake_group import alone
from tests.samples import known
from tests.worker.loops import counted, in_a_thread, memory

aten = torch.ops.aten
WIDTH = 8
BATCH = 4
PRODUCT = 2 * BATCH * WIDTH * WIDTH  # FLOPs of one linear layer's forward
WEIGHTS = 2 * WIDTH * WIDTH * 4  # bytes of the model


class Training:
    """A small model and its optimizer, after two steps, so that the optimizer has its state."""

    def __init__(self) -> None:
        first, second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.model = nn.Sequential(first, nn.ReLU(), second)
        self.forward: Any = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = torch.randn(BATCH, WIDTH)
        self.after_backward: Callable[[], object] = lambda: None
        for _ in range(2):
            self.step()

    def step(self, counter: StepCounter | None = None) -> None:
        self.forward(self.batch).square().sum().backward()
        self.after_backward()
        if counter is not None:
            counter.before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counted(self, step: Callable[[StepCounter], object] | None = None) -> Counts:
        """Return the counts of the second of two counted steps."""
        counter = StepCounter([self.optimizer], list(self.model.parameters()))
        for _ in range(2):
            with counter:
                (step or self.step)(counter)
            counts = counter.end_step()
        assert counter.error is None
        return counts


def test_counts_products_by_phase_and_recompute() -> None:
    training = Training()
    counts = training.counted()
    # The first layer's input needs no gradient, so backward has three products.
    assert counts.flops == {"forward": 2 * PRODUCT, "backward": 3 * PRODUCT}
    assert training.counted() == counts
    training.forward = lambda batch: checkpoint(training.model, batch, use_reentrant=False)
    flops = training.counted().flops
    assert flops["recompute"] >= PRODUCT
    assert flops["forward"] == 2 * PRODUCT


def evaluated(mode: Callable[[], Any]) -> Counts:
    """Return the counts of an evaluation without gradients."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    batch = torch.ones(2, BATCH, WIDTH)
    with StepCounter([]) as counter, mode():
        result = model(batch).to(torch.float64).contiguous()
        result = result @ result.mT
        result.sum().item()
    counts: Counts = counter.end_step()
    assert counter.error is None
    return counts.replace(memory=None, python=None)


def test_inference_mode_has_the_counts_of_no_grad() -> None:
    assert evaluated(torch.inference_mode) == evaluated(torch.no_grad)


@pytest.mark.parametrize("activation", [nn.functional.silu, nn.functional.mish])
def test_training_keeps_its_kernels(activation: Callable[[Tensor], Tensor]) -> None:
    """The backward of these functions could be taken apart as well, but has a kernel of its own."""
    weight = torch.randn(BATCH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    activation(weight).sum().backward()
    expected = known(weight.grad).clone()
    weight.grad = None
    counts = counted(lambda: activation(weight).sum().backward())
    assert torch.equal(known(weight.grad), expected)
    assert f"aten.{activation.__name__}_backward" in counts.ops


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_keep_their_kernels_in_inference_mode() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, WIDTH), torch.ones(3, WIDTH)])
    layer = nn.Linear(WIDTH, WIDTH)
    with torch.inference_mode(), StepCounter([]):
        result = layer(nested)
    assert result.is_nested


@pytest.mark.parametrize("is_mixed", [False, True])
def test_autocast_sees_the_parts_of_operators(is_mixed: bool) -> None:
    rows = torch.ones(BATCH, WIDTH)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed), StepCounter([]):
        result = torch.einsum("bi,bj->ij", rows, rows)
    assert result.dtype == (torch.bfloat16 if is_mixed else torch.float32)


def test_garbage_is_collected_after_many_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = list[None]()
    monkeypatch.setattr(gradients, "after_backward", lambda: collected.append(None))
    monkeypatch.setattr(counter_module, "MOST_OPERATORS", 10)
    counted(lambda: [torch.ones(1) + 1 for _ in range(12)])
    assert len(collected) == 2


def test_counting_changes_no_result_in_inference_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    with torch.inference_mode():
        torch.manual_seed(1)
        expected = model(torch.ones(BATCH, WIDTH))
        torch.manual_seed(1)
        with StepCounter([]):
            result = model(torch.ones(BATCH, WIDTH))
    assert torch.equal(result, expected)
    assert result.is_inference()


def penalized(training: Training, counter: StepCounter) -> None:
    """Make a step whose loss contains the gradient of the output, as for a gradient penalty."""
    batch = training.batch.requires_grad_()
    output = training.model(batch).sum()
    (gradient,) = torch.autograd.grad(output, batch, create_graph=True)
    gradient.square().sum().backward()
    counter.before_optimizer()
    training.optimizer.step()
    training.optimizer.zero_grad()


def test_a_backward_that_makes_a_graph_is_no_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("backward", "grad"):
        monkeypatch.setattr(torch.autograd, name, getattr(torch.autograd, name))
    gradients.watch()
    training = Training()
    counts = training.counted(lambda counter: penalized(training, counter))
    assert "recompute" not in counts.flops
    assert counts.flops["forward"] == 2 * PRODUCT


def test_the_input_is_what_embeddings_look_up() -> None:
    table = nn.Embedding(9, WIDTH)
    layer = nn.Conv1d(BATCH, BATCH, 1)
    tokens = torch.zeros(2, BATCH, dtype=torch.int64)

    def inputs(step: Callable[[], Tensor]) -> dict[str, int] | None:
        def whole(counter: StepCounter) -> None:
            step().sum().backward()
            counter.before_optimizer()

        return Training().counted(whole).inputs

    assert inputs(lambda: layer(table(tokens)) + table(tokens[:1]) + table(tokens[:1])) == {
        "int64[2, 4]": 1,
        "int64[1, 4]": 2,
    }
    images = torch.ones(3, BATCH, WIDTH)
    assert inputs(lambda: layer(layer(images[:2]))) == {"float32[2, 4, 8]": 1}, "only the first convolution"
    weight = torch.ones(WIDTH, requires_grad=True)
    assert inputs(lambda: images * weight) is None
    assert inputs(lambda: checkpoint(lambda: table(tokens).square(), use_reentrant=False)) == {
        "int64[2, 4]": 1
    }, "recomputation is no further input"


MASK = torch.tensor([True, False, True, False])
TIMES = torch.tensor([1, 2, 1, 1])


@pytest.mark.parametrize(
    ("reads", "function"),
    [
        (1, lambda x: x[0].item()),
        (1, lambda x: bool(x[0])),
        (1, lambda x: x.tolist()),
        (1, lambda x: x.nonzero()),
        (1, lambda x: x.masked_select(MASK)),
        (1, lambda x: x[MASK]),
        (0, lambda x: x[torch.tensor([0, 2])]),
        (1, lambda x: x.index_put_((MASK,), torch.ones(2))),
        (0, lambda x: x.index_put_((MASK,), torch.tensor(0.0))),  # a value is filled in
        (0, lambda x: torch.where(MASK, x, 0.0)),
        (1, lambda x: x.repeat_interleave(TIMES)),
        (0, lambda x: x.repeat_interleave(TIMES, output_size=5)),
        (1, lambda x: x.unique()),
        (1, lambda x: x.unique_consecutive()),
        (1, lambda x: x.int().bincount()),
        (0, lambda x: in_a_thread(x.tolist)),  # like a logger of the user
    ],
)
def test_a_call_that_makes_a_device_wait_is_a_host_read(
    function: Callable[[Tensor], object], reads: int
) -> None:
    training = Training()
    training.after_backward = lambda: function(torch.ones(4))
    assert training.counted().host_reads.get("forward", 0) == reads
    assert "tolist" not in vars(torch.Tensor)


@pytest.mark.parametrize("foreach", [False, True])
def test_step_counters_are_no_host_reads(foreach: bool) -> None:
    """Step counters of the optimizer are always on the host.

    Without a GPU, reads of another optimizer's counters are counted.
    """
    training = Training()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), foreach=foreach)
    training.step()
    assert training.counted().host_reads == {}
    step = next(iter(training.optimizer.state.values()))["step"]
    other: Any = torch.optim.SGD(training.model.parameters())
    other.register_step_post_hook(lambda *_: step.item())
    training.optimizer = other
    assert training.counted().host_reads == {"optimizer": 1}


@pytest.mark.parametrize(("device", "reads"), [("cpu", 0), ("cuda", 1)])
def test_only_gpu_tensors_make_the_host_wait(
    monkeypatch: pytest.MonkeyPatch, device: str, reads: int
) -> None:
    optimizer = Training().optimizer  # created now, because a build for CUDA would look for a driver later
    counter = StepCounter([optimizer])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_a_gpu = StepCounter([optimizer])
    value: Any = SimpleNamespace(device=torch.device(device))
    assert on_a_gpu._is_waited_for(value) == bool(reads)
    assert counter._is_waited_for(value), "without a GPU all reads are counted"


def test_optimizer_closure_is_forward_and_backward() -> None:
    """Lightning's `fit`, for example, passes a closure."""
    training = Training()

    def closure() -> Tensor:
        with torch.enable_grad():
            training.optimizer.zero_grad()
            loss: Tensor = training.model(training.batch).square().sum()
            loss.backward()
            return loss

    def step(counter: StepCounter) -> None:
        counter.before_optimizer(runs_closure=True)
        training.optimizer.step(closure)

    counts = training.counted(step)
    plain = training.counted()
    assert (counts.flops, counts.kernels) == (plain.flops, plain.kernels)


def test_forward_without_gradients_in_a_closure_is_forward() -> None:
    """FSDP gathers parameters like this, and so does a checkpointed block that is recomputed later."""
    training = Training()

    def closure() -> Tensor:
        with torch.enable_grad():
            loss: Tensor = training.model(training.batch).square().sum()
        with torch.no_grad():
            training.batch.exp()
        with torch.enable_grad():
            loss.backward()
        return loss

    def step(counter: StepCounter) -> None:
        counter.before_optimizer(runs_closure=True)
        training.optimizer.step(closure)
        training.optimizer.zero_grad()

    kernels, plain = (
        known(step_counts.kernels) for step_counts in (training.counted(step), training.counted())
    )
    assert kernels["forward"] == plain["forward"] + 1
    assert kernels["optimizer"] == plain["optimizer"]


def test_a_closure_that_does_nothing_leaves_the_optimizer() -> None:
    """Lightning's manual optimization passes such a closure."""
    training = Training()

    def step(counter: StepCounter) -> None:
        training.model(training.batch).square().sum().backward()
        counter.before_optimizer(runs_closure=True)
        training.optimizer.step(lambda: None)
        training.optimizer.zero_grad()

    kernels, plain = (
        known(step_counts.kernels) for step_counts in (training.counted(step), training.counted())
    )
    assert kernels == plain


def test_steps_in_backward_hooks_are_the_optimizer() -> None:
    training = Training()

    def step(counter: StepCounter) -> None:
        def in_backward(parameter: Tensor) -> None:
            counter.before_optimizer()
            training.optimizer.step()

        last = next(training.model.parameters())  # the parameter whose gradient comes last
        handle = last.register_post_accumulate_grad_hook(in_backward)
        training.model(training.batch).square().sum().backward()
        training.optimizer.zero_grad()
        handle.remove()

    with_backward, without = (
        known(step_counts.kernels) for step_counts in (training.counted(step), training.counted())
    )
    assert with_backward["optimizer"] == without["optimizer"]


def received() -> Tensor:
    """Return a batch, rebuilt in this process like one that a worker of a `DataLoader` sent."""
    shared = torch.UntypedStorage._new_shared(4 * BATCH * WIDTH)
    storage = torch.TypedStorage(wrap_storage=shared, dtype=torch.float32, _internal=True)
    batch: Tensor = torch._utils._rebuild_tensor(storage, 0, (BATCH, WIDTH), (WIDTH, 1))
    return batch


@pytest.mark.parametrize("arriving", [(0, 1, 1), (0, 2, 0), (0, 1, 2), (1, 0, 2), (1, 1, 0)])
def test_arrival_of_batches_changes_no_count(arriving: tuple[int, ...]) -> None:
    """`arriving` has the number of batches that arrive before the two counted steps, and in each of them.

    Each step takes one batch.
    """

    def counts_of(first: int, *later: int) -> Counts:
        training = Training()
        arrivals = iter(later)
        queue = [received() for _ in range(first)]

        def step(counter: StepCounter) -> None:
            queue.extend(received() for _ in range(next(arrivals)))
            training.batch = queue.pop(0)
            training.step(counter)

        # The test itself calls Python functions to receive batches.
        return training.counted(step).replace(python=None)

    counts = counts_of(*arriving)
    assert counts == counts_of(2, 0, 0)
    assert memory(counts).growth == 0
    assert memory(counts).saved_for_backward > 0


def test_loader_without_workers_has_no_activations() -> None:
    """Batches of a loader without workers are classified like batches from a worker."""

    def memory_with(batches: Iterator[Any]) -> StepMemory:
        training = Training()

        def step(counter: StepCounter) -> None:
            training.batch = next(batches)
            training.step(counter)

        return memory(training.counted(step))

    data = [torch.randn(WIDTH) for _ in range(8 * BATCH)]
    loader: Any = DataLoader(data, batch_size=BATCH, collate_fn=torch.stack)  # type: ignore[arg-type]
    loaded = memory_with(iter(loader))
    assert loaded == memory_with(iter([received() for _ in range(2)]))
    held = torch.stack(data[:BATCH])
    batches = memory_with(held * 2 for _ in range(2)).at_peak["forward"] - loaded.at_peak["forward"]
    assert batches == 4 * BATCH * WIDTH, "if a loop makes its own batches, nothing shows that they are data"


@pytest.mark.parametrize(("device", "counts_host"), [("cpu", True), ("meta", False)])
def test_host_memory_counts_if_the_model_is_there(device: str, counts_host: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(2, device=device)), nn.Parameter(torch.zeros(2))]
    assert StepCounter([], parameters).memory.counts_host is counts_host


def test_views_and_allocations_are_no_kernels() -> None:
    def step() -> None:
        torch.empty(4).view(2, 2).t()
        with torch.profiler.record_function("a mark for profiles"):
            torch.zeros(2).add_(1)

    counts = counted(step)
    assert counts.ops == {"aten.zeros": 1, "aten.add_": 1}
    assert counts.kernels == {"forward": 2}


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash"])
def test_grouped_attention_has_its_queries_flops(kernel: str) -> None:
    query = torch.empty(2, 8, 16, 32, device="meta")
    shared = torch.empty(2, 2, 24, 32, device="meta")  # one head of keys for four heads of queries
    name = f"_scaled_dot_product_{kernel}_attention"
    product = 2 * (2 * 8) * 16 * 24 * 32
    forward = FLOPS[getattr(aten, name)]
    backward = FLOPS[getattr(aten, f"{name}_backward")]
    assert forward(query, shared, shared, out_val=None) == 2 * product
    # One product repeats the scores.
    assert backward(query, query, shared, shared, out_val=None) == 5 * product


def test_attention_on_a_cpu_has_flops() -> None:
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    attend = nn.functional.scaled_dot_product_attention
    flops = counted(lambda: attend(query, query, query, is_causal=True).sum().backward()).flops
    product = 2 * 2 * 16 * 16 * 8  # the product of two heads
    assert flops == {"forward": 2 * product, "backward": 5 * product}


def test_newer_torch_formula_counts_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_counter.flop_registry, aten.mul, lambda *args, **kwargs: 10**9)
    monkeypatch.delitem(flop_counter.flop_registry, aten.cudnn_convolution)
    under_that_torch = runpy.run_path(counter_module.__file__)["FLOPS"]
    assert under_that_torch.keys() == FLOPS.keys() - {aten.cudnn_convolution}


def test_collectives_of_nothing_are_counted_separately() -> None:
    with alone():
        counts = counted(lambda: [dist.all_reduce(torch.zeros(size)) for size in (4, 0, 2, 0, 0)])
    assert [(collective.count, collective.bytes) for collective in counts.collectives] == [(2, 24), (3, 0)]


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor:FutureWarning")
def test_memory_excludes_backend_buffers() -> None:
    """gloo's reduce-scatter sums in a copy of its input.

    A thread of gloo releases the copy some time later.
    """
    with alone():
        training = Training()
        gradient = torch.ones(1024)
        shard = torch.zeros(1024)
        training.after_backward = lambda: dist.reduce_scatter_tensor(shard, gradient)
        wait = dist.Work.wait
        counts = training.counted()
    assert counts.ops["aten.copy_"] == 1, "the copy is counted"
    at_peak = memory(counts).at_peak
    assert at_peak["communication"] == 2 * 4096
    assert at_peak["kept"] == BATCH * WIDTH * 4, "the batch"
    assert dist.Work.wait is wait


def test_optimizer_of_optimizers_has_their_state() -> None:
    training = Training()
    container = torch.optim.Optimizer(training.model.parameters(), {})
    with StepCounter([container, training.optimizer]) as counter:
        training.step(counter)
    at_peak = memory(counter.end_step()).at_peak
    assert at_peak["optimizer state"] >= 2 * WEIGHTS
    assert at_peak["parameter"] == WEIGHTS


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((10, 16), (4, 16, 32), 2 * 10 * 16 * 32),  # the rows of the first matrix belong to 4 experts
        ((4, 8, 16), (16, 24), 2 * 8 * 16 * 24),  # the columns of the second matrix are grouped
        # The summed dimension is grouped, as in a weight's gradient.
        ((8, 48), (48, 24), 2 * 8 * 48 * 24),
        ((4, 8, 16), (4, 16, 32), 2 * 4 * 8 * 16 * 32),
    ],
)
def test_grouped_products_have_the_flops_of_rows(a: tuple[int, ...], b: tuple[int, ...], flops: int) -> None:
    """The number of groups does not matter, because each row is multiplied by one matrix."""
    formula = FLOPS[aten._grouped_mm]
    assert formula(torch.empty(a), torch.empty(b), offs=torch.tensor([1, 2, 3, 4]), out_val=None) == flops


def test_the_dtype_of_a_result_changes_no_flops() -> None:
    """`torch.mm(a, b, out_dtype)` passes the dtype as its third argument. CPUs have no kernel for that."""
    with FakeTensorMode():
        a = torch.empty(4, 8).bfloat16()
        b = torch.empty(8, 2).bfloat16()
        total = torch.empty(4, 2)
        assert counted(lambda: torch.mm(a, b, torch.float32)).flops == {"forward": 2 * 4 * 8 * 2}
        assert counted(lambda: torch.addmm(total, a, b, torch.float32)).flops == {"forward": 2 * 4 * 8 * 2}


def test_blocking_copies_lack_non_blocking() -> None:
    """The copies go to a device that this torch does not support. With fake tensors, that is possible."""
    with FakeTensorMode():
        made = torch.empty(2)
        counts = counted(
            lambda: [made.to("hpu:0", non_blocking=non_blocking) for non_blocking in (True, False, True)]
        )
    assert counts.device_copies == {"cpu to hpu": 3}
    assert counts.blocking_copies == {"cpu to hpu": 1}
    assert counted(lambda: None).blocking_copies == {}


@torch.library.custom_op("counting::fused_attention", mutates_args=())
def fused_attention(x: Tensor) -> Tensor:
    """Fake a package's kernel, which has no formula."""
    return x.clone()


def test_products_without_a_formula_are_named() -> None:
    assert counted(lambda: fused_attention(torch.ones(2))).without_flops == {"counting.fused_attention": 1}
    query = torch.ones(1, 1, 128, 16)
    mask = _create_empty_block_mask(query, query).as_tuple()
    attend = torch.ops.higher_order.flex_attention  # this is not an operator of aten
    counts = counted(lambda: attend(query, query, query, lambda score, *_: score, mask, 1.0, {}))
    assert counts.without_flops == {"flex_attention": 1}


ROWS = torch.ones(2, 3, 4)


@pytest.mark.parametrize(
    ("operator", "call"),
    [
        ("aten.addbmm", lambda: torch.addbmm(torch.ones(3, 3), ROWS, ROWS.mT)),
        ("aten._trilinear", lambda: nn.functional.bilinear(ROWS, ROWS, torch.ones(2, 4, 4))),
        ("aten._euclidean_dist", lambda: torch.cdist(torch.ones(30, 4), torch.ones(30, 4))),
        ("aten._sparse_addmm", lambda: torch.sparse.mm(torch.eye(4).to_sparse(), torch.ones(4, 4))),
    ],
)
def test_rare_products_are_named(operator: str, call: Callable[[], object]) -> None:
    assert operator in counted(call).without_flops


def test_work_with_a_saved_random_state_is_counted() -> None:
    """Compiled code runs an operator in these ways, to recompute it with the same random numbers."""
    higher = torch.ops.higher_order
    operands = (aten.mm.default, torch.ones(BATCH, WIDTH), torch.ones(WIDTH, WIDTH))
    state = torch.get_rng_state()
    counts = [
        counted(lambda: higher.run_and_save_rng_state(*operands)),
        counted(lambda: higher.run_with_rng_state(state, *operands)),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        counts += [counted(lambda: higher.graphsafe_run_with_rng_state(*operands, rng_state=None))]
    assert [(entry.flops, entry.ops) for entry in counts] == [({"forward": PRODUCT}, {"aten.mm": 1})] * 3


def test_no_other_operator_is_taken_for_a_product() -> None:
    """In the step, a model with norms, softmax and attention is trained with an optimizer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())

    def step() -> None:
        images = [
            nn.functional.interpolate(torch.ones(1, 1, *[4] * dimensions), scale_factor=2, mode=mode).mean()
            for dimensions, mode in enumerate(("linear", "bilinear", "trilinear"), 1)
        ]
        (layer(torch.ones(2, 4, 8)).square().mean() + sum(images)).backward()
        optimizer.step()

    assert counted(step).without_flops == {}


@pytest.mark.parametrize("operator", sorted({*HOST_READS, *BY_A_MASK, *COPIES, *OPERATORS}))
def test_torch_still_has_the_operators_that_count(operator: str) -> None:
    """A renamed operator would be missing from the counts, without an error."""
    if operator.startswith("cplib."):  # context parallelism defines them when it is imported
        importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    namespace, name = operator.split(".")
    assert hasattr(getattr(torch.ops, namespace), name)
