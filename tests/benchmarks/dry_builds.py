"""Cases of every framework. Their dry runs are compared between a CPU build and a CUDA build of torch."""

import sys
from pathlib import Path
from typing import Any

import perfsuite
from perfsuite import (
    DDP,
    FSDP,
    FSDP2,
    Accelerate,
    Case,
    Lightning,
    LoRA,
    Model,
    Script,
    Topology,
    Trainer,
    documents,
)
from perfsuite.case import catalog
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.run import Run
from tests.dry.twins import BASELINES
from tests.samples import make_case

SCRIPT = Path(__file__).parents[1] / "dry" / "every_call.py"
FLAT = {**catalog.MODELS["llama-tiny"].config, "num_hidden_layers": 1}
TINY = make_case(
    model=Model.from_config(FLAT, name="llama-flat"),
    framework=DDP(),
    sequence_length=32,
    max_warmup_steps=4,
    steps=10,
    hardware="h100",
).replace(precision="bf16-mixed", timeout_s=600)
GPT = TINY.replace(model="gpt2-tiny", sequence_length=128)
FOUR = Topology(processes_per_node=4)
SHARDED = TINY.replace(framework=FSDP2())
OWN = TINY.replace(model=Model.named("net"), framework=Script(path=SCRIPT, loss="finite"))


def _script(*words: str, **changes: Any) -> Case:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    framework = Script(command=(*launcher, str(SCRIPT), *words), loss="finite")
    return OWN.replace(framework=framework, sequence_length=16, **changes)


CASES = {
    "ddp": TINY,
    "ddp, compiled": TINY.replace(compile=True),
    "ddp, static graph": TINY.replace(framework=DDP(static_graph=True, gradient_as_bucket_view=True)),
    "ddp, accumulation, lora": TINY.replace(lora=LoRA(rank=4, alpha=8), gradient_accumulation=2),
    "fsdp, full shard": TINY.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    "fsdp, shard grad op, v100": GPT.replace(
        framework=FSDP(sharding_strategy="SHARD_GRAD_OP"), precision="fp16-mixed", hardware="v100-16gb"
    ),
    "fsdp2, selective checkpointing": SHARDED.replace(activation_checkpointing="selective-op"),
    "fsdp2, tensor parallel": SHARDED.replace(
        framework=FSDP2(tensor_parallel=2), activation_checkpointing="full", topology=FOUR
    ),
    "fsdp2, hybrid, fp32": SHARDED.replace(framework=FSDP2(shard_group=2), precision="fp32", topology=FOUR),
    "accelerate ddp": GPT.replace(framework=Accelerate(strategy="ddp")),
    "accelerate fsdp1": TINY.replace(framework=Accelerate(strategy="fsdp1")),
    "accelerate fsdp2, tp": TINY.replace(
        framework=Accelerate(strategy="fsdp2", dp_shard_size=2, tp_size=2), topology=FOUR
    ),
    "trainer, lora": TINY.replace(framework=Trainer(), lora=LoRA(rank=4, alpha=8)),
    "trainer, fsdp": TINY.replace(framework=Trainer(fsdp="full_shard auto_wrap")),
    "lightning ddp": GPT.replace(framework=Lightning(strategy="ddp")),
    "lightning fsdp2": TINY.replace(framework=Lightning(strategy="fsdp2")),
    "script, ddp": _script(),
    "script, static graph, fp16": _script("--static-graph", precision="fp16-mixed"),
    "script, fsdp2": _script("--fsdp2"),
}
# The folders of these frameworks can be deleted.
if hasattr(perfsuite, "TorchTitan"):
    (experts,) = (BASELINES / "counts" / "cpu").glob("torchtitan-deepseek_v3_debugmodel-*.json")
    CASES["torchtitan, tp"] = TINY.replace(framework=perfsuite.TorchTitan(tensor_parallel=2), topology=FOUR)
    CASES["torchtitan, experts"] = documents.read(experts, CountBaseline).case.replace(hardware="h100")
if hasattr(perfsuite, "Nanotron"):
    sharded = perfsuite.Nanotron(dp=2, tp=2)
    CASES["nanotron, dp and tp"] = TINY.replace(framework=sharded, precision="bf16", topology=FOUR)


def differences(first: Run, second: Run) -> list[str]:
    """Return the counts and predictions that differ between two dry runs of a case, with both values."""
    mine, theirs = (run.model_dump() for run in (first, second))
    names = ("counts", "flops", "dry_facts", "dtypes", "figures", "machine", "notes")
    return [difference for name in names for difference in _differing(mine[name], theirs[name], name)]


def _differing(first: Any, second: Any, path: str) -> list[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        pairs = [(name, first.get(name), second.get(name)) for name in {**first, **second}]
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        pairs = [(index, *both) for index, both in enumerate(zip(first, second, strict=True))]
    else:
        return [] if first == second else [f"{path}: {str(first)[:200]} / {str(second)[:200]}"]
    return [
        difference for name, one, other in pairs for difference in _differing(one, other, f"{path}.{name}")
    ]
