"""Tests of this repository's published comparisons: every row has a case, and every comparison has a twin."""

import pytest

from bench_cases.published import Comparison, PublishedFigure, PublishedFile, Row, compare
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
def test_every_row_has_a_setting_for_each_heading(comparison: Comparison) -> None:
    assert {len(row.settings) for row in comparison.rows} == {len(comparison.headings)}


EVERY_ROW = [
    pytest.param(comparison, row, id=f"{comparison.name} {' '.join(row.settings)}")
    for comparison in PUBLISHED
    for row in comparison.rows
    if not row.no_case
]


@pytest.mark.parametrize(("comparison", "row"), EVERY_ROW)
def test_every_row_has_a_case_of_published_size(comparison: Comparison, row: Row) -> None:
    case = case_of(row.case)
    assert case.topology.world_size == row.devices
    assert {name.split("-")[0] for name in case.hardware} <= {*comparison.accelerator.lower().split()}
    assert row.relative_to is None or row.relative_to in CASES


@every_comparison
def test_every_comparison_has_twins(comparison: Comparison) -> None:
    assert any(row.twin for row in comparison.rows) == any(row.case for row in comparison.rows)


EVERY_TWIN = [
    pytest.param(row, twin, id=f"{comparison.name} {row.case} {twin}")
    for comparison in PUBLISHED
    for row in comparison.rows
    for twin in sorted(row.twins)
]
every_twin = pytest.mark.parametrize(("row", "name"), EVERY_TWIN)


@every_twin
def test_every_twin_runs_on_a_small_cpu(row: Row, name: str) -> None:
    twin = case_of(name)
    assert twin.hardware == ("cpu",)
    if name == row.two_node_twin:
        assert case_of(row.case).topology.nodes > 1
        assert twin.topology.nodes == 2
    else:
        assert twin.topology.world_size == 2


@every_twin
def test_every_twin_trains_like_its_case(row: Row, name: str) -> None:
    case = case_of(row.case)
    twin = case_of(name)
    assert twin.framework.name == case.framework.name
    fields = ("activation_checkpointing", "lora", "quantization", "attention")
    assert [getattr(twin, field) for field in fields] == [getattr(case, field) for field in fields]


PARAMETERS = {"1B": 1_235_814_400, "8B": 8_030_261_248}


WORKED_OUT = [
    pytest.param(row, figure, id=f"{comparison.name} {row.case}")
    for comparison in PUBLISHED
    for row in comparison.rows
    for figure in row.figures
    if figure.quantity == "peak_memory_bytes"
]


def test_some_published_memory_is_worked_out() -> None:
    assert WORKED_OUT


@pytest.mark.parametrize(("row", "figure"), WORKED_OUT)
def test_the_memory_rule_is_worked_out_right(row: Row, figure: PublishedFigure) -> None:
    """Each parameter takes 16 bytes: weights and gradients in 16 bits, and Adam's copy, momentum and variance
    in 32 (Rajbhandari et al. 2020, ZeRO, section 3.1). With FSDP, 8 ranks share these bytes. With DDP, the
    buckets add 4 bytes."""
    assert ("buckets" in figure.reported) == row.case.startswith("ddp-")
    bytes_per_parameter = 16 / 8 if "/ 8" in figure.reported else 16 + 4
    parameters = PARAMETERS[row.settings[0].split(",")[0][-2:]]
    assert figure.value == pytest.approx(bytes_per_parameter * parameters)


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


def test_names_are_unique() -> None:
    assert len({comparison.name for comparison in PUBLISHED}) == len(PUBLISHED)


@every_comparison
def test_a_table_without_results_says_why(comparison: Comparison) -> None:
    table = compare(comparison, {})
    assert all(len(cells) == len(table.headers) for cells in table.rows)
    reasons = [f"no case: {row.no_case}" if row.no_case else "not run: needs" for row in comparison.rows]
    texts = [" ".join(cells) for cells in table.rows]
    assert [reason in text for reason, text in zip(reasons, texts, strict=True)] == [True] * len(texts)
