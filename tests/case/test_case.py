import copy
import itertools
import json
import math
import re
from typing import Any

import pytest

from perfsuite.case.case import MAX_ID, Case, CaseFile, LoRA, Topology
from perfsuite.case.catalog import MODELS
from perfsuite.case.hardware import ACCELERATORS
from perfsuite.case.model import Model
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import Framework
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.fake import Fake
from perfsuite.frameworks.fsdp import FSDP
from perfsuite.frameworks.fsdp2 import FSDP2
from perfsuite.frameworks.script import Script
from tests.samples import make_case


def bad(*said: str, **changes: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    return changes, said


def of(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **options}


DPP = "unknown framework 'dpp'. Did you mean 'ddp'? Known: accelerate, ddp,"
STEP = {"sharding_strategy": "FULL"}
AC = "activation_checkpointing: expected 'none', 'full', 'selective-op' or 'every-N', such as 'every-2'"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        bad("model:", "'gpt2-tyni'", "Did you mean 'gpt2-tiny'?", "llama-3.1-8b", model="gpt2-tyni"),
        bad("unknown model 'xyzzy'", "Known: gpt2-tiny", "Model.from_config", model="xyzzy"),
        bad("model:", "Model", "got 3", model=3),
        bad("framework:", DPP, "trainer. For another framework, pip install the package", framework="dpp"),
        bad(DPP, framework=of("dpp")),
        bad("unknown framework 'xyzzy'. Known: accelerate, ddp", framework="xyzzy"),
        bad("framework: give a framework as an object or by its name, got 3", framework=3),
        bad("framework: step: unknown", "of fake: step_ms, noise, memory_mb", framework=of("fake", step=3)),
        bad("step_ms:", "greater than 0", "got -3", framework=of("fake", step_ms=-3)),
        bad("bucket_cap_mb:", "number", "'big'", framework=of("ddp", bucket_cap_mb="big")),
        bad("sharding_strategy: Field required", "Options of fsdp:", framework="fsdp"),
        bad("sharding_strategy:", "'FULL_SHARD'", "got 'FULL'", framework=of("fsdp", **STEP)),
        bad("micro_batch:", "greater than or equal to 1", "got 0", micro_batch=0),
        bad("steps:", "less than or equal to 100000000", steps=10**30),
        bad("learning_rate:", "less than or equal to 1000", learning_rate=1e308),
        bad("seed:", "less than 9223372036854775808", seed=2**63),
        bad("timeout_s:", "less than or equal to 100000000", timeout_s=1e300),
        bad("topology.processes_per_node:", "less than", topology={"processes_per_node": 10**400}),
        bad("topology.nodes:", "less than", topology={"nodes": 10**400, "processes_per_node": 1}),
        bad("step_ms:", "less than or equal to", framework=of("fake", step_ms=math.inf)),
        bad("gradient_accumulation:", "greater than or equal to 1", "got 0", gradient_accumulation=0),
        bad("sequence_length:", "or equal to 2", "got 1", sequence_length=1),
        bad("sequence_length:", "valid integer", "got '64'", sequence_length="64"),
        bad("sequence_length None counts samples instead of tokens", "fake trains", sequence_length=None),
        bad("sequence_length 129", "128 positions of gpt2-tiny", sequence_length=129),
        bad("precision:", "'bf16-mixed', 'fp16-mixed' or 'bf16', got 'tf32'", precision="tf32"),
        bad("precision:", "got 'bf16_mixed' (did you mean 'bf16-mixed'?)", precision="bf16_mixed"),
        bad("lora.rank:", "greater than or equal to 1", "got 0", lora={"rank": 0, "alpha": 1}),
        bad("lora.alpha: Field required", lora={"rank": 1}),
        bad("lora:", "LoRA", "got 16", lora=16),
        bad("lora.targets: ", "targets is", "leave it out", lora={"rank": 1, "alpha": 1, "targets": ""}),
        bad("lora.targets: ", "instead of ''", lora={"rank": 1, "alpha": 1, "targets": ("q", "")}),
        bad("'q(' is not a regular expression", lora={"rank": 1, "alpha": 1, "targets": "q("}),
        bad("'q(' is not a regular", lora={"rank": 1, "alpha": 1, "rank_pattern": {"q(": 1}}),
        bad("lora.alpha_pattern.q: ", "got 0", lora={"rank": 1, "alpha": 1, "alpha_pattern": {"q": 0}}),
        bad(
            "quantization '4bit' needs lora, because quantised",
            "LoRA(rank=16, alpha=32)",
            quantization="4bit",
        ),
        bad("quantization:", "'none', '8bit' or '4bit'", "got 'nf4'", quantization="nf4"),
        bad("attention:", "'sdpa', 'eager' or 'flash_attention_2'", "got 'flash'", attention="flash"),
        *(
            bad(AC, f"got {mode!r}", activation_checkpointing=mode)
            for mode in ("every-0", "every-", "every-2.5", "every-2\n", "All", "")
        ),
        bad("topology.processes_per_node:", "equal to 1", "got 0", topology={"processes_per_node": 0}),
        bad("topology.processes_per_node: Field required", topology={"nodes": 1}),
        bad("unknown hardware 'H-100': did you mean 'h100'?", hardware="H-100"),
        bad("unknown hardware 'h1000'", "cpu, gpu, a10, a100", "h200", "'h100-80gb-sxm'", hardware="h1000"),
        bad("unknown hardware 'H100': did you mean 'h100'? begin with one of cpu", hardware=("cpu", "H100")),
        bad("unknown hardware 'h100-80GBB': the known h100 hardware is h100-80gb", hardware="h100-80GBB"),
        bad("unknown hardware 'gpu-80gb'", "'gpu' is any", hardware="gpu-80gb"),
        bad("micro_batch:", "valid integer", "True", micro_batch=True),
        bad("micro_batch:", "valid integer", "'4'", micro_batch="4"),
        bad("learning_rate:", "finite", learning_rate=math.inf),
        bad("hardware:", "name at least one hardware", "'cpu'", hardware=()),
        bad("learning_rate:", "greater than 0", "got 0", learning_rate=0),
        bad("steps:", "greater than or equal to 10", "got 9", steps=9),
        bad("max_warmup_steps:", "greater than or equal to 2", "got 1", max_warmup_steps=1),
        bad("timeout_s:", "greater than 0", "got 0", timeout_s=0),
        bad("micro_batchs: unknown field (did you mean micro_batch?), got 4", micro_batchs=4),
        bad("xyzzy: unknown field; remove it or correct its name", "got 3", xyzzy=3),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(changes: dict[str, Any], said: tuple[str, ...]) -> None:
    with pytest.raises(CaseError) as caught:
        make_case(**changes)
    message = str(caught.value)
    assert message.startswith("Case: ")
    assert [part for part in said if part not in message] == []
    assert [part for part in ("(whole)", "fake,", ". ,", "., got") if part in message] == []
    with pytest.raises(CaseError):
        make_case().replace(**changes)


def test_case_errors_name_what_is_wrong() -> None:
    with pytest.raises(CaseError, match=r"^Topology: processes_per_node: .*got 0$"):
        Topology(processes_per_node=0)
    values = dict(make_case())
    del values["sequence_length"]
    with pytest.raises(CaseError, match="sequence_length: Field required"):
        Case(**values)


TINY = "gpt2-tiny-s64-b2-fp32"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, f"fake-{TINY}-1x2"),
        ({"hardware": ("h100", "cpu"), "timeout_s": 5}, f"fake-{TINY}-1x2"),
        ({"framework": Fake(step_ms=2.5)}, f"fake-step_ms2.5-{TINY}-1x2"),
        ({"framework": DDP(static_graph=True)}, f"ddp-static_graph-{TINY}-1x2"),
        ({"framework": FSDP2(reshard_after_forward=False)}, f"fsdp2-no_reshard_after_forward-{TINY}-1x2"),
        (
            {
                "model": MODELS["llama-3.1-8b"],
                "framework": FSDP(sharding_strategy="HYBRID_SHARD", shard_group=4, backward_prefetch="none"),
                "sequence_length": 8192,
                "micro_batch": 1,
                "gradient_accumulation": 3,
                "precision": "bf16-mixed",
                "activation_checkpointing": "every-2",
                "attention": "flash_attention_2",
                "compile": True,
                "hardware": ("h100-80gb-sxm", "h200"),
                "topology": Topology(nodes=2, processes_per_node=8),
            },
            "fsdp-hybrid_shard-shard_group4-none-llama-3.1-8b-s8192-b1x3-bf16-mixed-ac_every-2-"
            "flash_attention_2-compile-2x8",
        ),
        (
            {"lora": LoRA(rank=16, alpha=32), "quantization": "4bit"},
            f"fake-{TINY}-lora-rank16-alpha32-4bit-1x2",
        ),
        (
            {"lora": LoRA(rank=8, alpha=8, targets=("q_proj", "v_proj"))},
            f"fake-{TINY}-lora-rank8-alpha8-targetsq_projxv_proj-1x2",
        ),
        (
            {"lora": LoRA(rank=8, alpha=8, targets="all-linear", rank_pattern={"b": 2, "a": 1})},
            f"fake-{TINY}-lora-rank8-alpha8-all-linear-rank_patterna1xb2-1x2",
        ),
        (
            {"learning_rate": 1e-5, "seed": 4, "max_warmup_steps": 10, "steps": 70},
            f"fake-{TINY}-learning_rate1e-05-seed4-max_warmup_steps10-steps70-1x2",
        ),
    ],
)
def test_ids_stay_as_they_are(changes: dict[str, Any], expected: str) -> None:
    """The files of accepted baselines are named after ids.

    If ids changed, every user would lose the history.
    """
    assert make_case(**{"max_warmup_steps": 20, "steps": 50, **changes}).id == expected


