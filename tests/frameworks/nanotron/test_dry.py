"""Test that a dry run of nanotron does the same as a real launch of a tiny twin."""

from pathlib import Path

import pytest

from perfsuite import Case, Nanotron, documents
from perfsuite.results.count_baseline import CountBaseline
from tests.dry.runs import passed
from tests.dry.twins import BASELINES, LATER, check_ranks, check_twin
from tests.frameworks.test_base import COUNTED, measured

TWINS = [f"nanotron-dp2-llama-tiny-s64-b2-fp32-{LATER}", f"nanotron-tp2-llama-tiny-s64-b2x2-fp32-{LATER}"]
SCATTERS = COUNTED.replace(
    framework=Nanotron(tp=2, tp_mode="REDUCE_SCATTER"),
    sequence_length=16,
    gradient_accumulation=2,
    timeout_s=600,
)
"""The norms are tied, so one call reduces their gradients for several tensors."""

pytestmark = pytest.mark.nightly


def mask_bytes(case: Case) -> int:
    """Return the bytes of a batch's mask of booleans.

    The data loader makes the mask as a real tensor. When the step uses it, the mask becomes a fake tensor.
    """
    return case.micro_batch * case.sample_length


@pytest.mark.parametrize("name", TWINS)
def test_dry_run_does_what_the_twin_does(name: str, tmp_path: Path) -> None:
    case = documents.read(BASELINES / "counts" / "cpu" / f"{name}.json", CountBaseline).case
    check_twin(name, tmp_path, twice_held_bytes=mask_bytes(case))


def test_scattered_gradients_are_as_in_a_launch(tmp_path: Path) -> None:
    dry = passed(SCATTERS, tmp_path / "dry")
    real = measured(SCATTERS, tmp_path / "real").counts
    check_ranks(dry, real, twice_held_bytes=mask_bytes(SCATTERS))
