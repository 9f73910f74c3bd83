import pickle
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from perfsuite.worker.observation import second_step
from perfsuite.worker.observation.second_step import (
    NO_KERNEL,
    NO_LINEAR,
    NOT_OBSERVED,
    SecondStep,
    attention_kernel,
)

WIDTH = 8


class Block(nn.Module):
    """A block with one head of attention between two linear layers."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return x + self.out(self.attend(q, k, v)[:, 0])  # type: ignore[no-any-return]


class Model(nn.Module):
    """A model of an embedding, two blocks and a head.

    `reentrant` is the kind of the blocks' recomputation, or None if they are not recomputed.
    """

    def __init__(self, attend: Callable[..., Tensor], reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).sum()  # type: ignore[no-any-return]


TOKENS = torch.zeros(2, 4, dtype=torch.long)
sdpa = functional.scaled_dot_product_attention


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def step(model: nn.Module, *calls: dict[str, Any], inside: bool = True, **how: Any) -> SecondStep:
    """Make a step with one micro-batch for each of the calls."""
    seen = SecondStep(model, inside=inside, **how)
    for call in calls or ({"input_ids": TOKENS},):
        model(**call).backward()
    seen.finish()
    return seen


def has_hooks(model: nn.Module) -> bool:
    return any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(
    ("attend", "kernel"),
    [(sdpa, "FlashAttentionForCpu"), (math, "math"), (eager, "math"), (lambda q, k, v: q + k + v, NO_KERNEL)],
)
def test_the_kernel_is_seen_if_blocks_recompute(attend: Any, kernel: str, reentrant: bool | None) -> None:
    seen = step(Model(attend, reentrant))
    assert seen.attention_kernel == kernel
    assert seen.recomputing() == ("0 of 2" if reentrant is None else "2 of 2")


@pytest.mark.parametrize(("attend", "kernel"), [(sdpa, "FlashAttentionForCpu"), (eager, "math")])
def test_sees_the_kernel_of_one_reused_block(attend: Any, kernel: str) -> None:
    class Looped(Model):
        def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
            x = self.embedding(input_ids)
            for _ in range(4):
                x = self.blocks[0](x)
            return self.head(x).sum()  # type: ignore[no-any-return]

    assert step(Looped(attend)).attention_kernel == kernel


@pytest.mark.parametrize(
    ("node", "kernel"),
    [
        ("ScaledDotProductFlashAttentionBackward0", "FlashAttention"),
        ("ScaledDotProductCudnnAttentionBackward0", "CudnnAttention"),
        ("ScaledDotProductEfficientAttentionBackward0", "EfficientAttention"),
        ("FlashAttnVarlenFuncBackward", "FlashAttnVarlenFunc"),
        ("SafeSoftmaxBackward0", "math"),
        ("ViewBackward0", None),
    ],
)
def test_kernels_of_a_gpu_go_by_their_nodes(node: str, kernel: str | None) -> None:
    """A kernel's node is found even if the softmax of a router comes after it."""

    class Node:
        def __init__(self, name: str, *before: object) -> None:
            self.name = lambda: name
            self.next_functions = tuple((function, 0) for function in before)

    output: Any = SimpleNamespace(grad_fn=Node("AddBackward0", Node("ViewBackward0", Node(node))))
    assert attention_kernel(output) == kernel
    output.grad_fn = Node("MulBackward0", Node("SoftmaxBackward0", Node(node)), Node("ViewBackward0"))
    assert attention_kernel(output) == (kernel or "math")