FRAMEWORKS: list[Framework] = [
    Fake(),
    Fake(noise=0.02),
    DDP(),
    DDP(bucket_cap_mb=50),
    DDP(gradient_as_bucket_view=True, static_graph=True),
    FSDP(sharding_strategy="FULL_SHARD"),
    FSDP(sharding_strategy="FULL_SHARD", cpu_offload=True),
    FSDP(sharding_strategy="SHARD_GRAD_OP", sync_each_micro_batch=False),
    FSDP2(),
    FSDP2(shard_group=2),
]
VARIANTS: dict[str, list[Any]] = {
    "framework": FRAMEWORKS,
    "model": [MODELS["gpt2-tiny"], MODELS["llama-tiny"]],
    "sequence_length": [16, 64],
    "micro_batch": [1, 11],
    "gradient_accumulation": [1, 2],
    "precision": ["fp32", "bf16"],
    "activation_checkpointing": ["none", "full", "every-11"],
    "attention": ["sdpa", "eager"],
    "compile": [False, True],
    "topology": [Topology(processes_per_node=2), Topology(nodes=2, processes_per_node=1)],
}


def test_ids_are_unique_and_fit_for_a_file_name() -> None:
    combinations = itertools.product(*VARIANTS.values())
    ids = [make_case(**dict(zip(VARIANTS, values, strict=True))).id for values in combinations]
    assert len(set(ids)) == len(ids) == 7680
    assert [name for name in ids if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}", name)] == []


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("seed", 1, -1),
        ("steps", 11, 110),
        ("max_warmup_steps", 2, 12),
        ("learning_rate", 1e-4, 1e-5),
        ("learning_rate", 0.0012345678, 0.0012345679),
        ("lora", None, LoRA(rank=1, alpha=1)),
        ("lora", LoRA(rank=1, alpha=11), LoRA(rank=11, alpha=1)),
        ("lora", LoRA(rank=1, alpha=1), LoRA(rank=1, alpha=1, targets=("q_proj",))),
        ("framework", Fake(step_ms=12345.678), Fake(step_ms=12345.679)),
    ],
)
def test_ids_differ_where_one_field_differs(field: str, one: object, other: object) -> None:
    assert make_case(**{field: one}).id != make_case(**{field: other}).id


