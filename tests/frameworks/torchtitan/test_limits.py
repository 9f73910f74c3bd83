from __future__ import annotations

import pytest

from perfsuite.case.catalog import MODELS
from perfsuite.case.model import Model
from perfsuite.frameworks.torchtitan.limits import unsupported_shape
from tests.frameworks.torchtitan.samples import changed


@pytest.mark.parametrize(
    ("model", "tensor_parallel", "reason"),
    [
        (MODELS["gpt2-tiny"], 1, "torchtitan's llama3 builds Llama models, gpt2-tiny is a gpt2"),
        (
            Model.from_config({"model_type": "mamba"}, name="mamba-tiny"),
            1,
            "torchtitan's llama3 builds Llama models, mamba-tiny is a mamba",
        ),
        (
            changed(attention_bias=True),
            1,
            "torchtitan's llama3 has attention_bias=False only, changed has True",
        ),
        (changed(hidden_act="gelu"), 1, "torchtitan's llama3 has hidden_act='silu' only, changed has 'gelu'"),
        (changed(head_dim=64), 1, "torchtitan's llama3 has heads of size 32, changed of 64"),
        (
            changed(rope_scaling={"type": "yarn", "factor": 2.0}),
            1,
            "torchtitan's llama3 knows rope_type default and llama3, changed has 'yarn'",
        ),
        (changed(num_key_value_heads=1), 2, "tensor_parallel=2 must divide num_key_value_heads, 1"),
        (changed(), 8, "tensor_parallel=8 must divide num_attention_heads, 4"),
        (changed(head_dim=32, rope_scaling={"rope_type": "llama3", "factor": 8.0}), 2, None),
    ],
)
def test_shapes_that_torchtitan_lacks(model: Model, tensor_parallel: int, reason: str | None) -> None:
    assert unsupported_shape(model, tensor_parallel) == reason
