"""Test that a dry run of torchtitan does the same as a real launch of a tiny twin."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from perfsuite.results.counts import Phase
from tests.dry.runs import passed
from tests.dry.test_compilation import check_twins, of_rank_0
from tests.dry.twins import LATER, check_twin
from tests.frameworks.test_base import measured
from tests.frameworks.torchtitan.samples import MARKS
from tests.frameworks.torchtitan.test_configuration import CUT, SHORT, registered
from tests.samples import known

pytestmark = MARKS

TWINS = [
    "torchtitan-llama-tiny-s64-b4-fp32-1x2",
    f"torchtitan-tensor_parallel2-llama-tiny-s64-b4-fp32-ac_full-{LATER}",
]
EAGER = registered(CUT, "llama3_debugmodel", length=SHORT)
COMPILED = registered(CUT, "llama3_debugmodel", "--compile.enable", length=SHORT, compile=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TWINS)
def test_dry_run_does_what_the_twin_does(name: str, tmp_path: Path) -> None:
    check_twin(name, tmp_path)


@pytest.mark.nightly
def test_compiled_model_runs_dry_as_launched(tmp_path: Path) -> None:
    """torchtitan compiles each block and the loss."""
    dry = passed(COMPILED, tmp_path / "dry")
    check_twins(dry, measured(COMPILED, tmp_path / "launched"))
    # In each step, torchtitan reads the number of valid tokens, outside of the compiled code.
    assert of_rank_0(dry).host_reads == {"forward": 1}


@pytest.mark.nightly
def test_compiled_model_does_the_work_of_its_eager_twin(tmp_path: Path) -> None:
    """The dry runs simulate a GPU.

    The number of valid tokens is on the host, so reading it does not count as a host read.
    """
    compiled = of_rank_0(passed(COMPILED.replace(hardware="h100"), tmp_path / "compiled"))
    eager = of_rank_0(passed(EAGER.replace(hardware="h100"), tmp_path / "eager"))
    assert compiled.collectives == eager.collectives
    assert _without_recomputation(compiled.flops) == _without_recomputation(eager.flops)
    assert compiled.host_reads == eager.host_reads == {}
    assert known(compiled.compiled).graphs == 2


def _without_recomputation(flops: Mapping[Phase, int]) -> dict[str, int]:
    """Return the FLOPs of forward, and those of backward including recomputation.

    The compiled code recomputes in its graph for backward.
    """
    return {
        "forward": flops["forward"],
        "backward": flops["backward"] + flops.get("recompute", 0),
    }
