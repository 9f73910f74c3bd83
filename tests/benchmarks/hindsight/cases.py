"""The cases of `make releases`: the pairs' scripts and a Llama. They run with each release of a package."""

from typing import Any

import pytest

from perfsuite import Accelerate, Case, Lightning, Topology, Trainer
from tests.benchmarks.hindsight.pairs import LORA, Pair

VARY: dict[str, Any] = {"tokens": "vary"}
PEFT = LORA.replace(targets=("q_proj", "up_proj", "v_proj"))
SCRIPTS: dict[str, dict[str, Any]] = {
    "accelerate_ddp": {"ranks": 2},
    "accelerate_accumulate": {"ranks": 2, "dry": True, "case": {"gradient_accumulation": 4}},
    "fabric_ddp": {"ranks": 2},
    "lightning_ddp": {"ranks": 2},
    "lightning_ddp bf16-mixed 4 32000": {
        "ranks": 2,
        "case": {"precision": "bf16-mixed", "gradient_accumulation": 4},
    },
    "llama_train": {},
    "trainer": {"ranks": 2},
    "peft_train lora": {"case": {"lora": PEFT}},
    "peft_train dora": {"case": {"lora": PEFT}},
    "peft_train oft": {},
    "peft_train vera": {},
    "trl_sft": VARY,
    "trl_sft nll": VARY,
    "trl_dpo": {**VARY, "case": {"sequence_length": 64}},
}
LLAMA = Case(
    model="llama-3.2-1b",
    framework=Accelerate(strategy="fsdp2"),
    sequence_length=2048,
    micro_batch=1,
    precision="bf16-mixed",
    topology=Topology(processes_per_node=8),
    hardware="h100",
)


def case_of(script: str, **more: Any) -> Case:
    """Return the case of a script. `more` are fields of `Pair`."""
    pair = Pair(name=script.replace(" ", "_"), good="", bad="", script=script, **more)
    # With the usual numbers of steps, the id is shorter.
    return pair.measured().replace(max_warmup_steps=LLAMA.max_warmup_steps, steps=LLAMA.steps)


CASES = [
    *(case_of(script, **more) for script, more in SCRIPTS.items()),
    LLAMA,
    LLAMA.replace(framework=Trainer(fsdp="full_shard auto_wrap")),
    LLAMA.replace(framework=Lightning(strategy="fsdp2")),
    LLAMA.replace(lora=LORA),
]


@pytest.mark.parametrize("case", CASES)
def test_releases(bench: Any, case: Case) -> None:
    bench(case)
