import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Accelerate, Topology
from perfsuite.case.case import CaseFile
from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.common.accelerate_config import LaunchConfig
from tests.frameworks.test_base import MIXED, measured, observed
from tests.samples import make_case, make_gpu_machine, make_machine

FSDP1 = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""A file as `accelerate config` wrote it before FSDP2."""

FSDP2 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_version: 2
num_processes: 2
"""
CPU = make_machine()
GPUS = make_gpu_machine()
EIGHT = Topology(processes_per_node=8)
ACROSS = Topology(nodes=2, processes_per_node=1)
AGREES = make_case(precision="bf16-mixed", activation_checkpointing="full")


def read(directory: Path, text: str) -> LaunchConfig:
    file = directory / "mine.yaml"
    file.write_text(text)
    return LaunchConfig.read(file)


@pytest.mark.parametrize(
    ("strategy", "sharding"),
    [
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", "SHARD_GRAD_OP"),
        ("fsdp_sharding_strategy: hybrid_shard", "HYBRID_SHARD"),
        ("fsdp_reshard_after_forward: SHARD_GRAD_OP", "SHARD_GRAD_OP"),
        ("fsdp_offload_params: false", "FULL_SHARD"),
    ],
)
def test_reads_every_spelling_of_a_strategy(tmp_path: Path, strategy: str, sharding: str) -> None:
    text = FSDP1.replace("fsdp_sharding_strategy: SHARD_GRAD_OP", strategy)
    config = read(tmp_path, text)
    assert (config.file, config.text) == ("mine.yaml", text)
    fsdp = config.fields.fsdp_config
    assert fsdp is not None
    assert (fsdp.fsdp_version, fsdp.sharding) == (1, sharding)
    assert fsdp.fsdp_activation_checkpointing


PREFETCH = "fsdp_forward_prefetch: false"
TYPE = "distributed_type"
TWO = f"{TYPE}: FSDP\nnum_processes: 2"
IS_CPU = f"{TYPE}: MULTI_GPU\nnum_processes: 2\nuse_cpu: true"
RESHARD = "fsdp_reshard_after_forward"
IN_FSDP2 = FSDP2.replace("forward: true", "forward: FULL_SHARD")
PARALLELISM = "parallelism_config: {parallelism_config_tp_size: 2}"


@pytest.mark.parametrize(
    ("change", "to", "said"),
    [
        ("debug:", "debugg:", "debugg: unknown field.*got False.* Known fields: distributed_type, num_proc"),
        ("fsdp_use_orig", "fsdp_orig", "fsdp_config.fsdp_orig_params: unknown field.*fsdp_use_orig_params"),
        ("SHARD_GRAD_OP", "SHARD", "fsdp_config.fsdp_sharding_strategy: .*'HYBRID_SHARD'.*got 'SHARD'"),
        ("SHARD_GRAD_OP", "1", "fsdp_config.fsdp_sharding_strategy: .*'HYBRID_SHARD'.*got 1"),
        ("SHARD_GRAD_OP", "true", "fsdp_config.fsdp_sharding_strategy: .*'HYBRID_SHARD'.*got True"),
        ("type: FSDP", "type: DEEPSPEED", "distributed_type: .*'MULTI_GPU'.*'FSDP'.*got 'DEEPSPEED'"),
        ("type: FSDP", "type: MULTI_GPU", "distributed_type is MULTI_GPU, but fsdp_config is given"),
        ("num_processes: 2", "num_processes: two", "num_processes: .*valid integer.*got 'two'"),
        ("num_processes: 2\n", "", "num_processes: Field required"),
        ("precision: bf16", "precision: no", "mixed_precision: .*'no' or 'bf16'.*got False"),
        ("precision: bf16", "precision: fp8", "mixed_precision: .*'no' or 'bf16'.*got 'fp8'"),
        (
            "env: []",
            "env: [a]",
            "tpu_env: perfsuite supports only accelerate's DDP and FSDP; remove",
        ),
        ("tpu_env: []", PARALLELISM, r"config: give Accelerate\(strategy='fsdp2', dp_shard_size=\.\.\., tp_"),
        ("tpu_env: []", "gpu_ids: 0,1", "gpu_ids: .*'all'.*got '0,1'"),
        ("tpu_env: []", "gradient_accumulation_steps: 2", "gradient_accumulation_steps: unknown field"),
        (PREFETCH, "fsdp_version: 2", "is an option of FSDP1, which FSDP2.*remove it.*`accelerate to-fsdp2`"),
        (PREFETCH, "fsdp_version: 3", "fsdp_config.fsdp_version: Input should be 1 or 2, got 3"),
        (PREFETCH, f"{RESHARD}: FULL_SHARD", f"SHARD_GRAD_OP, but {RESHARD}.*FULL_SHARD; keep one of them"),
        (PREFETCH, f"{RESHARD}: false", r"must be one of FULL_SHARD,.*FSDP1 \(fsdp_version: 1\), not false"),
        (FSDP1, "[1, 2]", r"\(whole\): .*a mapping or a.*got \[1, 2\]"),
        (FSDP1, "", r"\(whole\): .*a mapping or a.*got None"),
        (FSDP1, TWO, f"{TYPE} is FSDP, but fsdp_config is missing"),
        (FSDP1, IS_CPU, f"use_cpu is true, but {TYPE} is MULTI_GPU"),
        (FSDP1, IN_FSDP2, f"{RESHARD} must be true or false for FSDP2.*not FULL_SHARD"),
    ],
)
def test_bad_file_names_field_value_and_choices(tmp_path: Path, change: str, to: str, said: str) -> None:
    assert change in FSDP1
    file = re.escape(str(tmp_path / "mine.yaml"))
    with pytest.raises(FileError, match=f"(?s)^{file}: .*{said}"):
        read(tmp_path, FSDP1.replace(change, to, 1))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(FSDP1)
    return file