def test_a_case_with_adapters_can_be_a_key() -> None:
    case = make_case(lora=LoRA(rank=1, alpha=1, rank_pattern={"q_proj": 2}))
    assert {case: 1}[case.replace(seed=case.seed)] == 1


@pytest.fixture
def long_ids() -> dict[str, str]:
    """Return ids that would be longer than a file name can be, by a name for the case."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    case = make_case(
        model=MODELS["llama-3.1-8b"],
        framework=FSDP2(reshard_after_forward=False, sync_each_micro_batch=False, tensor_parallel=2),
        lora=LoRA(rank=16, alpha=32, targets=targets),
        topology=Topology(nodes=2, processes_per_node=8),
        sequence_length=4096,
        gradient_accumulation=16,
        precision="bf16-mixed",
        activation_checkpointing="selective-op",
        attention="flash_attention_2",
        compile=True,
    )
    larger = case.replace(topology=Topology(nodes=16, processes_per_node=8))
    return {"usual": case.id, "more steps": case.replace(steps=1001).id, "more nodes": larger.id}


def test_long_ids_are_cut_and_stay_distinct(long_ids: dict[str, str]) -> None:
    assert [len(name) for name in long_ids.values()] == [MAX_ID] * 3
    assert len(set(long_ids.values())) == 3


@pytest.mark.parametrize(
    ("name", "topology"), [("usual", "2x8"), ("more steps", "2x8"), ("more nodes", "16x8")]
)
def test_a_long_id_ends_with_a_digest_and_the_topology(
    long_ids: dict[str, str], name: str, topology: str
) -> None:
    assert re.fullmatch(rf"fsdp2-no_reshard_after_forward-.*-[0-9a-f]{{12}}-{topology}", long_ids[name])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"framework": framework} for framework in FRAMEWORKS),
        {"lora": LoRA(rank=8, alpha=16, targets=("q_proj",)), "quantization": "8bit"},
        {"model": MODELS["llama-3.1-8b"], "hardware": ("h100-80gb-sxm", "cpu"), "compile": True},
        {"model": Model(name="mine", config={"model_type": "llama", "dropout": [0.1, None]})},
    ],
)
def test_json_reads_back_as_the_same_case(changes: dict[str, Any]) -> None:
    case = make_case(**changes)
    back = Case.model_validate_json(case.model_dump_json())
    assert back == case
    assert type(back.framework) is type(case.framework)
    assert back.id == case.id
    asked = CaseFile(case=case, device="cpu")
    assert CaseFile.model_validate_json(asked.model_dump_json()) == asked


def test_accepts_names_for_model_and_hardware() -> None:
    case = make_case(model="llama-tiny", framework="ddp", hardware="cpu")
    assert (case.model, case.framework, case.hardware) == (MODELS["llama-tiny"], DDP(), ("cpu",))
    assert (case.total_steps, case.topology.world_size) == (25, 2)
    assert make_case(framework={"name": "fake", "noise": 0.2}).framework == Fake(noise=0.2)


@pytest.mark.parametrize(
    ("hardware", "markers"),
    [
        ("cpu", ["cpu"]),
        (("h100-80gb-sxm", "h100-94gb-nvl"), ["h100"]),
        (("v100", "cpu", "a100-80gb"), ["a100", "cpu", "v100"]),
        ("gpu", sorted(set(ACCELERATORS) - {"cpu"})),
    ],
)
def test_a_case_has_the_markers_of_its_hardware(hardware: Any, markers: list[str]) -> None:
    assert make_case(hardware=hardware).markers == markers


IMAGES = make_case(framework=Script(path="a.py"), model=Model.named("resnet"), sequence_length=None)


def test_a_script_may_count_samples() -> None:
    assert IMAGES.id == f"{IMAGES.framework.slug()}-resnet-b2-fp32-max_warmup_steps5-steps20-1x2"
    assert (IMAGES.unit, IMAGES.sample_length) == ("samples", 1)
    assert IMAGES.parameters["sequence_length"] == "none"
    assert Case.model_validate_json(IMAGES.model_dump_json()) == IMAGES


def test_a_script_may_count_tokens_of_any_length() -> None:
    text = IMAGES.replace(sequence_length=10**6)  # any length is allowed, since the model has no positions
    assert (text.unit, text.sample_length) == ("tokens", 10**6)
    assert "-s1000000-b2-" in text.id


def test_a_case_can_be_copied_and_put_in_a_set() -> None:
    case = make_case()
    assert {case, copy.deepcopy(case), case.replace(micro_batch=99)} == {case, case.replace(micro_batch=99)}


def test_omits_defaults_from_launch_files() -> None:
    """An arm can have an older perfsuite. Older versions refuse unknown fields."""
    usual = CaseFile(case=make_case(), device="cpu")
    assert set(json.loads(usual.as_json())) == {"schema_version", "case", "device"}
    other = usual.replace(preflight=True, counts=False, inject="hang")
    assert CaseFile.model_validate_json(other.as_json()) == other