@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_not_observed(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = Model(sdpa)
    seen = SecondStep(model, inside=True)
    copied(model)(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).backward()
    seen.finish()
    assert (seen.tokens.tokens, seen.forwards) == (0, [0, 0])


def test_a_pickled_hook_needs_nothing_of_perfsuite() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    SecondStep(model, inside=True)
    assert b"perfsuite" not in pickle.dumps(model)


def test_compiled_models_are_not_hooked() -> None:
    model = Model(sdpa)
    SecondStep(model, inside=False)
    assert not any(map(has_hooks, model.children()))
    seen = step(Model(sdpa), inside=False)
    assert (seen.attention_kernel, seen.compute_dtype, seen.recomputing()) == (NOT_OBSERVED,) * 3
    assert seen.tokens.tokens == TOKENS.numel()


def test_released_weights_still_count_by_dtype() -> None:
    """ZeRO 3 releases weights like this.

    Under DeepSpeed, perfsuite assumes that a module that reads a released weight computes with it.
    """
    model = Model(sdpa)
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        linear.register_forward_hook(lambda module, args, output: delattr(module, "weight"))
    seen = SecondStep(model, inside=True)
    model(input_ids=TOKENS)
    assert seen.linear_layers() == {"float32": 2 * (3 * WIDTH * WIDTH + WIDTH * WIDTH) + 10 * WIDTH}


def test_micro_batches_are_not_recomputation() -> None:
    model = Model(sdpa)
    seen = step(model, {"input_ids": TOKENS}, {"input_ids": TOKENS[:1]})
    assert (seen.forwards, seen.recomputing()) == ([2, 2], "0 of 2")
    assert (seen.tokens.tokens, seen.tokens.padding(), seen.tokens.forwards) == (12, 0, 2)
    assert not has_hooks(model)


def test_padding_is_what_the_mask_removes() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    tokens = step(Model(sdpa), {"attention_mask": mask, "input_ids": TOKENS}).tokens
    assert (tokens.tokens, tokens.padding()) == (8, 3)
    packed = {"position_ids": torch.arange(9)[None], "input_ids": torch.zeros(1, 64, dtype=torch.long)}
    tokens = step(Model(sdpa), packed).tokens
    assert (tokens.tokens, tokens.padding()) == (64, 0)


def features(mask: list[list[int]]) -> dict[str, Tensor]:
    return {"input_ids": TOKENS.clone(), "attention_mask": torch.tensor(mask)}


def test_pairs_of_inputs_all_count() -> None:
    """Models of sentence-transformers get a list of inputs, for example the two sentences of each pair."""

    class OfPairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model(sdpa)

        def forward(self, pairs: list[dict[str, Tensor]]) -> Tensor:
            return torch.stack([self.model(**pair) for pair in pairs]).sum()

    pairs = [features([[1, 1, 1, 0], [1, 1, 1, 1]]), features([[1, 1, 1, 1], [1, 1, 0, 0]])]
    tokens = step(OfPairs(), {"pairs": pairs}).tokens
    assert (tokens.tokens, tokens.padding(), tokens.samples) == (16, 3, 2)


def test_gradientless_calls_are_no_training() -> None:
    """This also holds for a model that a script has wrapped, but calls without the wrapper.

    An example is the model in a LightningModule whose own forward is not called.
    """
    model = Model(sdpa)
    seen = SecondStep(nn.Sequential(model), inside=True)
    with torch.no_grad():
        model(TOKENS)
    assert seen.tokens.tokens == 0
    with pytest.raises(IndexError):
        model(TOKENS + 99)
    model(TOKENS).backward()
    assert seen.tokens.tokens == 2 * TOKENS.numel()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_do_not_count_again(reentrant: bool) -> None:
    """The model gets its tokens within a part that is recomputed."""
    model = Model(sdpa)
    scale = torch.ones((), requires_grad=True)
    outer = nn.Sequential(model)
    outer.forward = lambda input_ids: checkpoint(  # type: ignore[method-assign]
        lambda scale: model(input_ids) * scale, scale, use_reentrant=reentrant
    )
    assert step(outer).tokens.tokens == TOKENS.numel()


@pytest.mark.parametrize(
    ("args", "kwargs", "count"),
    [
        ((torch.ones(2, 3, 4),), {"labels": TOKENS}, 0),  # the input is images
        ((), {"labels": TOKENS[:1], "input_ids": TOKENS}, 8),
        (({"targets": TOKENS[:1], "input": TOKENS},), {}, 8),
        (([TOKENS, TOKENS[:1]],), {}, 8),
        ((torch.ones(2, 3, dtype=torch.bool),), {}, 0),
        ((torch.ones(2, 3), TOKENS), {}, 0),  # a diffusion model gets noise and time steps
        ((None, 3), {}, 0),
    ],
)
def test_first_tensor_holds_tokens_if_integers(args: Any, kwargs: Any, count: int) -> None:
    model = nn.Linear(1, 1)
    model.forward = lambda *args, **kwargs: None  # type: ignore[assignment]
    seen = SecondStep(model, inside=True)
    model(*args, **kwargs)
    assert seen.tokens.tokens == count


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_omits_what_torchscript_compiled() -> None:
    """A compiled module accepts no hooks, but the model around it does."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    around = nn.Sequential(Model(sdpa), nn.Flatten(0), nn.Unflatten(0, (1, 1)), scripted)
    seen = SecondStep(around, inside=True)
    around(TOKENS).backward()
    assert seen.tokens.tokens == TOKENS.numel()
    SecondStep(scripted, inside=True).finish()


@pytest.mark.parametrize("name", ["attention_kernel", "_tensors", "_linears"])
def test_keeps_hook_errors_from_the_model(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(second_step, name)
    model = Model(sdpa)
    with pytest.raises(NameError, match=name):
        step(model)
    assert not has_hooks(model)


@pytest.mark.parametrize(
    ("output", "dtype"),
    [({"out": torch.ones(2)}, NO_LINEAR), ((torch.ones(2),), "float32"), ([None, torch.ones(2)], NO_LINEAR)],
)
def test_layer_returning_no_tensor_is_no_error(output: Any, dtype: str) -> None:
    model = nn.Linear(1, 1)
    model.forward = lambda x: output  # type: ignore[method-assign, assignment]
    seen = SecondStep(model, inside=True)
    model(torch.ones(2, 1))
    seen.finish()
    assert seen.compute_dtype == dtype


def test_assumes_no_backward_if_torch_hides_it() -> None:
    assert second_step.in_backward(None) is False


def test_hidden_backward_hides_recomputation() -> None:
    assert step(Model(sdpa, False), graph_task=None).recomputing() == NOT_OBSERVED
