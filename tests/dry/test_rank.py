"""Test that a dry run on fake CPU tensors does what a real launch does, for every framework."""

from pathlib import Path

import pytest

from perfsuite import DDP, FSDP2, Accelerate, Case, LoRA, Topology, Trainer
from perfsuite.analysis.step_time.streams import reported_step
from perfsuite.dry.driver import NO_BF16_ROOFLINE
from perfsuite.launch.arm import Arm
from perfsuite.measure import Launching, launch_once
from perfsuite.node.machine import detect_cpu
from perfsuite.results import device_log_file
from perfsuite.results.device_log import Communicate
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.counting.flops import count
from tests.dry.runs import passed
from tests.dry.twins import LATER, check_ranks, check_twin
from tests.frameworks.test_base import COUNTED, llama_tiny, measured, observed
from tests.samples import known

TWINS = [
    "ddp-llama-tiny-s64-b4-fp32-1x2",
    f"ddp-llama-tiny-s128-b4-bf16-mixed-{LATER}",
    f"ddp-llama-tiny-s128-b4-fp32-lora-rank16-alpha32-{LATER}",
    "fsdp-full_shard-llama-tiny-s64-b4-fp32-1x2",
    "fsdp-shard_grad_op-gpt2-tiny-s128-b4-fp32-1x2",
    f"fsdp2-llama-tiny-s64-b2-fp32-ac_selective-op-{LATER}",
    f"fsdp2-tensor_parallel2-llama-tiny-s64-b4-fp32-ac_full-{LATER}",
    f"accelerate-ddp-gpt2-tiny-s128-b4-fp32-{LATER}",
    f"accelerate-fsdp_cpu-llama-tiny-s64-b2-fp32-ac_full-{LATER}",
    "accelerate-fsdp2-llama-tiny-s64-b4-fp32-1x2",
    "trainer-full_shard_auto_wrap-llama-tiny-s64-b4-fp32-1x2",
    f"lightning-ddp-gpt2-tiny-s128-b4-fp32-eager-{LATER}",
    "lightning-fsdp2-llama-tiny-s64-b4-fp32-1x2",
]
"""Cases with reviewed counts of real launches."""
NEVER_REVIEWED = COUNTED.replace(
    framework=DDP(bucket_cap_mb=1),
    sequence_length=16,
    gradient_accumulation=2,
    precision="bf16-mixed",
    timeout_s=600,
)
"""Unlike the cases of this repository, this one has small buckets and accumulates gradients."""
SPLITS = Accelerate(strategy="fsdp2", dp_shard_size=2, tp_size=2)

HYBRID = NEVER_REVIEWED.replace(
    framework=FSDP2(shard_group=2), gradient_accumulation=1, topology=Topology(processes_per_node=4)
)
"""There are two groups of two ranks.

Parameters are sharded within each group, and both groups hold the same parameters.
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.smoke if name == TWINS[0] else pytest.mark.nightly)
        for name in TWINS
    ],
)
def test_dry_run_does_what_the_twin_does(name: str, tmp_path: Path) -> None:
    check_twin(name, tmp_path)


ARM = Arm(given={"OMP_NUM_THREADS": "3", "NCCL_ALGO": "Ring"})


@pytest.fixture(scope="module")
def launch_now(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a launch of `NEVER_REVIEWED` in `ARM`."""
    how = Launching(arm=ARM)
    run = launch_once(NEVER_REVIEWED, detect_cpu("a twin"), tmp_path_factory.mktemp("now") / "launch", how)
    assert run.failure is None, run.failure
    return run


@pytest.mark.nightly
def test_a_dry_run_does_what_a_launch_does_now(launch_now: Run, tmp_path: Path) -> None:
    dry = passed(NEVER_REVIEWED, tmp_path)
    check_ranks(dry, launch_now.counts)
    pretended, real = (known(counts[0].counts.python) for counts in (dry.counts, launch_now.counts))
    assert sum(pretended.calls.values()) == pytest.approx(sum(real.calls.values()), rel=0.02)
    assert not [name for name in pretended.functions if "fake_tensor" in name]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        HYBRID,
        HYBRID.replace(framework=SPLITS),
    ],
    ids=["fsdp2, shard_group", "accelerate, tp_size"],
)
def test_dry_mesh_does_what_a_launch_does(case: Case, tmp_path: Path) -> None:
    check_ranks(passed(case, tmp_path / "dry"), measured(case, tmp_path / "real").counts)


@pytest.mark.launch
def test_the_variables_of_an_arm_reach_its_ranks(launch_now: Run) -> None:
    """One variable is the number of threads. On a CPU, the agent sets it, unless the arm sets it."""
    environment = observed(launch_now).environment
    assert {name: environment.get(name) for name in ARM.given} == ARM.given
    assert environment["threads"] == "3"


