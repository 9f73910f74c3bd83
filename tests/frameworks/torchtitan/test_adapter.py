from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case, Model, Topology, TorchTitan, documents
from perfsuite.case import torch_build
from perfsuite.case.case import LoRA
from perfsuite.launch.requirements import unsupported
from perfsuite.node.machine import detect, detect_cpu
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from tests.frameworks.test_base import measured, observed
from tests.frameworks.torchtitan.samples import LLAMAS, MARKS, SMALL, changed
from tests.samples import make_gpu_machine, make_machine

pytestmark = MARKS


REPLICATED = SMALL.replace(framework=TorchTitan(data_parallel_replicate=2), gradient_accumulation=2)
SPLIT = SMALL.replace(framework=TorchTitan(tensor_parallel=2), precision="bf16")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("case", "mesh", "recomputing"),
    [
        pytest.param(
            REPLICATED.replace(activation_checkpointing="selective-op", precision="bf16-mixed"),
            "dp_replicate 2 x fsdp 1",
            "4 of 4",
            marks=pytest.mark.smoke("torchtitan"),
        ),
        (SPLIT.replace(activation_checkpointing="every-2"), "fsdp 1 x tp 2", "2 of 4"),
    ],
    ids=["replicated", "split"],
)
def test_options_run_as_asked_for(tmp_path: Path, case: Case, mesh: str, recomputing: str) -> None:
    """The worker itself refuses what is not as asked for; this checks that it looked."""
    result = measured(case, tmp_path)
    settings = observed(result).settings
    assert (settings["mesh"], settings["recomputing_blocks"]) == (mesh, recomputing)
    assert settings["compute_dtype"] == "bfloat16"
    assert settings["parameter_dtype"] == ("bfloat16" if case.precision == "bf16" else "float32")
    assert settings["optimizer"] == "AdamW"
    assert settings["attention"] == "sdpa"
    assert settings["spmd_backend"] == "partial_dtensor"
    assert "torchtitan.tools.utils.device_module" in settings["patched"]
    assert observed(result).environment["torchtitan"] == "0.3.0"
    assert set(result.device_probe) == {"matmul_tflops", "copy_gb_s", "all_reduce_gb_s"}

    f = result.figures
    tokens = 2 * 32 * (1 if "tp 2" in mesh else 2 * 2)
    assert f.tokens_per_s == pytest.approx(tokens / float(f.step_s_p50 or 0))
    assert f.own_tokens_per_s is not None
    assert f.own_tokens_per_s > 0
    assert float(f.loss_last or 0) < float(f.loss_first or 0)
    for rank in range(2):
        report = documents.read(RunDir(tmp_path).rank(rank), RankReport)
        assert abs(report.wall_s - sum(report.step_s)) < 1, "its two seconds at the end are not ours"


OF_MATRICES = "Shard(0), Replicate and Shard(0), Shard(1) and StridedShard(0), Shard(0)"


@pytest.mark.parametrize(
    ("framework", "mesh", "sharding"),
    [
        (TorchTitan(), "fsdp 8", "Shard(0)"),
        (TorchTitan(data_parallel_replicate=2), "dp_replicate 2 x fsdp 4", "Replicate, Shard(0)"),
        (TorchTitan(tensor_parallel=4), "fsdp 2 x tp 4", OF_MATRICES),
    ],
    ids=["fsdp", "hsdp", "tp"],
)
def test_what_must_be_observed(framework: TorchTitan, mesh: str, sharding: str) -> None:
    case = SMALL.replace(framework=framework, topology=Topology(processes_per_node=8))
    told = {"wrapper": "FSDPModule", "mesh": mesh, "sharding": sharding}
    assert framework.expected(case) == {**told, "cuda_graphs": "no"}
    graphs = framework.replace(disable_cuda_graphs=False)
    assert graphs.expected(case) == {**told, "cuda_graphs": "yes"}


def test_cuda_graphs_need_a_gpu_and_are_not_run_dry() -> None:
    case = SMALL.replace(framework=TorchTitan(disable_cuda_graphs=False))
    assert unsupported(case, detect_cpu("no GPU")) == (
        "disable_cuda_graphs=False asks for CUDA graphs, which a CPU does not have"
    )
    assert unsupported(case.replace(hardware=("h100",)), make_gpu_machine()) is None
    assert TorchTitan(disable_cuda_graphs=False).dry(case).impossible == (
        "a dry run captures no CUDA graph: leave disable_cuda_graphs as it is"
    )


TP2: dict[str, Any] = {"framework": TorchTitan(tensor_parallel=2)}
TP6 = {"framework": TorchTitan(tensor_parallel=6), "topology": Topology(processes_per_node=6)}
BY_4 = {"framework": TorchTitan(tensor_parallel=2, data_parallel_replicate=2)}
MAMBA = Model.from_config({"model_type": "mamba"}, name="mamba-tiny")
YARN, ROPE = {"type": "yarn", "factor": 2.0}, {"rope_type": "llama3", "factor": 8.0}
OWN, SPLITS = "torchtitan's llama3", "splits a sequence into {} equal parts, which sequence_length={}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"model": name}, None) for name in LLAMAS),
        ({**TP2, "head_dim": 32, "rope_scaling": ROPE}, None),
        ({"model": "gpt2-tiny"}, f"{OWN} builds Llama models, gpt2-tiny is a gpt2"),
        ({"model": MAMBA}, f"{OWN} builds Llama models, mamba-tiny is a mamba"),
        ({"attention_bias": True}, f"{OWN} has attention_bias=False only, changed has True"),
        ({"hidden_act": "gelu"}, f"{OWN} has hidden_act='silu' only, changed has 'gelu'"),
        ({"head_dim": 64}, f"{OWN} has head_dim=32 only, changed has 64"),
        ({"rope_scaling": YARN}, f"{OWN} knows rope_type default and llama3, changed has 'yarn'"),
        ({**TP2, "num_key_value_heads": 1}, "tensor_parallel=2 must divide num_key_value_heads, 1"),
        (
            {**TP2, "num_attention_heads": 3, "hidden_size": 96},
            "tensor_parallel=2 must divide num_attention_",
        ),
        ({"precision": "fp16-mixed"}, "torchtitan takes precision 'fp32' or 'bf16-mixed' or 'bf16', and"),
        ({"lora": LoRA(rank=4, alpha=8)}, "torchtitan knows no lora"),
        ({"attention": "eager"}, "torchtitan takes attention 'sdpa', and the case asks for 'eager'"),
        ({"sequence_length": 20}, f"torchtitan's loss in chunks {SPLITS.format(8, 20)}"),
        (TP6, f"torchtitan's tensor_parallel {SPLITS.format(6, 32)}"),
        (BY_4, "tensor_parallel=2 times data_parallel_replicate=2 must divide the number of processes, 2"),
    ],
)
def test_what_cannot_run_is_known_beforehand(changes: dict[str, Any], reason: str | None) -> None:
    """`changes`: fields of the case, and of the configuration of llama-tiny."""
    case = {name: value for name, value in changes.items() if name in Case.model_fields}
    if shape := {name: value for name, value in changes.items() if name not in case}:
        case["model"] = changed(**shape)
    said = unsupported(SMALL.replace(**case), make_machine(devices=8))
    assert said is None if reason is None else str(said).startswith(reason)


def test_an_older_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.11.0+cu130", "cuda": "13.0"})
    reason = "torchtitan 0.3 needs torch 2.13 or newer, this is 2.11.0+cu130, built for CUDA 13.0"
    assert unsupported(SMALL, detect()) == reason
