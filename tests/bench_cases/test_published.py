"""Tests of this repository's published comparisons: every row has a case, and every comparison has a twin."""

import pytest

from bench_cases.published import Comparison, PublishedFile, compare
from perfsuite import Case, documents
from tests.case_files import BENCH_CASES, cases_of
from tests.frameworks.removable import DELETED

PUBLISHED = documents.read(BENCH_CASES / "published.json", PublishedFile).comparisons


CASES = {case: it for file in sorted(BENCH_CASES.glob("test_*.py")) for case, it in cases_of(file).items()}
"""Every case of this repository by its id."""


def case_of(case_id: str) -> Case:
    """Return a case. Skip the test if the case may have been deleted with a framework."""
    if DELETED and case_id not in CASES:
        pytest.skip(f"without {', '.join(DELETED)}, there is no case {case_id}")
    return CASES[case_id]


every_comparison = pytest.mark.parametrize("comparison", PUBLISHED, ids=lambda comparison: comparison.name)


@every_comparison
def test_every_row_has_a_case_of_published_size(comparison: Comparison) -> None:
    words = comparison.accelerator.lower().split()
    for row in comparison.rows:
        assert len(row.settings) == len(comparison.headings)
        if row.no_case:
            continue
        case = case_of(row.case)
        assert case.topology.world_size == row.devices
        assert {name.split("-")[0] for name in case.hardware} <= set(words)
        assert row.relative_to is None or row.relative_to in CASES


@every_comparison
def test_every_comparison_has_twins_for_a_cpu(comparison: Comparison) -> None:
    assert any(row.twin for row in comparison.rows) == any(row.case for row in comparison.rows)
    for row, name in ((candidate, twin) for candidate in comparison.rows for twin in sorted(candidate.twins)):
        case = case_of(row.case)
        twin = case_of(name)
        assert twin.hardware == ("cpu",)
        if name == row.two_node_twin:
            assert case.topology.nodes > 1
            assert twin.topology.nodes == 2
        else:
            assert twin.topology.world_size == 2
        assert twin.framework.name == case.framework.name
        for field in ("activation_checkpointing", "lora", "quantization", "attention"):
            assert getattr(twin, field) == getattr(case, field)


PARAMETERS = {"1B": 1_235_814_400, "8B": 8_030_261_248}


def test_the_memory_rule_is_worked_out_right() -> None:
    """Each parameter takes 16 bytes: weights and gradients in 16 bits, and Adam's copy, momentum and variance
    in 32 (Rajbhandari et al. 2020, ZeRO, section 3.1). With FSDP, 8 ranks share these bytes. With DDP, the
    buckets add 4 bytes."""
    rows = [row for comparison in PUBLISHED for row in comparison.rows]
    for row, figure in ((candidate, figure) for candidate in rows for figure in candidate.figures):
        if figure.quantity == "peak_memory_bytes":
            is_sharded = "/ 8" in figure.reported
            assert ("buckets" in figure.reported) == row.case.startswith("ddp-")
            bytes_per_parameter = 16 / 8 if is_sharded else 16 + 4
            assert figure.value == pytest.approx(
                bytes_per_parameter * PARAMETERS[row.settings[0].split(",")[0][-2:]]
            )


BYTES = {"MB": 2**20, "GB": 2**30, "GiB": 2**30}
"""The bytes of each published unit. Programs that log MB or GB mean MiB or GiB."""


@every_comparison
def test_reported_figures_and_their_values_agree(comparison: Comparison) -> None:
    """`reported` is the original text, and `value` is the same number in this project's units."""
    scale = {"mfu": 0.01, "step_s": 1e-3}
    scale |= dict.fromkeys(("tokens_per_s", "tokens_per_s_per_device", "gpu_utilisation"), 1)
    for row in comparison.rows:
        for figure in row.figures:
            if figure.quantity in scale and figure.value is not None:
                text = figure.reported.split()[0].strip("~%")
                number = float(text.rstrip("K").replace(",", "")) * (1000 if text.endswith("K") else 1)
                assert figure.value == pytest.approx(number * scale[figure.quantity])
            if figure.quantity == "reserved_memory_bytes" and figure.value is not None:
                amount, unit = figure.reported.split()
                assert figure.value == float(amount) * BYTES[unit]


def test_names_are_unique_and_tables_render_empty() -> None:
    assert len({comparison.name for comparison in PUBLISHED}) == len(PUBLISHED)
    for comparison in PUBLISHED:
        table = compare(comparison, {})
        assert all(len(cells) == len(table.headers) for cells in table.rows)
        for row, cells in zip(comparison.rows, table.rows, strict=True):
            assert (f"no case: {row.no_case}" if row.no_case else "not run: needs") in " ".join(cells)
