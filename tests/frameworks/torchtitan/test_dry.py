"""Test that a dry run of torchtitan does the same as a real launch of a tiny twin."""

from pathlib import Path

import pytest

from tests.dry.twins import LATER, check_twin

TWINS = [
    "torchtitan-llama-tiny-s64-b4-fp32-1x2",
    f"torchtitan-tensor_parallel2-llama-tiny-s64-b4-fp32-ac_full-{LATER}",
]


@pytest.mark.nightly
@pytest.mark.parametrize("name", TWINS)
def test_dry_run_does_what_the_twin_does(name: str, tmp_path: Path) -> None:
    check_twin(name, tmp_path)
