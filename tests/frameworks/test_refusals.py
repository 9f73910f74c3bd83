"""Test that cases which a framework cannot run, and impossible options, are refused before any launch."""

import re
from pathlib import Path
from typing import Any

import pytest

from perfsuite import (
    DDP,
    FSDP,
    FSDP2,
    Accelerate,
    Case,
    Framework,
    Lightning,
    LoRA,
    Model,
    Script,
    Trainer,
)
from perfsuite.case.catalog import llama
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError, FileError
from tests.frameworks.refusals import A100, CPU, H100, check_refusal, row
from tests.samples import make_case

SHAPE: dict[str, Any] = {"layers": 2, "heads": 4, "kv_heads": 2, "hidden": 32, "mlp": 48, "vocab": 64}
ADAPTERS = LoRA(rank=4, alpha=8)
NET = Model.named("net")
FULL, NOTHING, HYBRID = (FSDP(sharding_strategy=name) for name in ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"))
BY_DDP, BY_FSDP, BY_FSDP2 = (Accelerate(strategy=name) for name in ("ddp", "fsdp1", "fsdp2"))
SHARDED = Trainer(fsdp="full_shard")
OFFLOADED = Trainer(fsdp="full_shard offload")
FABRIC, FABRIC_1, FABRIC_2 = (Lightning(strategy=name) for name in ("ddp", "fsdp", "fsdp2"))
OF_FABRIC_1 = FABRIC_2.replace(cpu_offload=True, backward_prefetch="BACKWARD_POST")
HYBRIDS = [
    (BY_FSDP.replace(sharding_strategy="HYBRID_SHARD_ZERO2"), "HYBRID_SHARD_ZERO2"),
    (Trainer(fsdp="hybrid_shard", fsdp_version=1), "hybrid_shard"),
]
LOW = DDP(float8="tensorwise")
LOW_2 = BY_FSDP2.replace(float8="tensorwise")
IN_4: dict[str, Any] = {"dp_shard_size": 2, "tp_size": 2}
GRAPH = DDP(static_graph=True)
SCRIPT = Script(path="a.py")
TENSORS = FSDP2(tensor_parallel=2)
REDUCED = FSDP2(reduce_dtype="bfloat16")


def split(why: str | None, ranks: int = 4, **changes: Any) -> Any:
    """Return a row with layers split over two ranks, with FSDP2."""
    if changes.keys() & SHAPE.keys():
        changes = {"model": llama("x", **SHAPE | changes)}
    return row(TENSORS, why, ranks=ranks, **changes)


def both(why: str | None, on: Machine = CPU, degrees: Any = None, **changes: Any) -> list[Any]:
    """Return rows for both frameworks that train through accelerate, on four ranks in a mesh of `degrees`."""
    return [
        row(framework.replace(**degrees or {}), why, on, ranks=4, **changes)
        for framework in (BY_FSDP2, SHARDED)
    ]


def parts(why: str | None, on: Machine = H100, **changes: Any) -> list[Any]:
    """Return rows for both frameworks, with a quarter of each sequence on each of four ranks."""
    return both(why, on, {"cp_size": 4}, **{"precision": "bf16", **changes})


PARTS_NEED = "cp_size=4 needs attention 'sdpa', 16 bits and no compile. The case has attention "
OLD_GPU = "float8='tensorwise' needs a GPU of compute capability 8.9 or more, such as L4, L40S or H100"
MIXED = "float8='tensorwise' needs precision 'bf16-mixed', not "
GROUPS = (
    "hybrid sharding in groups of {} needs at least 2 groups of at least 2 processes, "
    "but there are {} processes"
)
OFFLOAD = "{} copies from pinned memory to a GPU, but this machine has none"
ONE = "with 1 process, accelerate uses no DDP, and FSDP1 shards nothing: give at least 2"
WHOLE: dict[str, Any] = {"activation_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective-op"}
TRAINER_BLOCKS = (
    "the Trainer recomputes whole blocks only: give 'none', 'full' or 'every-N', not 'selective-op'"
)
FABRIC_BLOCKS = "Fabric's FSDPStrategy recomputes whole blocks only: ..."
PACKED = "bf16-mixed casts sharded weights, but packed 4bit weights cannot be cast..."
OTHER_LAYERS = "float8='tensorwise': transformers' tensor parallelism (tp_size) cannot split torchao's layers"
UNSEEN = "{} cannot be observed in net: only the model's name is known"


@pytest.mark.parametrize(
    ("case", "machine", "why"),
    [
        row(DDP(), None, gradient_accumulation=4),
        row(DDP(), "it needs 32 cores (one per process), but this machine has 16", ranks=32),
        row(GRAPH, None),
        row(GRAPH, "static_graph must reduce gradients in the first backward...", gradient_accumulation=2),
        row(FULL, None),
        row(FSDP(sharding_strategy="SHARD_GRAD_OP"), "SHARD_GRAD_OP needs at least 2 processes...", ranks=1),
        row(NOTHING, None, ranks=1),
        row(NOTHING.replace(shard_group=2), "shard_group=2 is for HYBRID_SHARD, not for NO_SHARD", ranks=4),
        row(FULL.replace(cpu_offload=True), OFFLOAD.format("cpu_offload")),
        row(HYBRID.replace(shard_group=2), None, ranks=4),
        row(HYBRID.replace(cpu_offload=True), None, H100, ranks=(2, 2)),
        row(HYBRID, GROUPS.format(4, 4), H100, ranks=4),
        row(HYBRID, GROUPS.format(1, 8), ranks=(8, 1)),
        *(row(FSDP2(shard_group=size), None, ranks=8) for size in (2, 4)),
        *(row(FSDP2(shard_group=size), GROUPS.format(size, 8), ranks=8) for size in (3, 8)),
        row(REDUCED, "reduce_dtype='bfloat16' needs mixed precision...", precision="bf16"),
        *(
            row(framework, why, H100, quantization=quantization, precision=precision, lora=ADAPTERS)
            for framework in (FULL, FSDP2())
            for quantization, precision, why in (
                ("none", "bf16-mixed", None),
                ("4bit", "bf16", None),
                ("4bit", "bf16-mixed", PACKED),
                ("8bit", "bf16", "8bit weights cannot be sharded..."),
            )
        ),
        # Tensor parallelism
        split(None),
        split(None, model="llama-3-70b"),
        split(None, model=Model(name="x", config={"model_type": "llama"})),
        split("tensor_parallel can split only llama models, but gpt2-tiny is a gpt2", model="gpt2-tiny"),
        split("tensor_parallel=2 must divide the 3 processes of llama-tiny", ranks=3),
        split("tensor_parallel=2 must divide the 5 attention heads of x", heads=5, kv_heads=5),
        split("tensor_parallel=2 must divide the 1 key-value heads of x", kv_heads=1),
        split("tensor_parallel=2 must divide the 49 MLP columns of x", mlp=49),
        split("tensor_parallel=2 must divide the 65 tokens in the vocabulary of x", vocab=65),
        split("with tensor_parallel and compiled blocks, the loss differs ...", compile=True),
        split("tensor_parallel cannot split lora adapters", lora=ADAPTERS),
        row(TENSORS.replace(shard_group=2), "tensor_parallel=2 cannot be combined with shard_group ..."),
        row(TENSORS.replace(float8="rowwise"), "tensor_parallel=2 cannot be combined with float8"),
        *both(None, CPU, IN_4),
        *both("tp_size=2 must divide the 1 key-value heads of odd", CPU, IN_4, num_key_value_heads=1),
        # float8
        row(LOW, None),
        row(LOW, None, H100),
        row(LOW, OLD_GPU, A100),
        row(LOW, "float8='tensorwise' cannot be combined with lora or quantization", lora=ADAPTERS),
        row(LOW_2, None, H100, precision="bf16-mixed"),
        row(LOW_2, OLD_GPU, A100, precision="bf16-mixed"),
        row(LOW_2, f"{MIXED}'bf16'", precision="bf16"),
        row(Trainer(float8="tensorwise"), f"{MIXED}'fp32'"),
        row(LOW_2.replace(**IN_4), OTHER_LAYERS, precision="bf16-mixed", ranks=4),
        # Training through accelerate
        *both(None),
        *both("...supports precision 'fp32' or 'bf16-mixed' or 'bf16', but...", precision="fp16-mixed"),
        *parts(None),
        *parts("cp_size=4 needs a GPU. Run the case dry, with a simulated GPU", CPU),
        *parts(f"{PARTS_NEED}'eager', precision 'bf16', compile False", attention="eager"),
        *parts(f"{PARTS_NEED}'sdpa', precision 'fp32', compile False", precision="fp32"),
        *parts(f"{PARTS_NEED}'sdpa', precision 'bf16', compile True", compile=True),
        row(BY_DDP, None),
        row(BY_FSDP2, None, ranks=1),
        *(row(framework, ONE, ranks=1) for framework in (BY_DDP, BY_FSDP)),
        row(BY_FSDP2.replace(cpu_offload=True), OFFLOAD.format("cpu_offload")),
        *(
            row(framework, f"{name} shards among the GPUs of a node, but this machine has none")
            for framework, name in HYBRIDS
        ),
        *(row(framework, GROUPS.format(8, 8), H100, ranks=8) for framework, _ in HYBRIDS),
        *(row(framework, None, H100, ranks=(2, 8)) for framework, _ in HYBRIDS),
        row(Trainer(), None, activation_checkpointing="every-2"),
        row(Trainer(), TRAINER_BLOCKS, **SELECTIVE),
        row(Trainer(), "the Trainer does not wrap the model on 1 process: give at least 2", ranks=1),
        row(OFFLOADED, OFFLOAD.format("offload")),
        row(OFFLOADED, "with FSDP2, the gradient norm of offloaded shards ...: give fsdp_version=1", H100),
        row(OFFLOADED.replace(fsdp_version=1), None, H100),
        # Lightning Fabric
        row(FABRIC, None),
        row(FABRIC, None, H100, precision="fp16-mixed"),
        row(FABRIC, "Fabric changes fp16-mixed to bf16-mixed on a CPU", precision="fp16-mixed"),
        row(FABRIC_2, None, precision="bf16-mixed", **SELECTIVE),
        row(
            FABRIC_2,
            "Fabric's ModelParallelStrategy does not support fp16-mixed",
            H100,
            precision="fp16-mixed",
        ),
        row(FABRIC_1.replace(cpu_offload=True, backward_prefetch="none"), None, H100),
        row(FABRIC_1, None, H100, precision="fp16-mixed", activation_checkpointing="every-2"),
        row(FABRIC_1.replace(sharding_strategy="HYBRID_SHARD"), None, H100, ranks=(2, 4)),
        row(FABRIC_1.replace(sharding_strategy="HYBRID_SHARD"), GROUPS.format(4, 4), H100, ranks=4),
        row(FABRIC_1, "Fabric's FSDPStrategy runs on GPUs only"),
        row(FABRIC_1, FABRIC_BLOCKS, H100, **SELECTIVE),
        row(FABRIC_1, "FULL_SHARD needs at least 2 processes...", H100, ranks=1),
        row(
            FABRIC.replace(sharding_strategy="NO_SHARD"), "no_shard: only for strategy 'fsdp', not for 'ddp'"
        ),
        row(OF_FABRIC_1, "backward_post, cpu_offload: only for strategy 'fsdp', not for 'fsdp2'"),
        # Scripts
        row(SCRIPT, None, attention="eager"),
        row(SCRIPT, UNSEEN.format("attention"), attention="eager", model=NET),
        row(SCRIPT, None, model=NET, **WHOLE),
        row(SCRIPT, "script does not support learning_rate, but the case asks for 0.1", learning_rate=0.1),
        row(SCRIPT, "script does not support seed, but the case asks for 1", seed=1),
        row(Script(path="a.py", data_parallel=3), "data_parallel=3 does not divide 2 processes"),
    ],
)
def test_refuses_an_impossible_case_beforehand(case: Case, machine: Machine, why: str | None) -> None:
    check_refusal(case, machine, why)


WORDS = "full_shard, shard_grad_op, no_shard, hybrid_shard, hybrid_shard_zero2"
WORD_BY_WORD = 'give separate words, such as ("torchrun", "train.py"); shlex.split makes them'
NO_DEGREES = "sizes above 1 need FSDP2. Give fsdp_version=2 and a strategy"
OF_FSDP1 = "with strategy 'fsdp1', which allows sharding_strategy, backward_prefetch, cpu_offload"
DEGREES: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 2}, "dp_shard_size=1 leaves FSDP2 nothing to shard (dp_replicate_size=1, dp_shard_size=1"),
    (
        {"dp_replicate_size": 2, "tp_size": 2},
        "give at least 2, or leave out all degrees",
    ),
    (
        {"dp_replicate_size": 2, "cp_size": 2},
        "give at least 2, or leave out all degrees",
    ),
    ({"tp_size": 0}, "tp_size: Input should be greater than or equal to 1, got 0"),
    ({"sp_size": 2}, "sp_size=2: accelerate supports sp_size only with DeepSpeed, not with FSDP2"),
    ({"dp_shard_size": 2.0}, "dp_shard_size: Input should be a valid integer, got 2.0"),
]
BAD: dict[type[Framework], list[tuple[dict[str, Any], str]]] = {
    Script: [
        ({}, "give one of path, module and command, not none"),
        ({"command": "torchrun a.py"}, f"command: {WORD_BY_WORD}"),
        ({"path": "a.py", "arguments": "--x 1"}, f"arguments: {WORD_BY_WORD}"),
        ({"path": "a.py", "label": "two words"}, "label: String should match pattern"),
        ({"path": "a.py", "module": "a"}, "not path and module"),
        ({"path": ""}, "path: String should have at least 1 character, got ''"),
        ({"module": ""}, "module: String should have at least 1 character, got ''"),
        ({"command": ()}, "at least 1 item"),
        ({"command": ("torchrun", "a.py"), "arguments": ("--x",)}, "Add a command's arguments to `command`"),
        ({"path": "a.py", "data_parallel": 0}, "data_parallel: Input should be greater"),
        ({"path": "a.py", "clock": "AdamW:0"}, "clock: String should match pattern"),
        ({"path": "a.py", "clock": ""}, "clock: String should match pattern"),
        ({"path": "a.py", "loss": "fall"}, "loss: Input should be 'falls' or 'finite', got 'fall'"),
    ],
    Trainer: [
        ({"fsdp": "full"}, f"fsdp: unknown word 'full'; use {WORDS}, offload, auto_wrap"),
        ({"fsdp": "auto_wrap"}, f"fsdp: give one sharding strategy of {WORDS}, or nothing for DDP"),
        ({"fsdp": "full_shard no_shard"}, "or nothing for DDP, got 'full_shard no_shard'"),
        ({"fsdp": "no_shard"}, "no_shard needs fsdp_version=1; FSDP2 has only full_shard and shard_grad_op"),
        ({"fsdp_version": 1}, "fsdp_version=1 needs fsdp; give a strategy"),
        ({"fsdp_version": 3}, "fsdp_version: Input should be 1 or 2, got 3"),
        ({"float8": "rowwise"}, "float8: Input should be 'tensorwise', got 'rowwise'"),
        (
            {"fsdp": "full_shard", "fsdp_version": 1, "float8": "tensorwise"},
            "float8='tensorwise' works with DDP and FSDP2, not with fsdp_version=1",
        ),
        ({"dp_shard_size": 2}, f"dp_replicate_size=1, dp_shard_size=2, cp_size=1, tp_size=1: {NO_DEGREES}"),
        ({"fsdp": "full_shard", "fsdp_version": 1, "tp_size": 2}, f"tp_size=2: {NO_DEGREES}"),
        *(({"fsdp": "full_shard auto_wrap", **degrees}, said) for degrees, said in DEGREES),
    ],
    Accelerate: [
        ({}, "give either strategy ('ddp', 'fsdp1' or 'fsdp2') or config (the path of an accelerate YAML)"),
        ({"config": "none.yaml"}, "cannot read none.yaml: No such file or directory"),
        ({"strategy": "fsdp2", "config": "ddp.yaml"}, "give either strategy"),
        ({"strategy": "fsdp3"}, "strategy: Input should be 'ddp', 'fsdp1' or 'fsdp2', got 'fsdp3'"),
        (
            {"strategy": "fsdp2", "sharding_strategy": "NO_SHARD"},
            "sharding_strategy='NO_SHARD' cannot be combined with strategy 'fsdp2', which allows "
            "reshard_after_forward, cpu_offload, dp_replicate_size, dp_shard_size, cp_size, tp_size",
        ),
        (
            {"strategy": "ddp", "cpu_offload": True},
            "cpu_offload=True cannot be combined with strategy 'ddp', which allows float8",
        ),
        ({"strategy": "fsdp1", "dp_shard_size": 2}, f"dp_shard_size=2 cannot be combined {OF_FSDP1}"),
        ({"strategy": "fsdp1", "float8": "rowwise"}, f"float8='rowwise' cannot be combined {OF_FSDP1}"),
        (
            {"config": "ddp.yaml", "reshard_after_forward": False},
            "reshard_after_forward=False cannot be combined with a configuration file, which allows",
        ),
        ({"strategy": "fsdp1", "sharding_strategy": "ALL"}, "strategy: Input should be 'FULL_SHARD'"),
        ({"strategy": "fsdp1", "backward_prefetch": "PRE"}, "prefetch: Input should be 'BACKWARD_PRE'"),
        *(({"strategy": "fsdp2", **degrees}, said) for degrees, said in DEGREES),
    ],
    Lightning: [
        (options, "Options of lightning: strategy, sharding_strategy")
        for options in ({}, {"strategy": "deepspeed"}, {"strategy": "ddp", "precision": 16})
    ],
}