def test_a_case_carries_its_file(config: Path) -> None:
    """When the case is read back, it is unchanged, even though the file is gone."""
    case = AGREES.replace(framework=Accelerate(config=config))
    assert case.id.startswith("accelerate-mine-gpt2-tiny-")
    config.unlink()
    text = CaseFile(case=case, device="cpu").model_dump_json()
    assert CaseFile.model_validate_json(text).case == case


RECOMPUTED = "fsdp_activation_checkpointing is true, but activation_checkpointing of the case is 'none'"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"topology": EIGHT}, "num_processes is 2, but the topology of the case needs 8"),
        ({"topology": ACROSS}, "num_machines is 1, but the topology of the case needs 2"),
        ({"precision": "fp32"}, "mixed_precision is 'bf16', but precision 'fp32' of the case needs 'no'"),
        ({"activation_checkpointing": "none"}, f"{RECOMPUTED}; it must be 'full'"),
    ],
)
def test_contradiction_is_known_beforehand(config: Path, changes: dict[str, Any], said: str | None) -> None:
    expectation = nullcontext() if said is None else pytest.raises(CaseError, match=rf"^mine\.yaml: {said}$")
    with expectation:
        Accelerate(config=config).check(AGREES.replace(**changes))


def test_a_file_for_cpus_is_not_for_gpus(config: Path) -> None:
    assert Accelerate(config=config).unsupported(AGREES, CPU) is None
    config.write_text(FSDP1.replace("use_cpu: false", "use_cpu: true"))
    on_cpu = Accelerate(config=config)
    assert on_cpu.unsupported(AGREES, CPU) is None
    reason = on_cpu.unsupported(AGREES, GPUS)
    assert reason == "mine.yaml: use_cpu is true, but this machine trains on GPUs"


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        (Accelerate(strategy="ddp"), {"wrapper": "DistributedDataParallel"}),
        (Accelerate(strategy="fsdp2"), {"wrapper": "FSDPModule", "sharding": "Shard(0)"}),
    ],
    ids=["ddp", "fsdp2"],
)
def test_a_case_expects_its_wrapper_and_sharding(framework: Accelerate, expected: dict[str, str]) -> None:
    assert framework.expected(make_case()) == expected


def test_hybrid_fsdp1_expects_its_strategy() -> None:
    zero2 = Accelerate(strategy="fsdp1", sharding_strategy="HYBRID_SHARD_ZERO2")
    assert zero2.expected(make_case())["sharding"] == "_HYBRID_SHARD_ZERO2"


def test_hybrid_fsdp2_expects_its_mesh() -> None:
    hybrid = Accelerate(strategy="fsdp2", dp_replicate_size=2, dp_shard_size=4).expected(make_case())
    assert hybrid["mesh"] == "dp_replicate 2 x dp_shard_cp 4"
    assert hybrid["sharding"] == "Replicate, Shard(0)"


def test_a_file_expects_its_wrapper_and_sharding(config: Path) -> None:
    sharded = {"wrapper": "FullyShardedDataParallel", "sharding": "SHARD_GRAD_OP"}
    assert Accelerate(config=config).expected(make_case()) == sharded


@pytest.mark.nightly
def test_a_users_own_file_runs(tmp_path: Path, config: Path) -> None:
    small = MIXED.replace(micro_batch=1, gradient_accumulation=2, activation_checkpointing="full")
    run = measured(small.replace(framework=Accelerate(config=config)), tmp_path / "run")
    settings = observed(run).settings
    assert settings["sharding"] == "SHARD_GRAD_OP"
    assert settings["recomputing_blocks"] == "4 of 4"
    assert settings["reduce_dtype"] == "torch.bfloat16"
    assert settings["forced"].startswith("FSDP on a CPU")
    assert len(settings["accelerate_config"]) == 16
    assert observed(run).environment["accelerate"]
