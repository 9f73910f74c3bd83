"""Test reading autotuning results from files that look like those of torch 2.13."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfsuite.worker.observation.autotuned import choices

pytestmark = pytest.mark.unit

CONFIGURATION = {"XBLOCK": 256, "num_warps": 4, "num_stages": 1}
BOOKKEEPING = {
    "configs_hash": "c0ffee",
    "found_by_coordesc": False,
    "time_taken_ms": 12,
    "triton_cache_hash": "A",
}


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def products(**seconds: float) -> dict[str, Any]:
    """Return a file with the time of each candidate for a matrix product."""
    return {"system": {}, "cache": {"mm": {"('cpu', 64, 32)": {"highest": seconds}}}}


def test_reads_the_configuration_of_a_triton_kernel(tmp_path: Path) -> None:
    write(tmp_path / "ab" / "abcdefabcdefabc.best_config", {**CONFIGURATION, **BOOKKEEPING})
    assert choices(tmp_path) == {"Triton kernel abcdefabcdef": "XBLOCK=256, num_stages=1, num_warps=4"}


def test_fastest_product_candidate_is_the_choice(tmp_path: Path) -> None:
    write(tmp_path / "cache" / "0123", products(extern_mm=0.2, cpp_gemm=0.1))
    ((name, choice),) = choices(tmp_path).items()
    assert name.startswith("mm of inputs ")
    assert choice == "cpp_gemm"


def test_equal_kernels_have_equal_names(tmp_path: Path) -> None:
    write(tmp_path / "a" / "cache" / "0123", products(extern_mm=0.2, cpp_gemm=0.1))
    write(tmp_path / "b" / "cache" / "4567", products(extern_mm=0.1, cpp_gemm=0.2))
    assert choices(tmp_path / "a").keys() == choices(tmp_path / "b").keys()


@pytest.mark.parametrize("name", ["ab/c.best_config", "cache/0123"])
@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"text"', '{"cache": 1}', '{"cache": {"mm": {"x": {"y": {}}}}}']
)
def test_a_file_of_another_kind_ends_nothing(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path / name, content)
    assert "mm" not in "".join(choices(tmp_path))


def test_without_a_cache_nothing_was_chosen(tmp_path: Path) -> None:
    assert choices(tmp_path / "absent") == {}
