"""Cases for one GPU with 80 GB or more, in the order of `day.sh`. `pytest tests` does not collect them."""

import json
from pathlib import Path
from typing import Any

import pytest

import perfsuite
from perfsuite import DDP, FSDP, FSDP2, Accelerate, Case, Lightning, LoRA, Model, Script, Topology

pytestmark = pytest.mark.gpu

BASE = Case(
    model="llama-3.2-1b",
    framework=DDP(),
    sequence_length=2048,
    micro_batch=2,
    precision="bf16-mixed",
    topology=Topology(processes_per_node=1),
    hardware="gpu",
    learning_rate=3e-4,
    max_warmup_steps=10,
    steps=20,
    timeout_s=240,
)
TINY = BASE.replace(model="llama-tiny", sequence_length=64, precision="fp32")
SCRIPT = TINY.replace(
    model=Model.named("copy-decoder"),
    micro_batch=4,
    learning_rate=1e-3,
    framework=Script(command=("torchrun", "--nproc-per-node=1", "bench_cases/scripts/train_copy.py")),
)
FRAMEWORKS = [
    DDP(),
    FSDP2(),
    FSDP(sharding_strategy="NO_SHARD"),
    Accelerate(strategy="fsdp2"),
    Lightning(strategy="ddp"),
    Lightning(strategy="fsdp", sharding_strategy="NO_SHARD"),
    Lightning(strategy="fsdp2"),
]
WIDE = [
    *(BASE.replace(framework=framework) for framework in FRAMEWORKS),
    *(BASE.replace(precision=precision) for precision in ("bf16", "fp16-mixed", "fp32")),
    BASE.replace(compile=True),
    BASE.replace(attention="eager"),
    *(
        BASE.replace(framework=FSDP2(), activation_checkpointing=checkpointing)
        for checkpointing in ("full", "every-2", "selective-op")
    ),
    BASE.replace(lora=LoRA(rank=16, alpha=32), learning_rate=1e-3),
]
if hasattr(perfsuite, "Nanotron"):  # its folder can be deleted
    WIDE.append(BASE.replace(framework=perfsuite.Nanotron(), precision="bf16"))
WIDE.append(SCRIPT)


def cases_of_torchtitan() -> list[Case]:
    """Return eager cases, cases with CUDA graphs, and a mixture of experts."""
    graphs = BASE.replace(framework=perfsuite.TorchTitan(disable_cuda_graphs=False))
    experts = TINY.replace(
        model=Model.named("deepseek"),
        framework=perfsuite.TorchTitan(
            module="deepseek_v3",
            config="deepseek_v3_debugmodel",
            overrides=(
                "--training.seq_len=64",
                "--training.local_batch_size=2",
                "--training.steps=40",
                "--debug.moe_force_load_balance",
            ),
        ),
        precision="bf16-mixed",
        activation_checkpointing="selective-op",
        learning_rate=Case.model_fields["learning_rate"].default,
    )
    return [
        BASE.replace(framework=perfsuite.TorchTitan()),
        graphs,
        graphs.replace(micro_batch=1, gradient_accumulation=2),
        experts,
    ]


def cases_of_deepspeed() -> list[Case]:
    """Return a case of ZeRO 1, one of ZeRO 3, and one of ZeRO 3 with the optimizer on the CPU."""
    configs: list[dict[str, Any]] = [
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    ]
    return [BASE.replace(framework=perfsuite.DeepSpeed(config=config)) for config in configs]


ADAPTED = BASE.replace(precision="bf16", lora=LoRA(rank=16, alpha=32), learning_rate=1e-3)
LIBRARIES = [
    *(cases_of_torchtitan() if hasattr(perfsuite, "TorchTitan") else []),
    BASE.replace(framework=DDP(float8="tensorwise")),
    BASE.replace(framework=FSDP2(float8="tensorwise")),
    ADAPTED.replace(quantization="4bit"),
    ADAPTED.replace(quantization="8bit"),
    BASE.replace(attention="flash_attention_2"),
    BASE.replace(model="mamba-1.6b", micro_batch=1),
    *(cases_of_deepspeed() if hasattr(perfsuite, "DeepSpeed") else []),
]


@pytest.mark.parametrize("case", [TINY, TINY.replace(framework=FSDP2())])
def test_smoke(bench: Any, case: Case) -> None:
    bench(case)


def test_smoke_of_a_replayed_graph() -> None:
    """Forward and backward are replayed from a real CUDA graph. The counting of steps notices the replay."""
    import torch

    from perfsuite.results.counts import COUNTED_STEP
    from perfsuite.worker.counting.steps import Counting
    from perfsuite.worker.hooks import calls

    calls.watch()
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(8, 64, device="cuda")
    replayed: Any = torch.cuda.make_graphed_callables(model, (inputs,))
    counting = Counting(lambda: model)
    for _ in range(COUNTED_STEP + 1):
        optimizer.zero_grad()
        replayed(inputs).square().mean().backward()
        counting.before_optimizer_step(optimizer)
        optimizer.step()
        counting.end_step()
        counting.begin_step()
    assert counting.notes == []
    assert counting.hidden[0] == "a CUDA graph was replayed, and its operators are not seen (2x)"


@pytest.mark.parametrize("is_replayed", [False, True])
def test_smoke_of_kernels_in_a_profile(tmp_path: Path, is_replayed: bool) -> None:
    """Operators launch all kernels of an eager step, but hardly any kernel of a step in a real CUDA graph."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    from perfsuite.analysis.trace import reduced
    from perfsuite.results.profile import PROFILED_STEPS, UNSEEN

    model: Any = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(1024, 1024, device="cuda")
    forward: Any = torch.cuda.make_graphed_callables(model, (inputs,)) if is_replayed else model
    plan = schedule(wait=0, warmup=1, active=PROFILED_STEPS + 1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=plan) as profiler:
        for _ in range(PROFILED_STEPS + 2):
            forward(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    split = reduced(json.loads(trace.read_text())["traceEvents"], "cuda").split
    assert split.unseen > UNSEEN if is_replayed else split.unseen == 0


@pytest.mark.parametrize("case", WIDE)
def test_wide(bench: Any, case: Case) -> None:
    bench(case)


@pytest.mark.parametrize("case", [BASE.replace(steps=50)])
def test_noise(bench: Any, case: Case) -> None:
    bench(case)


@pytest.mark.parametrize("case", [BASE.replace(micro_batch=128, may_run_out_of_memory=True)])
def test_oom(bench: Any, case: Case) -> None:
    bench(case)


@pytest.mark.parametrize("case", LIBRARIES)
def test_libraries(bench: Any, case: Case) -> None:
    bench(case)


@pytest.mark.parametrize("case", [BASE.replace(compile=True, steps=30)])
def test_compiled(bench: Any, case: Case) -> None:
    bench(case)


@pytest.mark.parametrize("case", [SCRIPT.replace(steps=200)])
def test_trends(bench: Any, case: Case) -> None:
    bench(case)