@pytest.mark.parametrize(
    ("kind", "options", "said"), [(kind, *entry) for kind, entries in BAD.items() for entry in entries]
)
def test_bad_options_list_what_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Framework], options: dict[str, Any], said: str
) -> None:
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CaseError, FileError)) as caught:
        make_case(framework={"name": kind.name, **options})
    assert said in str(caught.value)
    if kind is not Lightning:  # only the mapping of the arguments sets these options
        with pytest.raises((CaseError, FileError), match=re.escape(said)):
            kind(**options)


@pytest.mark.parametrize(
    ("framework", "slug"),
    [
        (BY_DDP, "accelerate-ddp"),
        (BY_FSDP.replace(sharding_strategy="NO_SHARD"), "accelerate-fsdp1-no_shard"),
        (BY_FSDP2.replace(reshard_after_forward=False), "accelerate-fsdp2-no_reshard_after_forward"),
        (Trainer(), "trainer"),
        (Trainer(fsdp=" full_shard  auto_wrap"), "trainer-full_shard auto_wrap"),
        (Trainer(fsdp="no_shard", fsdp_version=1), "trainer-no_shard-fsdp_version1"),
    ],
)
def test_the_slug_names_the_options(framework: Framework, slug: str) -> None:
    assert framework.slug() == slug
