from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite import Accelerate, Topology
from perfsuite.case.case import CaseFile
from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.accelerate.adapter import launcher_environment
from perfsuite.frameworks.common.accelerate_env import clear_environment
from tests.frameworks.accelerate.test_config import AGREES, FSDP1, FSDP2, read
from tests.frameworks.test_base import SMALL, measured
from tests.samples import make_case, make_gpu_machine, make_machine


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(FSDP1)
    return file


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        ({"strategy": "ddp"}, "accelerate-ddp"),
        ({"strategy": "fsdp2", "reshard_after_forward": False}, "accelerate-fsdp2-no_reshard_after_forward"),
        ({"strategy": "fsdp1", "sharding_strategy": "NO_SHARD"}, "accelerate-fsdp1-no_shard"),
    ],
)
def test_the_id_tells_the_options(options: dict[str, Any], slug: str) -> None:
    assert Accelerate(**options).slug() == slug


def test_a_case_carries_its_file(config: Path) -> None:
    """It reads back as it was, though the file is gone."""
    case = AGREES.replace(framework=Accelerate(config=config))
    assert case.id.startswith("accelerate-mine-gpt2-tiny-")
    config.unlink()
    text = CaseFile(case=case, device="cpu").model_dump_json()
    assert CaseFile.model_validate_json(text).case == case


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give either strategy ('ddp', 'fsdp1' or 'fsdp2') or config (the path of an accelerate YAML)"),
        ({"strategy": "fsdp2", "config": "mine.yaml"}, "give either strategy"),
        ({"strategy": "fsdp3"}, "strategy: Input should be 'ddp', 'fsdp1' or 'fsdp2', got 'fsdp3'"),
        (
            {"strategy": "fsdp2", "sharding_strategy": "NO_SHARD"},
            "sharding_strategy='NO_SHARD' does not go with strategy 'fsdp2', which takes "
            "reshard_after_forward and cpu_offload",
        ),
        (
            {"strategy": "ddp", "cpu_offload": True},
            "cpu_offload=True does not go with strategy 'ddp', which takes no options",
        ),
        (
            {"config": "mine.yaml", "reshard_after_forward": False},
            "reshard_after_forward=False does not go with a configuration file, which takes no options",
        ),
        (
            {"strategy": "fsdp1", "sharding_strategy": "ALL"},
            "sharding_strategy: Input should be 'FULL_SHARD'",
        ),
        (
            {"strategy": "fsdp1", "backward_prefetch": "PRE"},
            "backward_prefetch: Input should be 'BACKWARD_PRE'",
        ),
    ],
)
def test_options_that_do_not_go_together(
    config: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(config.parent)
    with pytest.raises(CaseError) as caught:
        Accelerate(**options)
    assert said in str(caught.value)


def test_a_bad_file_is_known_when_the_case_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read none\.yaml"):
        make_case(framework={"name": "accelerate", "config": "none.yaml"})
    with pytest.raises(CaseError, match="give either strategy"):
        make_case(framework="accelerate")


@pytest.mark.parametrize(
    ("framework", "changes", "said"),
    [
        (Accelerate(strategy="ddp"), {}, None),
        (Accelerate(strategy="fsdp2"), {"topology": Topology(processes_per_node=1)}, None),
        (Accelerate(strategy="ddp"), {"topology": Topology(processes_per_node=1)}, "on 1 process: needs 2"),
        (Accelerate(strategy="fsdp1"), {"topology": Topology(processes_per_node=1)}, "on 1 process: needs 2"),
        (Accelerate(strategy="fsdp2", cpu_offload=True), {}, "to a GPU, this machine has none"),
        (
            Accelerate(strategy="fsdp1", sharding_strategy="HYBRID_SHARD"),
            {},
            "HYBRID_SHARD shards among the GPUs of a node, this machine has none",
        ),
    ],
)
def test_what_a_cpu_cannot_run(framework: Accelerate, changes: dict[str, Any], said: str | None) -> None:
    reason = framework.unsupported(make_case(**changes), make_machine())
    assert reason is None if said is None else said in str(reason)


def test_hybrid_sharding_needs_two_nodes() -> None:
    hybrid, gpus = Accelerate(strategy="fsdp1", sharding_strategy="HYBRID_SHARD_ZERO2"), make_gpu_machine()
    one = make_case(framework=hybrid, topology=Topology(processes_per_node=8))
    two = one.replace(topology=Topology(nodes=2, processes_per_node=8))
    assert "8 processes cannot be split so" in str(hybrid.unsupported(one, gpus))
    assert hybrid.unsupported(two, gpus) is None
    assert hybrid.expected(two)["sharding"] == "_HYBRID_SHARD_ZERO2"


def test_a_file_that_contradicts_the_case_is_known_beforehand(config: Path) -> None:
    framework = Accelerate(config=config)
    assert framework.unsupported(AGREES, make_machine()) is None
    framework.check(AGREES)
    with pytest.raises(CaseError, match=r"mine\.yaml: mixed_precision is 'bf16', but precision 'fp32'"):
        framework.check(make_case())
    config.write_text(FSDP1.replace("use_cpu: false", "use_cpu: true"))
    on_cpu = Accelerate(config=config)
    assert on_cpu.unsupported(AGREES, make_machine()) is None
    reason = on_cpu.unsupported(AGREES, make_gpu_machine())
    assert reason == "mine.yaml: use_cpu is true, but this machine trains on its GPUs"
    unknown = AGREES.replace(precision="fp16-mixed")
    assert "'fp16-mixed' is not one of fp32, bf16-mixed, bf16" in str(
        framework.unsupported(unknown, make_machine())
    )


def test_what_must_be_observed(tmp_path: Path, config: Path) -> None:
    case = make_case()
    assert Accelerate(strategy="ddp").expected(case) == {"wrapper": "DistributedDataParallel"}
    assert Accelerate(strategy="fsdp2").expected(case) == {"wrapper": "FSDPModule", "sharding": "Shard(0)"}
    sharded = {"wrapper": "FullyShardedDataParallel", "sharding": "SHARD_GRAD_OP"}
    assert Accelerate(config=config).expected(case) == sharded


def test_the_launchers_own_code_turns_a_file_into_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    clear_environment()
    fsdp1 = launcher_environment(read(tmp_path, FSDP1))
    assert fsdp1["ACCELERATE_USE_FSDP"] == "true"
    assert fsdp1["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert fsdp1["FSDP_VERSION"] == "1"
    assert fsdp1["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
    assert fsdp1["FSDP_USE_ORIG_PARAMS"] == "false"
    assert {key.split("_")[0] for key in fsdp1} == {"ACCELERATE", "FSDP"}
    fsdp2 = launcher_environment(read(tmp_path, FSDP2))
    assert (fsdp2["FSDP_VERSION"], fsdp2["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", "true")
    ddp = launcher_environment(
        read(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    )
    assert ddp["ACCELERATE_USE_CPU"] == "True"
    assert "ACCELERATE_USE_FSDP" not in ddp


@pytest.mark.launch
def test_a_users_own_file_runs(tmp_path: Path, config: Path) -> None:
    case = SMALL.replace(
        framework=Accelerate(config=config),
        precision="bf16-mixed",
        activation_checkpointing="full",
        gradient_accumulation=2,
        micro_batch=1,
    )
    run = measured(case, tmp_path / "run")
    assert run.observed is not None
    settings = run.observed.settings
    assert settings["sharding"] == "SHARD_GRAD_OP"
    assert settings["recomputing_blocks"] == "4 of 4"
    assert settings["reduce_dtype"] == "torch.bfloat16"
    assert settings["forced"].startswith("FSDP on a CPU")
    assert len(settings["accelerate_config"]) == 16
    assert run.observed.environment["accelerate"]
