"""Tests that a dry run counts what closed formulas give for a step of ten configurations.

The formulas follow papers and the sources of torch 2.13, torchtitan 0.3, transformers 5.23 and torchao 0.18.
Their author wrote them before reading any of perfsuite's code for counting. The counts must match exactly.
`python -m tests.benchmarks.theory` prints the same comparison at full size.

Conventions: The bytes of a collective are those of the whole tensor on one rank: the output of an all-gather,
and the input of a reduce-scatter, an all-reduce or an all-to-all. FLOPs are those of matrix products. A
multiplication and an addition are two FLOPs. Attention counts as unmasked (torch/utils/flop_counter.py: "not
accounting for causal").
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from perfsuite import DDP, FSDP2, Case, Model, Topology, TorchTitan
from perfsuite.case import torch_build
from perfsuite.frameworks.torchtitan import MIN_TORCH
from perfsuite.results.counts import Counts
from tests.counted import FULL_SIZE
from tests.dry.runs import passed

Shape = tuple[int, ...]
Group = tuple[int, int]
"""The number of ranks, and the distance between two of them."""

LAYERS = 3  # the same number as in tests/frameworks/torchtitan/configs.py
BYTES = {"float32": 4, "bfloat16": 2, "int64": 8}
MIB = 1 << 20


def elements(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def rows(shapes: Sequence[Shape], ranks: int) -> int:
    """Return the elements of the first rank's shards. fully_shard splits dimension 0 into pieces of ceil(rows
    / ranks) rows. What it sends is padded to pieces of this size
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)


Sent = dict[tuple[str, Group, str], list[int]]
"""Maps the kind, group and dtype of a collective to its calls and bytes."""


@dataclass
class Step:
    """What one rank sends, computes and holds in a step."""

    sent: Sent = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    flops: Counter[str] = field(default_factory=Counter)
    held: list[int] = field(default_factory=lambda: [0])
    """The bytes of each reduction of gradients, in the order of backward."""
    tensors: Counter[Group] = field(default_factory=Counter)
    """The number of tensors that are sharded over each group."""
    replicas: Group | None = None

    def send(self, kind: str, group: Group, dtype: str, size: int, calls: int = 1) -> None:
        """Add `calls` collectives of `size` elements each."""
        entry = self.sent[kind, group, dtype]
        entry[0] += calls
        entry[1] += calls * size * BYTES[dtype]

    def unit(self, shapes: Sequence[Shape], group: Group, gathers: int, dtype: str = "float32") -> None:
        """Add a unit of FSDP2: gathered in bf16, with its gradients reduced (Zhao et al. 2023, section
        3.2)."""
        self.send("all_gather", group, "bfloat16", rows(shapes, group[0]) * group[0], gathers)
        self.reduce(shapes, group, dtype)

    def reduce(self, shapes: Sequence[Shape], group: Group, dtype: str = "float32") -> None:
        """Add a reduction of gradients: a reduce-scatter, and with `replicas` an all-reduce (section 3.2.2).
        The results are kept in fp32."""
        size = rows(shapes, group[0])
        self.send("reduce_scatter", group, dtype, size * group[0])
        if self.replicas is not None:
            self.send("all_reduce", self.replicas, dtype, size)
        self.hold(size * BYTES["float32"], group, len(shapes))

    def hold(self, size: int, group: Group, tensors: int = 1) -> None:
        self.held.append(size)
        self.tensors[group] += tensors

    @property
    def parameter(self) -> int:
        return sum(self.held)

    @property
    def optimizer(self) -> int:
        """Return the bytes of AdamW's two moments. Fused AdamW also keeps a step in fp32 for each tensor."""
        return 2 * self.parameter + 4 * self.tensors.total()

    def clip(self, group: Group, tensors: int) -> None:
        """Add the reduction of the norms of all gradients of a kind. Each norm is reduced before their common
        norm is computed, because DTensor's vector_norm takes complete values
        (torch/distributed/tensor/_ops/_math_ops.py, `common_reduction_strategy`)."""
        self.send("all_reduce", group, "float32", tensors)

    def multiply(self, tokens: int, weights: Sequence[Shape], again: Sequence[Shape] = ()) -> None:
        """Add products of tokens and weights: one forward, two backward (Kaplan et al. 2020, section 2.1)."""
        once = 2 * tokens * elements(weights)
        self.flops += Counter(forward=once, backward=2 * once, recompute=2 * tokens * elements(again))

    def attend(self, heads: int, queries: int, keys: int, sizes: Group, layers: int, again: int = 0) -> None:
        """Add FlashAttention-2 (Dao 2023, section 3): two products in forward and five in backward. Each
        product takes 2 x heads x queries x keys FLOPs, times the head size of a query or of a value. Of the
        five, three have the head size of a query (the recomputed scores, dQ, dK), and two have that of a
        value (dP, dV). `again` is the number of recomputed layers.
        """
        once = 2 * heads * queries * keys
        query, value = sizes
        forward = once * (query + value)
        backward = once * (3 * query + 2 * value)
        self.flops += Counter(forward=forward * layers, backward=backward * layers, recompute=forward * again)


