"""Closed formulas of what a step of ten configurations costs, against what a dry run counts.

The formulas follow papers and the sources of torch 2.13, torchtitan 0.3, transformers 5.23 and torchao 0.18.
They were written before anything of perfsuite that counts was read. `python -m tests.test_theory` prints the
table of the same configurations at full size.

Conventions. A collective has the bytes of the whole tensor on one rank: what an all-gather returns, what a
reduce-scatter, an all-reduce or an all-to-all takes. FLOPs are those of matrix products, a multiplication and
an addition each; attention masks nothing (torch/utils/flop_counter.py: "not accounting for causal").
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perfsuite import DDP, FSDP2, Case, Model, Topology, TorchTitan
from perfsuite.dry.driver import dry_run

Shape = tuple[int, ...]
Group = tuple[int, int]
"""Ranks, and how far apart they are."""

LAYERS = 3  # of tests/theory_configs.py, too
BYTES = {"float32": 4, "bfloat16": 2, "int64": 8}
MIB = 1 << 20


def elements(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def rows(shapes: Iterable[Shape], ranks: int) -> int:
    """Elements of one rank's shards. fully_shard splits dimension 0 in pieces of ceil(rows / ranks), and pads
    what it sends to such pieces (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param`).
    """
    return sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)


@dataclass
class Step:
    """What one rank sends, computes and holds in a step."""

    sent: dict[tuple[str, Group, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Kind, group and dtype -> calls and bytes."""
    flops: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("forward", "recompute", "backward"), 0)
    )
    parameter: int = 0
    optimizer: int = 0

    def send(self, kind: str, group: Group, dtype: str, size: int, calls: int = 1) -> None:
        """`calls` collectives of `size` elements each."""
        entry = self.sent[kind, group, dtype]
        entry[0] += calls
        entry[1] += calls * size * BYTES[dtype]

    def fsdp(
        self,
        shapes: Iterable[Shape],
        group: Group,
        gathers: int,
        reduce: str = "float32",
        reductions: int = 1,
    ) -> None:
        """One unit of FSDP2: gathered in bf16, its gradients reduced (Zhao et al. 2023, section 3.2)."""
        whole = rows(shapes, group[0]) * group[0]
        self.send("all_gather", group, "bfloat16", whole, gathers)
        self.send("reduce_scatter", group, reduce, whole, reductions)

    def hold(self, shapes: Iterable[Shape], ranks: int = 1, dtype: str = "float32") -> None:
        """Parameters, and AdamW's two moments; fused, it keeps a step on the device for each, in fp32."""
        shapes = list(shapes)
        size = rows(shapes, ranks) * BYTES[dtype]
        self.parameter += size
        self.optimizer += 2 * size + 4 * len(shapes)

    def multiply(self, tokens: int, weights: Iterable[Shape], recomputed: Iterable[Shape] = ()) -> None:
        """Products of tokens and weights: one forward, two backward (Kaplan et al. 2020, section 2.1)."""
        forward = 2 * tokens * elements(weights)
        self.flops["forward"] += forward
        self.flops["backward"] += 2 * forward
        self.flops["recompute"] += 2 * tokens * elements(recomputed)

    def attend(
        self, batch: int, heads: int, queries: int, keys: int, size: int, value: int, again: bool, layers: int
    ) -> None:
        """FlashAttention-2 (Dao 2023, section 3): two products forward, five backward, of which three are as
        long as a query (scores anew, dQ, dK) and two as a value (dP, dV)."""
        product = 2 * batch * heads * queries * keys * layers
        self.flops["forward"] += product * (size + value)
        self.flops["recompute"] += product * (size + value) * again
        self.flops["backward"] += product * (3 * size + 2 * value)


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
        """Weights that multiply, of one tensor parallel rank (Shoeybi et al. 2019, section 3): what is first
        is split by rows, `wo` and `w2` by columns. torchtitan has q, k and v in one.
        """
        kv = self.kv * self.head // tp
        query, hidden = self.heads * self.head // tp, self.hidden // tp
        qkv = [(query + 2 * kv, self.dim)] if fused else [(query, self.dim), (kv, self.dim), (kv, self.dim)]
        return [*qkv, (self.dim, query), (hidden, self.dim), (hidden, self.dim), (self.dim, hidden)]

    @property
    def norms(self) -> list[Shape]:
        return [(self.dim,)] * 2

    @property
    def end(self) -> list[Shape]:
        return [(self.vocabulary, self.dim)]

    def config(self, layers: int, **more: Any) -> Model:
        config = {
            "model_type": "llama",
            "hidden_size": self.dim,
            "intermediate_size": self.hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv,
            "vocab_size": self.vocabulary,
            **more,
        }
        return Model.from_config(config, name=f"llama-{layers}")


LLAMA_1B = Llama(2048, 8192, 16, 32, head=64)
LLAMA_8B = Llama(4096, 14336, 32, 32)
LLAMA_70B = Llama(8192, 28672, 80, 64)

Theory = tuple[Case, Step]


def case(
    model: Model, framework: Any, length: int, batch: int, recomputed: str, nodes: int, **more: Any
) -> Case:
    return Case(
        model=model,
        framework=framework,
        sequence_length=length,
        micro_batch=batch,
        activation_checkpointing=recomputed,
        topology=Topology(nodes=nodes, processes_per_node=8),
        hardware="h100",
        **{"precision": "bf16-mixed", **more},
    )


def titan(config: str, full: bool, *overrides: str, **more: Any) -> TorchTitan:
    """The registered configuration, or the same with few layers."""
    family = {"q": "qwen3", "d": "deepseek_v3", "l": "llama3"}[config[0]]
    whole = {"llama3_70b": ("bench_cases.torchtitan_configs", "llama3_70b_whole_loss")}
    module, name = whole.get(config, (family, config)) if full else ("tests.theory_configs", config)
    return TorchTitan(module=module, config=name, overrides=overrides, **more)


def ddp(full: bool) -> Theory:
    """Buckets of 1 MiB, then of 25 MiB, in reverse order of the parameters. The gradient that fills a
    bucket closes it (torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size`). Embedding
    and head are one. The two buffers of the rotary embedding are broadcast before each forward, as one.
    """
    llama, batch, length, group = LLAMA_1B, 2, 4096, (8, 1)
    layers = llama.layers if full else LAYERS
    step, weights = Step(), llama.layer(fused=False)
    in_order = [llama.end[0], *layers * [*weights, *llama.norms], (llama.dim,)]
    limits, bucket = [MIB], 0
    for shape in reversed(in_order):
        bucket += math.prod(shape) * BYTES["bfloat16"]
        if bucket >= limits[-1]:
            limits.append(25 * MIB)
            bucket = 0
    buckets = len(limits) - 1 + (bucket > 0)
    step.sent["all_reduce", group, "bfloat16"] = [buckets, elements(in_order) * BYTES["bfloat16"]]
    step.send("broadcast", group, "float32", 2 * llama.head // 2)
    step.multiply(batch * length, layers * weights + llama.end)
    step.attend(batch, llama.heads, length, length, llama.head, llama.head, False, layers)
    step.hold(in_order, dtype="bfloat16")
    model = llama.config(layers, tie_word_embeddings=True)
    return case(model, DDP(), length, batch, "none", 1, precision="bf16"), step


def fsdp2(
    full: bool,
    nodes: int,
    batch: int,
    recomputed: str,
    framework: FSDP2,
    length: int = 4096,
    micro_batches: int = 1,
) -> Theory:
    """Each block is gathered for forward and again for backward, the root (embedding, last norm, head) once.
    torch stops recomputing a block at its last saved tensor: the input of the last product, which is not
    done again (`set_checkpoint_early_stop`), unless it is of an autograd function as in float8, which saves
    after it has multiplied. Gradients of all micro-batches are reduced at the last.
    """
    llama, ranks = LLAMA_8B, 8 * nodes
    layers = llama.layers if full else LAYERS
    step, weights, root = Step(), llama.layer(fused=False), [*2 * llama.end, (llama.dim,)]
    tokens, block = batch * length * micro_batches, [*weights, *llama.norms]
    for _ in range(layers):
        step.fsdp(block, (ranks, 1), 2 * micro_batches, framework.reduce_dtype)
    step.fsdp(root, (ranks, 1), micro_batches, framework.reduce_dtype)
    again = layers if recomputed == "full" else math.ceil(layers / 2)
    step.multiply(tokens, layers * weights + llama.end, again * weights[: None if framework.float8 else -1])
    size = llama.head
    step.attend(batch * micro_batches, llama.heads, length, length, size, size, False, layers)
    step.flops["recompute"] += 4 * tokens * length * llama.dim * again
    step.hold([*layers * block, *root], ranks)
    accumulated = {"gradient_accumulation": micro_batches}
    return case(llama.config(layers), framework, length, batch, recomputed, nodes, **accumulated), step


def titan_ends(step: Step, end: Shape, dim: int, fsdp: Group, batches: Group, norm: Iterable[Group]) -> None:
    """What torchtitan adds: the embedding as a unit of its own; norm and head as one, gathered for the norm,
    for the parts of the loss and for the norm's backward, and reduced one after the other
    (`ChunkedLossWrapper`); the number of tokens, and the norm of the gradients (`clip_grad_norm_`).
    """
    step.fsdp([end], fsdp, 2)
    step.send("all_gather", fsdp, "bfloat16", rows([end, (dim,)], fsdp[0]) * fsdp[0], 3)
    step.send("reduce_scatter", fsdp, "float32", rows([end], fsdp[0]) * fsdp[0])
    step.send("reduce_scatter", fsdp, "float32", rows([(dim,)], fsdp[0]) * fsdp[0])
    step.send("all_reduce", batches, "int64", 1)
    for group in norm:
        step.send("all_reduce", group, "float32", 1)


def hsdp(full: bool) -> Theory:
    """4 x 16 ranks: what 16 reduced and scattered is all-reduced over 4 (Zhao et al. 2023, section 3.2.2).
    Every second product is recomputed, `wo` and `w3` of (wqkv, wo, w1, w3, w2); attention is kept.
    """
    llama, length, shard, replicate = LLAMA_8B, 8192, (16, 1), (4, 16)
    layers = llama.layers if full else LAYERS
    step, weights = Step(), llama.layer(fused=True)
    block = [*weights, *llama.norms]
    for _ in range(layers):
        step.fsdp(block, shard, 2)
    titan_ends(step, llama.end[0], llama.dim, shard, (64, 1), [shard])
    units: list[list[Shape]] = [*layers * [block], llama.end, llama.end, [(llama.dim,)]]
    for unit in units:
        step.send("all_reduce", replicate, "float32", rows(unit, 16))
    step.multiply(length, layers * weights + llama.end, layers * [weights[1], weights[3]])
    step.attend(1, llama.heads, length, length, llama.head, llama.head, False, layers)
    step.hold([*layers * block, *2 * llama.end, (llama.dim,)], 16)
    framework = TorchTitan(data_parallel_replicate=4)
    return case(llama.config(layers), framework, length, 1, "selective-op", 8), step


def tensor_parallel(full: bool) -> Theory:
    """32 x 8 ranks with sequence parallelism (Korthikanti et al. 2022, section 4.2.2): before attention and
    before the MLP activations are gathered, after them reduced and scattered, and backward the other way
    round; forward is done twice. The same once at the embedding and at the last norm, which are not
    recomputed. Each norm's gradient is summed over the 8; the loss needs maximum, sum and target of each
    position.
    """
    llama, batch, length, tp, dp = LLAMA_70B, 2, 8192, (8, 1), (32, 8)
    layers = llama.layers if full else LAYERS
    step, weights = Step(), llama.layer(fused=True, tp=8)
    block: list[Shape] = [*weights, *llama.norms]
    end: list[Shape] = [(llama.vocabulary // 8, llama.dim)]
    for _ in range(layers):
        step.fsdp(block, dp, 2)
    step.fsdp(end, dp, 2)
    step.fsdp([*end, (llama.dim,)], dp, 1)  # with the loss of all positions at once
    activations = batch * length * llama.dim
    for kind in ("all_gather", "reduce_scatter"):
        step.send(kind, tp, "bfloat16", activations, 6 * layers + 2)
    step.send("all_reduce", tp, "bfloat16", llama.dim, 2 * layers + 1)
    step.send("all_reduce", tp, "float32", batch * length, 3)
    step.send("all_reduce", dp, "int64", 1)
    for group in (dp, tp):
        step.send("all_reduce", group, "float32", 1)
    step.multiply(batch * length, layers * weights + end, layers * weights)
    step.attend(batch, llama.heads // 8, length, length, llama.head, llama.head, True, layers)
    step.hold([*layers * block, *2 * end, (llama.dim,)], 32)
    words = (
        "--parallelism.tensor_parallel_degree=8",
        "--training.local_batch_size=2",
        "activation-checkpoint:full",
    )
    framework = titan("llama3_70b", full, *words)
    return case(Model.named("llama3"), framework, length, batch, "full", 32), step


def context_parallel(full: bool) -> Theory:
    """8 x 8 ranks, each with an eighth of a sequence: keys and values of all are gathered, their gradients
    reduced and scattered (`flex_cp_allgather`); Grattafiori et al. 2024, section 3.3.2, do so, too. Selective
    recomputation keeps attention but gathers once more. Parameters are sharded over all 64."""
    llama, length, cp = LLAMA_8B, 8192, (8, 1)
    layers = llama.layers if full else LAYERS
    step, weights = Step(), llama.layer(fused=True)
    block, tokens = [*weights, *llama.norms], length // 8
    for _ in range(layers):
        step.fsdp(block, (64, 1), 2)
    titan_ends(step, llama.end[0], llama.dim, (64, 1), (8, 8), [(64, 1)])
    step.send("all_gather", cp, "bfloat16", length * llama.kv * llama.head, 4 * layers)
    step.send("reduce_scatter", cp, "bfloat16", length * llama.kv * llama.head, 2 * layers)
    step.multiply(tokens, layers * weights + llama.end, layers * [weights[1], weights[3]])
    step.attend(1, llama.heads, tokens, length, llama.head, llama.head, False, layers)
    step.hold([*layers * block, *2 * llama.end, (llama.dim,)], 64)
    framework = titan("llama3_8b", full, "--parallelism.context_parallel_degree=8")
    return case(Model.named("llama3"), framework, length, 1, "selective-op", 8), step


def experts(
    step: Step,
    layers: int,
    tokens: int,
    top: int,
    number: int,
    dim: int,
    hidden: int,
    ep: Group,
    shard: Group,
) -> list[Shape]:
    """Expert parallelism (Lepikhin et al. 2020, section 3.2) of SwiGLU experts: tokens go to their experts
    and come back, forward, recomputed and backward; before each forward ranks tell each other how many come
    to each expert. Routing is balanced: a rank's experts get as many tokens as it sends, `top` for each
    token. Returns the weights of one rank.
    """
    mine: list[Shape] = [(number // ep[0], hidden, dim)] * 3
    one = [(hidden, dim)] * 3
    step.send("all_to_all", ep, "int64", number, 2 * layers)
    step.send("all_to_all", ep, "bfloat16", tokens * top * dim, 6 * layers)
    step.multiply(tokens * top, layers * one, layers * one)
    step.multiply(tokens, layers * [(number, dim)], layers * [(number, dim)])  # the router
    step.send("all_reduce", (64, 1), "float32", layers * number)  # load of experts, for their bias
    for _ in range(layers):
        step.fsdp(mine, shard, 2)
    return mine


def qwen_moe(full: bool) -> Theory:
    """Qwen3-30B-A3B (Yang et al. 2025, table 2): 128 experts of 768, 8 for each token, heads of 128 and norms
    of queries and keys. 64 ranks, EP 8: experts are sharded over the 8 ranks with the same ones. The norm of
    the gradients is summed over 64 ranks for experts and for the rest.
    """
    dim, heads, kv, head, vocabulary, batch, length, all_ranks = 2048, 32, 4, 128, 151936, 2, 4096, (64, 1)
    layers, tokens, step = 48 if full else LAYERS, batch * length, Step()
    weights = [((heads + 2 * kv) * head, dim), (dim, heads * head)]
    block = [*weights, (head,), (head,), (dim,), (dim,), (128, dim)]
    for _ in range(layers):
        step.fsdp(block, all_ranks, 2)
    mine = experts(step, layers, tokens, 8, 128, dim, 768, (8, 1), (8, 8))
    titan_ends(step, (vocabulary, dim), dim, all_ranks, all_ranks, [all_ranks] * 2)
    step.multiply(tokens, [*layers * weights, (vocabulary, dim)], layers * weights)
    step.attend(batch, heads, length, length, head, head, True, layers)
    step.hold([*layers * block, *2 * [(vocabulary, dim)], (dim,)], 64)
    step.hold(layers * mine, 8)
    framework = titan("qwen3_30b_a3b", full, "--parallelism.expert_parallel_degree=8")
    return case(Model.named("qwen3"), framework, length, batch, "full", 8), step


def deepseek(full: bool) -> Theory:
    """DeepSeek's 16B (Dai et al. 2024; latent attention of DeepSeek-AI 2024, section 2.1, without compressed
    queries): 64 experts of 1408, 6 for each token, 2 shared; the first layer is dense. 64 ranks, EP 8.
    """
    dim, heads, nope, rope, value, rank, vocabulary, all_ranks = 2048, 16, 128, 64, 128, 512, 102400, (64, 1)
    layers, batch, length, step = 27 if full else LAYERS, 4, 4096, Step()
    tokens, sparse = batch * length, layers - 1
    attention = [
        (heads * (nope + rope), dim),
        (rank + rope, dim),
        (heads * (nope + value), rank),
        (dim, heads * value),
    ]
    dense = [(10944, dim), (10944, dim), (dim, 10944)]
    shared = [(2 * 1408, dim), (2 * 1408, dim), (dim, 2 * 1408)]
    norms = [(rank,), (dim,), (dim,)]
    first, other = [*attention, *norms, *dense], [*attention, *norms, *shared, (64, dim)]
    for block in (first, *sparse * [other]):
        step.fsdp(block, all_ranks, 2)
    mine = experts(step, sparse, tokens, 6, 64, dim, 1408, (8, 1), (8, 8))
    titan_ends(step, (vocabulary, dim), dim, all_ranks, all_ranks, [all_ranks] * 2)
    weights = [*layers * attention, *dense, *sparse * shared]
    step.multiply(tokens, [*weights, (vocabulary, dim)], weights)
    step.attend(batch, heads, length, length, nope + rope, value, True, layers)
    step.hold([*first, *sparse * other, *2 * [(vocabulary, dim)], (dim,)], 64)
    step.hold(sparse * mine, 8)
    framework = titan("deepseek_v3_16b", full, "--compile.no-enable", "activation-checkpoint:full")
    return case(Model.named("deepseek"), framework, length, batch, "full", 8), step


def mixtral(full: bool) -> Theory:
    """Mixtral 8x7B (Jiang et al. 2024, table 1) of transformers, whose experts are two tensors of 8 rows. 16
    ranks share these 8 rows: 8 ranks hold an expert each, and twice the weights are gathered and reduced. Two
    of 8 experts multiply for a token. Recomputation ends behind the last product, whose result is weighted.
    """
    llama, length, ranks = Llama(4096, 14336, 32, 32, vocabulary=32000), 4096, (16, 1)
    layers = llama.layers if full else LAYERS
    step, attention, router = Step(), llama.layer(fused=False)[:4], [(8, llama.dim)]
    stacked = [(8, 2 * llama.hidden, llama.dim), (8, llama.dim, llama.hidden)]
    block, root = [*attention, *llama.norms, *router, *stacked], [*2 * llama.end, (llama.dim,)]
    for _ in range(layers):
        step.fsdp(block, ranks, 2)
    step.fsdp(root, ranks, 1)
    one = [(3 * llama.hidden, llama.dim)]
    step.multiply(length, layers * (attention + router) + llama.end, layers * (attention + router))
    step.multiply(2 * length, layers * one, layers * one)
    step.attend(1, llama.heads, length, length, llama.head, llama.head, True, layers)
    step.hold([*layers * block, *root], 16)
    config = {**llama.config(layers).config, "model_type": "mixtral", "num_local_experts": 8}
    model = Model.from_config({**config, "num_experts_per_tok": 2}, name=f"mixtral-{layers}")
    return case(model, FSDP2(), length, 1, "full", 2), step


THEORIES: dict[str, Callable[[bool], Theory]] = {
    "ddp": ddp,
    "fsdp2": lambda full: fsdp2(full, 8, 1, "full", FSDP2()),
    "hsdp": hsdp,
    "fsdp2-tp8": tensor_parallel,
    "fsdp2-cp8": context_parallel,
    "qwen3-ep8": qwen_moe,
    "deepseek-ep8": deepseek,
    "fsdp2-mixtral": mixtral,
    "fsdp2-float8": lambda full: fsdp2(full, 1, 1, "full", FSDP2(float8="tensorwise"), 8192),
    "fsdp2-accumulation": lambda full: fsdp2(
        full, 1, 1, "every-2", FSDP2(reduce_dtype="bfloat16", sync_each_micro_batch=False), micro_batches=4
    ),
}


def counted(case: Case, directory: Path) -> Step:
    """What a dry run of rank 0 counts of the same."""
    run = dry_run(case, directory)
    assert run.failure is None, run.failure
    counts = run.counts[0].counts
    assert counts.memory is not None
    step = Step()
    for each in counts.collectives:
        entry = step.sent[each.kind, (each.ranks, each.apart), each.dtype]
        entry[0] += each.count
        entry[1] += each.bytes
    step.flops |= {str(phase): flops for phase, flops in counts.flops.items()}
    step.parameter, step.optimizer = (
        counts.memory.at_peak[name] for name in ("parameter", "optimizer state")
    )
    return step


@pytest.mark.launch
@pytest.mark.parametrize("name", THEORIES)
def test_a_dry_run_counts_what_theory_says(name: str, tmp_path: Path) -> None:
    case, theory = THEORIES[name](False)
    assert counted(case, tmp_path) == theory


def main(names: list[str]) -> None:
    """Print theory and counts of each quantity at full size, as a table in Markdown."""
    for name in names or THEORIES:
        case, theory = THEORIES[name](True)
        with tempfile.TemporaryDirectory() as directory:
            found = counted(case, Path(directory))
        rows: list[tuple[str, Any, Any]] = [
            (" ".join(map(str, key)), tuple(theory.sent[key]), tuple(found.sent[key]))
            for key in sorted({*theory.sent, *found.sent})
        ]
        rows += [(f"FLOPs {phase}", value, found.flops[phase]) for phase, value in theory.flops.items()]
        rows += [(kind, getattr(theory, kind), getattr(found, kind)) for kind in ("parameter", "optimizer")]
        for what, said, seen in rows:
            print(
                f"| {name} | {what} | {said} | {seen} | {'same' if said == seen else '**differs**'} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
