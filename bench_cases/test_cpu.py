"""A tiny Llama on two CPU processes with gloo, trained with every framework. `make bench` measures it."""

import pytest

import perfsuite
from perfsuite import DDP, FSDP, FSDP2, Accelerate, Case, Lightning, Model, Script, Topology, Trainer

LLAMA = Case(
    model="llama-tiny",
    framework=DDP(),
    sequence_length=64,
    micro_batch=4,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    timeout_s=300,
)

CASES = [
    LLAMA,
    LLAMA.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    LLAMA.replace(framework=FSDP2()),
    LLAMA.replace(framework=Accelerate(strategy="fsdp2")),
    LLAMA.replace(framework=Trainer(fsdp="full_shard auto_wrap")),
    LLAMA.replace(framework=Lightning(strategy="fsdp2")),
]
# These frameworks are missing if their folders in `perfsuite/frameworks` were deleted.
if hasattr(perfsuite, "DeepSpeed"):
    zero_2 = perfsuite.DeepSpeed(config={"zero_optimization": {"stage": 2}})
    CASES.append(LLAMA.replace(framework=zero_2))
if hasattr(perfsuite, "Nanotron"):
    CASES.append(LLAMA.replace(framework=perfsuite.Nanotron(pp=2), micro_batch=1, gradient_accumulation=4))
if hasattr(perfsuite, "TorchTitan"):
    CASES.append(LLAMA.replace(framework=perfsuite.TorchTitan()))


@pytest.mark.parametrize("case", CASES)
def test_llama(bench, case):
    bench(case)


COPY = LLAMA.replace(
    model=Model.named("copy-decoder"),
    framework=Script(path="bench_cases/scripts/train_copy.py"),
)


@pytest.mark.parametrize("case", [COPY])
def test_script(bench, case):
    bench(case)
