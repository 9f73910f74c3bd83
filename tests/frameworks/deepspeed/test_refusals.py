"""Test that cases which DeepSpeed cannot run are refused before anything is launched."""

import pytest

from perfsuite import Case, DeepSpeed
from perfsuite.case.hardware import Machine
from tests.frameworks.refusals import TAKES, check_refusal, row

ZERO = DeepSpeed(config={})
PRECISIONS_OF_ZERO = "'fp32' or 'bf16' or 'bf16-mixed'"


@pytest.mark.parametrize(
    ("case", "machine", "why"),
    [
        row(ZERO, TAKES.format("deepspeed", PRECISIONS_OF_ZERO, "fp16-mixed"), precision="fp16-mixed"),
        row(ZERO, "deepspeed supports compile False, but the case asks for True", compile=True),
    ],
)
def test_refuses_an_impossible_case_beforehand(case: Case, machine: Machine, why: str | None) -> None:
    check_refusal(case, machine, why)
