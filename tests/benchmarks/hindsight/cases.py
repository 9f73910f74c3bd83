"""What `make releases` runs under each release of a package: scripts of pairs, each with its own label.

`perfsuite releases accelerate --cases tests/benchmarks/hindsight/cases.py -k accelerate`.
"""

from typing import Any

import pytest

from perfsuite import Case
from tests.benchmarks.hindsight.pairs import LORA, Pair

TWO: dict[str, Any] = {"ranks": 2}
VARY: dict[str, Any] = {"tokens": "vary"}
TARGETS = LORA.replace(targets=("q_proj", "up_proj", "v_proj"))
SCRIPTS: dict[str, dict[str, Any]] = {
    "accelerate_ddp": TWO,
    "accelerate_accumulate": {**TWO, "case": {"gradient_accumulation": 4}},
    "fabric_ddp": TWO,
    "lightning_ddp": TWO,
    "llama_train": {},
    "trainer": TWO,
    "peft_train lora": {"case": {"lora": TARGETS}},
    "peft_train dora": {"case": {"lora": TARGETS}},
    "peft_train oft": {},
    "peft_train vera": {},
    "trl_sft": VARY,
    "trl_sft nll": VARY,
    "trl_dpo": {**VARY, "case": {"sequence_length": 64}},
}


@pytest.mark.parametrize(
    "case",
    [
        Pair(name=script.replace(" ", "_"), good="", bad="", script=script, **more).measured()
        for script, more in SCRIPTS.items()
    ],
)
def test_script(bench: Any, case: Case) -> None:
    bench(case)
