from __future__ import annotations

from typing import Any

import pytest

from perfsuite import MODELS, Model
from perfsuite.frameworks.common.llama import cannot_build


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"head_dim": 32, "attention_bias": False, "rope_theta": 5e5}, None),
        ({"head_dim": 64}, "nanotron has head_dim=32 only, odd has 64"),
        ({"mlp_bias": True}, "nanotron has mlp_bias=False only, odd has True"),
        ({"attention_dropout": 0.1}, "nanotron has attention_dropout=0.0 only, odd has 0.1"),
        ({"model_type": "gpt2"}, "nanotron builds Llama models, odd is a gpt2"),
    ],
)
def test_what_is_no_plain_llama(changes: dict[str, Any], problem: str | None) -> None:
    assert (
        cannot_build("nanotron", Model(name="odd", config={**MODELS["llama-tiny"].config, **changes}))
        == problem
    )
