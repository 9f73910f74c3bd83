from pathlib import Path

import pytest

from bench_cases.predicted import (
    Spread,
    as_predicted,
    checked,
    digest,
    frozen,
    main,
    published_tokens_per_s,
    ratios,
    with_one_factor,
)
from bench_cases.published import Comparison, PublishedFigure, PublishedFile, Row
from perfsuite import documents
from perfsuite.analysis.step_time.prediction import step_time
from perfsuite.analysis.step_time.streams import reported_step
from perfsuite.case.hardware import PRODUCTS
from perfsuite.dry.machine import pretended_gpu
from perfsuite.errors import CaseError
from perfsuite.results import device_log_file
from perfsuite.results.counts import Collective, Counts, RankCounts
from perfsuite.results.device_log import Communicate, Kernel
from perfsuite.results.dry_facts import DryFacts, roofline
from perfsuite.results.session_file import SessionFile
from tests.bench_cases.published_steps import A100, H100, MORE, STEPS, PublishedStep
from tests.counted import make_dry, make_expected
from tests.samples import make_session_file

WITH_ONE_FACTOR = {
    "torchtitan on 64 A100": Spread(median=0.030, nine_of_ten=0.067),
    "nanotron on H100": Spread(median=0.032, nine_of_ten=0.063),
    # One row has tensor parallelism, and was measured on another machine.
    "torchtitan on H100 of 500 W": Spread(median=0.192, nine_of_ten=0.255),
}
"""The largest allowed errors of the published step times. A change of the model must not widen them."""


def cluster(name: str) -> list[float]:
    return [step.ratio for step in STEPS if step.cluster == name]


@pytest.mark.parametrize("name", WITH_ONE_FACTOR)
def test_one_factor_predicts_the_rest_of_a_cluster(name: str) -> None:
    spread = with_one_factor(cluster(name))
    assert spread.median <= WITH_ONE_FACTOR[name].median
    assert spread.nine_of_ten <= WITH_ONE_FACTOR[name].nine_of_ten


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_no_published_step_is_predicted_below_its_roofline(step: PublishedStep) -> None:
    log = reported_step(device_log_file.read(step.log(MORE)))
    flops = sum(entry.flops for entry in log if isinstance(entry, Kernel))
    collectives = [
        Collective(
            kind=entry.kind,
            ranks=entry.ranks,
            apart=entry.apart,
            dtype="",
            phase=entry.phase,
            count=1,
            bytes=entry.bytes,
        )
        for entry in log
        if isinstance(entry, Communicate)
    ]
    counts = RankCounts(ranks=(0,), counts=Counts(flops={"forward": flops}, collectives=tuple(collectives)))
    machine = pretended_gpu(step.product, step.case.topology)
    least = roofline([counts], step.case, machine, tokens=1)
    assert least is not None
    assert step_time(log, step.machine).total_s > least.step_s


def test_the_tables_have_seventeen_rows() -> None:
    assert len(STEPS) == 17


@pytest.mark.parametrize(
    ("product", "clusters"),
    [(A100, ["torchtitan on 64 A100"]), (H100, ["nanotron on H100", "LLaMA Factory on H100"])],
)
def test_accelerators_have_the_published_shares(product: str, clusters: list[str]) -> None:
    speed = PRODUCTS[product].speed
    assert speed is not None
    shares = [ratio for name in clusters for ratio in cluster(name)]
    assert speed.published == pytest.approx((min(shares), max(shares)), abs=0.01)
    assert speed.published_source is not None


def test_the_factor_is_the_median_of_published_steps() -> None:
    speed = PRODUCTS[A100].speed
    assert speed is not None
    ordered = sorted(cluster("torchtitan on 64 A100"))
    assert speed.factor == pytest.approx(2 / (ordered[3] + ordered[4]), abs=0.005)


def test_spreads_are_medians_and_nine_of_ten() -> None:
    assert as_predicted([0.9, 1.0, 1.3]) == pytest.approx((0.1, 0.3))
    assert as_predicted([1 + 0.01 * number for number in range(1, 11)]).nine_of_ten == pytest.approx(0.09)
    assert with_one_factor([0.5, 0.5]) == (0, 0)
    assert with_one_factor([1.0, 1.25]) == pytest.approx((0.225, 0.25))


def row(case: str, quantity: str, value: float | None, devices: int = 8) -> Row:
    figure = PublishedFigure(quantity=quantity, value=value, reported=str(value))
    return Row(settings=("one",), devices=devices, figures=(figure,), case=case)


def test_speeds_of_one_device_count_for_all() -> None:
    assert published_tokens_per_s(row("a", "tokens_per_s_per_device", 100)) == 800
    assert published_tokens_per_s(row("a", "tokens_per_s", 100)) == 100
    assert published_tokens_per_s(row("a", "tokens_per_s", None)) is None
    assert published_tokens_per_s(row("a", "mfu", 0.4)) is None


def test_only_rows_with_both_speeds_are_compared() -> None:
    rows = [row("a", "tokens_per_s", 50), row("b", "tokens_per_s", 50), row("c", "mfu", 0.5)]
    assert ratios(rows, {"a": 100.0, "c": 100.0}) == {"a": 0.5}


def sessions() -> list[SessionFile]:
    result = make_dry(dry_facts=DryFacts(expected=make_expected()))
    return [make_session_file(result)]


def test_the_newest_predictions_are_frozen() -> None:
    predictions = frozen(sessions())
    (case,) = predictions.tokens_per_s
    assert predictions.tokens_per_s == {case: 1000}
    unknown = make_session_file(make_dry(dry_facts=DryFacts(no_expected="the model is compiled")))
    assert frozen([unknown]).unknown == {case: "the model is compiled"}


def test_another_file_than_the_frozen_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "frozen.json"
    documents.write(path, frozen(sessions()))
    whole = digest(path)
    assert checked(path, whole) == frozen(sessions())
    path.write_text(path.read_text().replace("1000", "1100"))
    with pytest.raises(CaseError, match="it is not the file that was frozen"):
        checked(path, whole)


def test_the_table_is_not_read_before_the_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "frozen.json"
    documents.write(path, frozen(sessions()))
    with pytest.raises(SystemExit, match="not the file that was frozen"):
        main(["compare", str(path), "0" * 64, "--table", str(tmp_path / "no-table.json")])
    (case,) = frozen(sessions()).tokens_per_s
    table = PublishedFile(
        comparisons=(
            Comparison(
                name="new",
                title="A new table",
                source="a page",
                accelerator="H100",
                conditions="none",
                headings=("number",),
                rows=(row(case, "tokens_per_s", 900),),
            ),
        )
    )
    documents.write(tmp_path / "table.json", table)
    main(["compare", str(path), digest(path), "new", "--table", str(tmp_path / "table.json")])
    printed = capsys.readouterr().out
    assert "-10.0%" in printed
    assert "as predicted: median 10.0%" in printed
