import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from perfsuite import Case, Topology, TorchTitan, documents
from perfsuite.launch.requirements import unsupported
from perfsuite.node.machine import detect, detect_cpu
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.clock.profiling import ProfileTaken
from tests.fake_torch import install_torch
from tests.frameworks.test_base import measured, observed
from tests.frameworks.torchtitan.samples import MARKS, SMALL
from tests.samples import known, make_gpu_machine

pytestmark = MARKS


MIXED = SMALL.replace(precision="bf16-mixed", activation_checkpointing="selective-op")
REPLICATED = MIXED.replace(framework=TorchTitan(data_parallel_replicate=2), gradient_accumulation=2)
SPLIT = SMALL.replace(framework=TorchTitan(tensor_parallel=2), precision="bf16")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("case", "mesh", "recomputing"),
    [
        pytest.param(REPLICATED, "dp_replicate 2 x fsdp 1", "4 of 4", marks=pytest.mark.smoke("torchtitan")),
        pytest.param(
            SPLIT.replace(activation_checkpointing="every-2"),
            "fsdp 1 x tp 2",
            "2 of 4",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["replicated", "split"],
)
def test_options_take_effect(tmp_path: Path, case: Case, mesh: str, recomputing: str) -> None:
    """The worker refuses settings that differ from the case. This test checks that it observes them."""
    result = measured(case, tmp_path)
    settings = observed(result).settings
    expected = {
        "mesh": mesh,
        "recomputing_blocks": recomputing,
        "compute_dtype": "bfloat16",
        "parameter_dtype": "bfloat16" if case.precision == "bf16" else "float32",
        "optimizer": "AdamW",
        "attention": "sdpa",
        "spmd_backend": "partial_dtensor",
    }
    assert {name: settings[name] for name in expected} == expected
    assert "torchtitan.tools.utils.device_module" in settings["patched"]
    assert observed(result).environment["torchtitan"] == "0.3.0"
    check_figures(result, tokens=2 * 32 * (1 if "tp 2" in mesh else 2 * 2))
    assert max(unmeasured_s(RunDir(tmp_path).rank(rank)) for rank in range(2)) < 1, (
        "torchtitan's two seconds at the end are not measured"
    )


def check_figures(result: Run, *, tokens: int) -> None:
    """Check that the launch learnt, and that its speed is that of its median step."""
    figures = result.figures
    assert set(result.device_probe) == {"matmul_tflops", "copy_gb_s", "all_reduce_gb_s"}
    assert figures.tokens_per_s == pytest.approx(tokens / float(figures.step_s_p50 or 0))
    assert known(figures.own_tokens_per_s) > 0
    assert float(figures.loss_last or 0) < float(figures.loss_first or 0)


def unmeasured_s(file: Path) -> float:
    """Return by how much the measured time of a rank differs from the sum of its steps."""
    report = documents.read(file, RankReport)
    return abs(report.wall_s - sum(report.step_s))


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
def test_a_case_expects_its_mesh_and_sharding(framework: TorchTitan, mesh: str, sharding: str) -> None:
    case = SMALL.replace(framework=framework, topology=Topology(processes_per_node=8))
    settings = {"wrapper": "FSDPModule", "mesh": mesh, "sharding": sharding}
    assert framework.expected(case) == {**settings, "cuda_graphs": "no"}
    graphs = framework.replace(disable_cuda_graphs=False)
    assert graphs.expected(case) == {**settings, "cuda_graphs": "yes"}


def test_cuda_graphs_need_a_gpu_and_no_dry_run() -> None:
    case = SMALL.replace(framework=TorchTitan(disable_cuda_graphs=False))
    assert unsupported(case, detect_cpu("no GPU")) == (
        "disable_cuda_graphs=False uses CUDA graphs, which need a GPU"
    )
    assert unsupported(case.replace(hardware=("h100",)), make_gpu_machine()) is None
    assert TorchTitan(disable_cuda_graphs=False).dry(case).impossible == (
        "CUDA graphs cannot be captured: remove disable_cuda_graphs=False"
    )


SPELLINGS = pytest.mark.parametrize("hyphen", ["_", "-"])


@SPELLINGS
@pytest.mark.parametrize(("degree", "is_refused"), [(1, False), (2, True), (16, True)])
def test_context_parallelism_needs_a_gpu(degree: int, is_refused: bool, hyphen: str) -> None:
    overrides = (f"--parallelism.{'context_parallel_degree'.replace('_', hyphen)}={degree}",)
    titan = TorchTitan(module="llama3", config="llama3_debugmodel", overrides=overrides)
    case = SMALL.replace(framework=titan)
    reason = unsupported(case, detect_cpu("no GPU"))
    assert (reason is not None and "context parallelism needs a GPU" in reason) == is_refused
    assert "context" not in str(unsupported(case.replace(hardware=("h100",)), make_gpu_machine()))


@SPELLINGS
def test_ranks_differ_in_a_pipeline(hyphen: str) -> None:
    option = f"--parallelism.{'pipeline_parallel_degree'.replace('_', hyphen)}"
    for overrides in ((f"{option}=2",), (option, "2")):
        titan = TorchTitan(module="llama3", config="llama3_debugmodel", overrides=overrides)
        assert known(titan.dry(SMALL)).ranks_differ


def test_an_older_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_torch(tmp_path, monkeypatch, version="2.11.0+cu130", cuda="13.0")
    reason = "torchtitan 0.3 needs torch 2.13 or newer, but this is 2.11.0+cu130, built for CUDA 13.0"
    assert unsupported(SMALL, detect()) == reason


@pytest.mark.parametrize("is_profiled", [False, True])
def test_closes_the_trainer_before_the_group_ends(monkeypatch: pytest.MonkeyPatch, is_profiled: bool) -> None:
    """While CUDA graphs with NCCL's collectives exist, destroying the process group waits for them."""
    done: list[str] = []

    class Trainer(Mock):
        def train(self) -> None:
            done.append("train")
            if is_profiled:
                raise ProfileTaken

        def losses(self) -> list[float]:
            done.append("losses")
            return [1.0]

        def close(self) -> None:
            done.append("close")

    module = "perfsuite.frameworks.torchtitan.trainer"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(CaseTrainer=lambda case, clock: Trainer()))
    workload = TorchTitan().build(SMALL, Mock(world_size=1), Mock())
    with pytest.raises(ProfileTaken) if is_profiled else contextlib.nullcontext():
        workload.run(3)
    assert done == (["train", "close"] if is_profiled else ["train", "losses", "close"])
