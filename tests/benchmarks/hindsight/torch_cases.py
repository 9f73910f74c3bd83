"""The cases of `make release-torch`. All of them run dry as if on a GPU, because the builds are for CUDA."""

from typing import Any

import pytest

from perfsuite import Case, Trainer
from tests.benchmarks.hindsight.cases import LLAMA, SCRIPTS, case_of
from tests.benchmarks.hindsight.pairs import LORA

CASES = [
    *(
        case_of(script, **{**SCRIPTS[script], "dry": True})
        for script in ("accelerate_ddp", "accelerate_accumulate", "fabric_ddp", "llama_train", "trainer")
    ),
    LLAMA,
    LLAMA.replace(framework=Trainer(fsdp="full_shard auto_wrap")),
    LLAMA.replace(lora=LORA),
]


@pytest.mark.parametrize("case", CASES)
def test_releases(bench: Any, case: Case) -> None:
    bench(case)