@pytest.mark.smoke
def test_dry_run_identifies_its_code(hybrid: tuple[Run, RunDir]) -> None:
    observed = hybrid[0].observed
    assert observed is not None
    assert observed.code is not None


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, RunDir]:
    """Return a dry run of hybrid sharding as on a GPU, and its directory."""
    directory = tmp_path_factory.mktemp("hybrid")
    return passed(HYBRID.replace(hardware="h100"), directory), RunDir(directory)


@pytest.mark.smoke
def test_hybrid_sharding_runs_dry_as_on_a_gpu(hybrid: tuple[Run, RunDir]) -> None:
    """Each rank reduces its shard of the gradients in fp32, together with its twin in the other group."""
    run, _ = hybrid
    case = run.case
    assert run.machine.device_name == "NVIDIA H100 80GB HBM3"
    assert {"aten._scaled_dot_product_cudnn_attention", "aten.silu_backward"} <= run.counts[
        0
    ].counts.ops.keys()
    gradients = 4 * count(case.model, case.sample_length).parameters
    for entry in run.counts:
        reduced = {sent.kind: sent for sent in entry.counts.collectives if "reduce" in sent.kind}
        assert {kind: (sent.ranks, sent.apart, sent.bytes) for kind, sent in reduced.items()} == {
            "reduce_scatter": (2, 1, gradients),
            "all_reduce": (2, 2, gradients / 2),
        }


@pytest.mark.smoke
def test_the_log_has_the_order_of_the_framework(hybrid: tuple[Run, RunDir]) -> None:
    """FSDP2 has three streams: for gathers, for reductions among shards, and for reductions among groups.

    In backward, it gathers the parameters of the next layer before the GPU needs them.
    """
    step = reported_step(device_log_file.read(hybrid[1].device_log(0)))
    calls = {entry.kind: entry.stream for entry in step if isinstance(entry, Communicate)}
    assert len({0, *calls.values()}) == 4
    kinds = [entry.kind for entry in step if isinstance(entry, Communicate) and entry.phase == "backward"]
    assert kinds[:3] == ["all_gather", "all_gather", "reduce_scatter"]


@pytest.mark.smoke
def test_a_dry_run_predicts_the_time_of_its_step(hybrid: tuple[Run, RunDir]) -> None:
    facts = known(hybrid[0].dry_facts)
    step = known(facts.expected)
    assert facts.no_expected is None
    assert step.parallelism == "sharded"
    assert step.host_s > step.matmul_s > 0, "a tiny model waits for the host"


@pytest.mark.nightly
def test_ddp_reports_used_parameters_on_a_gpu(tmp_path: Path) -> None:
    """With adapters, the Trainer makes DDP report which parameters are used.

    DDP's reducer sends the map of used parameters through pinned memory.
    """
    adapted = NEVER_REVIEWED.replace(model=llama_tiny("llama-flat", num_hidden_layers=1))
    case = adapted.replace(framework=Trainer(), lora=LoRA(rank=4, alpha=8), hardware="h100")
    on_cpu, on_gpu = (passed(case, tmp_path / str(at), device=at) for at in ("cpu", None))
    assert on_gpu.machine.device == "cuda"
    collectives = on_gpu.counts[0].counts.collectives
    assert collectives == on_cpu.counts[0].counts.collectives
    assert [sent.count for sent in collectives if sent.dtype == "int32"] == [1]


@pytest.mark.nightly
def test_static_graph_runs_dry_as_on_a_gpu(tmp_path: Path) -> None:
    """In the first step, DDP's reducer sends the map of used parameters through pinned memory."""
    shallow = llama_tiny("llama-flat", num_hidden_layers=1)
    case = NEVER_REVIEWED.replace(
        model=shallow, framework=DDP(static_graph=True), gradient_accumulation=1, hardware="h100"
    )
    on_cpu, on_gpu = (passed(case, tmp_path / str(at), device=at) for at in ("cpu", None))
    assert on_gpu.machine.device == "cuda"
    assert on_gpu.counts[0].counts.collectives == on_cpu.counts[0].counts.collectives


@pytest.mark.nightly
def test_bf16_on_a_t4_is_emulated(tmp_path: Path) -> None:
    """torch reports to the Trainer that bf16 is supported. Attention then consists of plain operators."""
    shallow = llama_tiny("llama-flat", num_hidden_layers=1)
    case = NEVER_REVIEWED.replace(model=shallow, framework=Trainer(), precision="bf16", hardware="t4")
    run = passed(case, tmp_path)
    assert run.machine.device_name == "Tesla T4"
    assert "aten._scaled_dot_product_efficient_attention" not in run.counts[0].counts.ops
    facts = known(run.dry_facts)
    assert (known(facts.fit).card, facts.roofline) == (round(14.56 * 2**30), None)
    assert NO_BF16_ROOFLINE in run.notes