@dataclass(frozen=True)
class Llama:
    """Llama 3 (Grattafiori et al. 2024, table 3): grouped queries, SwiGLU, RMSNorm, no biases."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv: int = 8
    vocabulary: int = 128256
    head: int = 128

    def layer(self, fused: bool, tp: int = 1) -> list[Shape]:
        """Return the weights of a layer's products on one tensor-parallel rank (Shoeybi et al. 2019, section
        3). `wo` and `w2` are split by columns, and the weights before them by rows. torchtitan has q, k and v
        in one.
        """
        query = self.heads * self.head // tp
        kv = self.kv * self.head // tp
        hidden = self.hidden // tp
        qkv = [(query + 2 * kv, self.dim)] if fused else [(query, self.dim), (kv, self.dim), (kv, self.dim)]
        return [*qkv, (self.dim, query), (hidden, self.dim), (hidden, self.dim), (self.dim, hidden)]

    @property
    def norms(self) -> list[Shape]:
        return [(self.dim,)] * 2

    @property
    def end(self) -> Shape:
        return (self.vocabulary, self.dim)

    def config(self, layers: int, model_type: str = "llama", **more: Any) -> Model:
        config = {"model_type": model_type, "num_hidden_layers": layers, "max_position_embeddings": 8192}
        config |= {"hidden_size": self.dim, "intermediate_size": self.hidden, "vocab_size": self.vocabulary}
        config |= {"num_attention_heads": self.heads, "num_key_value_heads": self.kv, **more}
        return Model.from_config(config, name=f"{model_type}-{layers}")


LLAMA_8B = Llama(4096, 14336, 32, 32)
Theory = tuple[Case, Step]
BASE = FULL_SIZE.replace(framework=DDP(), sequence_length=4096, activation_checkpointing="full")
"""A case on 64 GPUs, in bf16-mixed."""


def titan(config: str, full: bool, *overrides: str, **changes: Any) -> Case:
    """Return a case of a registered configuration, or of the same configuration with few layers."""
    family = {"llama3_8b": "llama3", "qwen3_30b_a3b": "qwen3", "deepseek_v3_16b": "deepseek_v3"}
    name = f"{config}_whole_loss" if full and config not in family else config
    whole = family.get(config, "bench_cases.torchtitan_configs")
    cut = "tests.frameworks.torchtitan.configs"
    framework = TorchTitan(module=whole if full else cut, config=name, overrides=overrides)
    return BASE.replace(model=Model.named(config), framework=framework, **changes)


def ddp(full: bool) -> Theory:
    """DDP's first bucket has 1 MiB, and the others have 25 MiB. They follow the reverse order of the
    parameters. The gradient that fills a bucket closes it (torch/csrc/distributed/c10d/reducer.cpp,
    `compute_bucket_assignment_by_size`). Embedding and head are one tensor. The two buffers of the rotary
    embedding are broadcast together before each forward.
    """
    llama = Llama(2048, 8192, 16, 32, head=64)
    tokens = 2 * 4096
    group = (8, 1)
    layers = llama.layers if full else LAYERS
    step = Step()
    weights = llama.layer(fused=False)
    limits = [MIB]
    bucket = 0
    for shape in reversed([llama.end, *layers * [*weights, *llama.norms], (llama.dim,)]):
        step.hold(math.prod(shape) * BYTES["bfloat16"], group)
        bucket += step.held[-1]
        if bucket >= limits[-1]:
            limits.append(25 * MIB)
            bucket = 0
    step.sent["all_reduce", group, "bfloat16"] = [len(limits) - (bucket == 0), step.parameter]
    step.send("broadcast", group, "float32", 2 * llama.head // 2)
    step.multiply(tokens, [*layers * weights, llama.end])
    step.attend(llama.heads, tokens, 4096, (64, 64), layers)
    model = llama.config(layers, tie_word_embeddings=True)
    topology = Topology(processes_per_node=8)
    changes = {"micro_batch": 2, "precision": "bf16", "activation_checkpointing": "none"}
    return BASE.replace(model=model, topology=topology, **changes), step


def fsdp2(full: bool, nodes: int, framework: FSDP2, **changes: Any) -> Theory:
    """Each block is gathered for forward and again for backward. The root (embedding, last norm, head) is
    gathered once. torch stops recomputing a block at its last saved tensor, which is the input of the last
    product. So that product is not repeated (`set_checkpoint_early_stop`). The exception is an autograd
    function that saves after it has multiplied, as in float8. The gradients of all micro-batches are reduced
    in the last one.
    """
    llama = LLAMA_8B
    group = (8 * nodes, 1)
    step = Step()
    layers = llama.layers if full else LAYERS
    topology = Topology(nodes=nodes, processes_per_node=8)
    case = BASE.replace(model=llama.config(layers), framework=framework, topology=topology, **changes)
    micro = case.gradient_accumulation
    length = changes.get("sequence_length", 4096)
    weights = llama.layer(fused=False)
    tokens = length * micro
    for _ in range(layers):
        step.unit([*weights, *llama.norms], group, 2 * micro, framework.reduce_dtype)
    step.unit([llama.end, llama.end, (llama.dim,)], group, micro, framework.reduce_dtype)
    again = layers if case.activation_checkpointing == "full" else math.ceil(layers / 2)
    products = again * weights[: None if framework.float8 else -1]
    step.multiply(tokens, [*layers * weights, llama.end], products)
    if framework.float8:  # done by autograd functions, so it counts as backward (docs/evidence/measuring.md)
        moved = 2 * tokens * elements(products)
        step.flops += Counter(backward=moved)
        step.flops -= Counter(recompute=moved)
    step.attend(llama.heads, tokens, length, (128, 128), layers, again)
    return case, step


def head(step: Step, end: Shape, group: Group, batches: Group) -> None:
    """Add torchtitan's unit of norm and head. It is gathered for the norm, for the parts of the loss and for
    the norm's backward. Norm and head are reduced one after the other (`ChunkedLossWrapper`). The number of
    tokens is summed over the ranks.
    """
    step.send("all_gather", group, "bfloat16", rows([end, end[1:]], group[0]) * group[0], 3)
    for part in (end, end[1:]):
        step.reduce([part], group)
    step.send("all_reduce", batches, "int64", 1)


def hsdp(full: bool) -> Theory:
    """There are 4 x 16 ranks. Of the products (wqkv, wo, w1, w3, w2), every second one is recomputed: `wo`
    and `w3`. Attention is kept (torchtitan/distributed/activation_checkpoint.py).
    """
    llama = LLAMA_8B
    length = 8192
    shard = (16, 1)
    step = Step(replicas=(4, 16))
    layers = llama.layers if full else LAYERS
    weights = llama.layer(fused=True)
    head(step, llama.end, shard, (64, 1))
    for unit in (*layers * [[*weights, *llama.norms]], [llama.end]):
        step.unit(unit, shard, 2)
    step.clip(shard, step.tensors[shard])
    step.multiply(length, [*layers * weights, llama.end], layers * [weights[1], weights[3]])
    step.attend(llama.heads, length, length, (128, 128), layers)
    changes = {"sequence_length": length, "activation_checkpointing": "selective-op"}
    framework = TorchTitan(data_parallel_replicate=4)
    return BASE.replace(model=llama.config(layers), framework=framework, **changes), step


def tensor_parallel(full: bool) -> Theory:
    """There are 32 x 8 ranks with sequence parallelism (Korthikanti et al. 2022, section 4.2.2). Activations
    are gathered before attention and before the MLP, and reduced and scattered after them. In backward it is
    the other way round. Blocks are recomputed, so their forward is done twice. The embedding and the last
    norm do the same once. Each norm's gradient is summed over the 8 ranks. The loss needs the maximum, the
    sum and the target of each position.
    """
    llama = Llama(8192, 28672, 80, 64)
    length = 8192
    tp = (8, 1)
    dp = (32, 8)
    step = Step()
    layers = llama.layers if full else LAYERS
    tokens = 2 * length
    weights = llama.layer(fused=True, tp=8)
    end = (llama.vocabulary // 8, llama.dim)
    step.unit([end, (llama.dim,)], dp, 1)  # the loss of all positions is computed at once
    for _ in range(layers):
        step.unit([*weights, *llama.norms], dp, 2)
    step.unit([end], dp, 2)
    for kind in ("all_gather", "reduce_scatter"):
        step.send(kind, tp, "bfloat16", tokens * llama.dim, 6 * layers + 2)
    step.send("all_reduce", tp, "bfloat16", llama.dim, 2 * layers + 1)
    step.send("all_reduce", tp, "float32", tokens, 3)
    step.send("all_reduce", dp, "int64", 1)
    for group in (dp, tp):
        step.clip(group, step.tensors[dp])
    step.multiply(tokens, [*layers * weights, end], layers * weights)
    step.attend(llama.heads // 8, tokens, length, (128, 128), layers, layers)
    words = ["--parallelism.tensor_parallel_degree=8", "--training.local_batch_size=2"]
    changes = {"sequence_length": length, "micro_batch": 2, "topology": BASE.topology.replace(nodes=32)}
    return titan("llama3_70b", full, *words, "activation-checkpoint:full", **changes), step


def context_parallel(full: bool) -> Theory:
    """There are 8 x 8 ranks, and each has an eighth of a sequence. The keys and values of all ranks are
    gathered (Grattafiori et al. 2024, section 3.3.2), and their gradients are reduced and scattered
    (`flex_cp_allgather`). Selective recomputation keeps attention but gathers once more. Parameters are
    sharded over all 64 ranks.
    """
    llama = LLAMA_8B
    length = 8192
    cp = (8, 1)
    all_ranks = (64, 1)
    step = Step()
    layers = llama.layers if full else LAYERS
    tokens = length // 8
    weights = llama.layer(fused=True)
    head(step, llama.end, all_ranks, (8, 8))
    for unit in (*layers * [[*weights, *llama.norms]], [llama.end]):
        step.unit(unit, all_ranks, 2)
    step.clip(all_ranks, step.tensors[all_ranks])
    step.send("all_gather", cp, "bfloat16", length * llama.kv * llama.head, 4 * layers)
    step.send("reduce_scatter", cp, "bfloat16", length * llama.kv * llama.head, 2 * layers)
    step.multiply(tokens, [*layers * weights, llama.end], layers * [weights[1], weights[3]])
    step.attend(llama.heads, tokens, length, (128, 128), layers)
    changes = {"sequence_length": length, "activation_checkpointing": "selective-op"}
    return titan("llama3_8b", full, "--parallelism.context_parallel_degree=8", **changes), step


def experts(
    step: Step, layers: int, dense: list[Shape], routed: int, number: int, top: int, hidden: int
) -> None:
    """Add expert parallelism (Lepikhin et al. 2020, section 3.2) of SwiGLU experts on 8 of 64 ranks, in
    `layers`. Tokens go to their experts and come back, in forward, recomputation and backward. Before each
    forward, ranks exchange how many tokens each expert will get. Routing is balanced: a rank's experts get as
    many tokens as the rank sends. The loads of all experts are summed for their bias (Wang et al. 2024).
    """
    all_ranks = (64, 1)
    ep = (8, 1)
    same = (8, 8)
    dim = dense[0][1]
    for _ in range(layers):
        step.unit([(number // 8, hidden, dim)] * 3, same, 2)
        step.unit([*dense, (number, dim)], all_ranks, 2)
    step.send("all_to_all", ep, "int64", number, 2 * layers)
    step.send("all_to_all", ep, "bfloat16", routed * top * dim, 6 * layers)
    step.send("all_reduce", all_ranks, "float32", layers * number)
    for tokens, weights in ((routed * top, [(hidden, dim)] * 3), (routed, [(number, dim)])):
        step.multiply(tokens, layers * weights, layers * weights)


def expert_norms(step: Step) -> None:
    """Add the norms of the experts and those of the other weights. Both are reduced over 64 ranks, on a mesh
    that torchtitan has for the loss (torch/distributed/tensor/_redistribute.py,
    `_get_flattened_mesh_by_layout`).
    """
    for tensors in step.tensors.values():
        step.clip((64, 1), tensors)


def qwen_moe(full: bool) -> Theory:
    """Qwen3-30B-A3B (Yang et al. 2025, table 2) uses 8 of 128 experts, and has norms of queries and keys."""
    dim = 2048
    heads = 32
    kv = 4
    length = 4096
    end = (151936, 2048)
    step = Step()
    layers = 48 if full else LAYERS
    tokens = 2 * length
    weights: list[Shape] = [((heads + 2 * kv) * 128, dim), (dim, heads * 128)]
    head(step, end, (64, 1), (64, 1))
    experts(step, layers, [*weights, (128,), (128,), (dim,), (dim,)], tokens, 128, 8, 768)
    step.unit([end], (64, 1), 2)
    expert_norms(step)
    step.multiply(tokens, [*layers * weights, end], layers * weights)
    step.attend(heads, tokens, length, (128, 128), layers, layers)
    word = "--parallelism.expert_parallel_degree=8"
    return titan("qwen3_30b_a3b", full, word, micro_batch=2), step


def deepseek(full: bool) -> Theory:
    """DeepSeek's 16B (Dai et al. 2024) uses 6 of 64 experts and 2 shared ones, and its first layer is dense.
    It has latent attention (DeepSeek-AI 2024, section 2.1) without compressed queries: queries and keys are
    longer than values.
    """
    dim = 2048
    heads = 16
    nope = 128
    rope = 64
    value = 128
    rank = 512
    end = (102400, 2048)
    layers = 27 if full else LAYERS
    length = 4096
    all_ranks = (64, 1)
    step = Step()
    tokens = 4 * length
    sparse = layers - 1
    attention: list[Shape] = [(heads * (nope + rope), dim), (rank + rope, dim)]
    attention += [(heads * (nope + value), rank), (dim, heads * value)]
    dense, shared = ([(size, dim), (size, dim), (dim, size)] for size in (10944, 2 * 1408))
    norms: list[Shape] = [(rank,), (dim,), (dim,)]
    head(step, end, all_ranks, all_ranks)
    experts(step, sparse, [*attention, *norms, *shared], tokens, 64, 6, 1408)
    for unit in ([*attention, *norms, *dense], [end]):
        step.unit(unit, all_ranks, 2)
    expert_norms(step)
    weights = [*layers * attention, *dense, *sparse * shared]
    step.multiply(tokens, [*weights, end], weights)
    step.attend(heads, tokens, length, (nope + rope, value), layers, layers)
    words = ("--compile.no-enable", "activation-checkpoint:full")
    return titan("deepseek_v3_16b", full, *words, micro_batch=4), step


def mixtral(full: bool) -> Theory:
    """This is Mixtral 8x7B (Jiang et al. 2024, table 1) in transformers, where the experts are two tensors of
    8 rows. 16 ranks share these 8 rows, so only 8 of the ranks hold an expert. Because of padding, the
    tensors of 8 rows take twice their size when they are gathered and when their gradients are reduced. Two
    of 8 experts multiply for a token. Recomputation ends after the last product, since its result is
    weighted.
    """
    llama = Llama(4096, 14336, 32, 32, vocabulary=32000)
    length = 4096
    group = (16, 1)
    step = Step()
    layers = llama.layers if full else LAYERS
    weights = [*llama.layer(fused=False)[:4], (8, llama.dim)]
    stacked: list[Shape] = [(8, 2 * llama.hidden, llama.dim), (8, llama.dim, llama.hidden)]
    for _ in range(layers):
        step.unit([*weights, *llama.norms, *stacked], group, 2)
    step.unit([llama.end, llama.end, (llama.dim,)], group, 1)
    step.multiply(length, [*layers * weights, llama.end], layers * weights)
    step.multiply(2 * length, *2 * [3 * layers * [(llama.hidden, llama.dim)]])
    step.attend(llama.heads, length, length, (128, 128), layers, layers)
    model = llama.config(layers, "mixtral", num_local_experts=8, num_experts_per_tok=2)
    topology = Topology(nodes=2, processes_per_node=8)
    return BASE.replace(model=model, framework=FSDP2(), topology=topology), step


def float8(full: bool) -> Theory:
    return fsdp2(full, 1, FSDP2(float8="tensorwise"), sequence_length=8192)


def micro_batches(full: bool) -> Theory:
    framework = FSDP2(reduce_dtype="bfloat16", sync_each_micro_batch=False)
    return fsdp2(full, 1, framework, gradient_accumulation=4, activation_checkpointing="every-2")


THEORIES: dict[str, Callable[[bool], Theory]] = {
    "DDP, bf16": ddp,
    "FSDP2 64": lambda full: fsdp2(full, 8, FSDP2()),
    "HSDP 4 x 16": hsdp,
    "FSDP2 32 x TP 8": tensor_parallel,
    "FSDP2 64, CP 8": context_parallel,
    "Qwen3 MoE, EP 8": qwen_moe,
    "DeepSeek, EP 8": deepseek,
    "Mixtral, FSDP2 16": mixtral,
    "float8, FSDP2 8": float8,
    "4 micro-batches, reduced in bf16": micro_batches,
}


def counted(case: Case, directory: Path) -> tuple[Sent, Counts]:
    """Return what a dry run counts on rank 0: the collectives of all phases, and all counts."""
    counts = passed(case, directory).counts[0].counts
    sent = Step().sent
    for call in counts.collectives:
        entry = sent[call.kind, (call.ranks, call.apart), call.dtype]
        entry[:] = entry[0] + call.count, entry[1] + call.bytes
    return sent, counts


@pytest.mark.nightly
@pytest.mark.skipif(torch_build.release() < MIN_TORCH, reason="the formulas are of a newer torch")
@pytest.mark.parametrize("name", THEORIES)
def test_a_dry_run_counts_what_theory_says(name: str, tmp_path: Path) -> None:
    case, theory = THEORIES[name](False)
    sent, counts = counted(case, tmp_path)
    assert sent == theory.sent
    assert counts.flops == theory.flops
    assert counts.memory is not None
    held = counts.memory.at_peak
    assert (held["parameter"], held["optimizer state"]) == (theory.parameter, theory.optimizer)
    assert held.get("gradient", 0) in accumulate(theory.held)  # some gradients were reduced before the peak
