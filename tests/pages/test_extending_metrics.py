"""Tests that docs/develop/extending-metrics.md works as written: its package is installed and used."""

import functools
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.extensions import METRICS
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.fake import Fake
from perfsuite.report import markdown
from perfsuite.report.html import page
from perfsuite.report.summary import properties
from perfsuite.report.terminal import explanation
from perfsuite.results import Run
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.metric import find_metric
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.judge import judge
from perfsuite.verdict.policy import Policy
from tests.doc_pages import ROOT, Page
from tests.frameworks.test_base import measured
from tests.packages import Packages
from tests.samples import BEFORE, NOISE, known, make_case, make_result
from tests.sessions import make_session

PAGE = Page(ROOT / "docs" / "develop" / "extending-metrics.md")


@pytest.fixture
def uninstall(packages: Packages) -> Callable[[], None]:
    """Install the page's package, and return a function that uninstalls it."""
    project = tomllib.loads(PAGE.files["pyproject.toml"])["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"][METRICS].items()]
    packages.install(project["name"], PAGE.files["perfsuite_weights.py"], metrics="\n".join(lines))
    return functools.partial(packages.uninstall, project["name"])


@pytest.mark.nightly
@pytest.mark.usefixtures("uninstall")
def test_every_launch_measures_the_pages_metrics(tmp_path: Path) -> None:
    case = make_case(framework=DDP(), max_warmup_steps=2, steps=10)
    run = measured(case, tmp_path / "launch-1")
    extra = run.figures.extra
    assert set(extra) == {"weight_bytes", "step_s_p99"}
    assert extra["weight_bytes"] == 4 * known(run.flops).parameters
    assert max(run.measured_steps) >= extra["step_s_p99"] >= (run.figures.step_s_p95 or 0)
    read_again = documents.read(tmp_path / "launch-1" / "run.json", Run)
    assert read_again.figures == run.figures
    simulated = measured(make_case(framework=Fake()), tmp_path / "launch-2")
    assert set(simulated.figures.extra) == {"step_s_p99"}, "it has no weights"


def with_weights(run: Run, mib: float) -> Run:
    extra = {"weight_bytes": int(mib * 2**20), "step_s_p99": 0.0456}
    return run.replace(figures=run.figures.replace(extra=extra))


@pytest.fixture
def larger(uninstall: Callable[[], None]) -> Measurement:
    """Return a case whose weights became 3% larger."""
    baseline = from_runs([with_weights(BEFORE, 100)] * 5)
    runs = [with_weights(BEFORE, 103)]
    return make_result(*runs, verdict=judge(runs, baseline, NOISE, Policy(max_launches=1)))


@pytest.mark.usefixtures("uninstall")
def test_a_baseline_keeps_a_metric_of_a_package(tmp_path: Path) -> None:
    baseline = from_runs([with_weights(BEFORE, 100)] * 5)
    documents.write(tmp_path / "b.json", baseline)
    assert documents.read(tmp_path / "b.json", Baseline) == baseline


def test_judges_a_metric_like_any_other(larger: Measurement) -> None:
    verdict = larger.verdict
    assert [check.metric for check in verdict.checks][-1:] == ["weight_bytes"]
    assert (verdict.outcome, verdict.checks[-1].outcome) == ("regressed", "regressed")


def test_explains_a_metric_like_any_other(larger: Measurement) -> None:
    words = explanation(larger)
    assert "weights: 103.0 MiB, baseline 100.0 MiB: 3.0% more, 1.0% allowed: regressed" in words
    assert "99th percentile of a step: 45.6 ms (not judged)" in words


@pytest.mark.parametrize(("heading", "cell", "tables"), [("weights", "103.0 MiB", 3), ("p99", "45.6 ms", 2)])
def test_a_page_shows_a_metric_like_any_other(
    larger: Measurement, heading: str, cell: str, tables: int
) -> None:
    """The overview and the launches have a column for each metric, and the checks one for a judged metric."""
    html = page.render([make_session(0).replace(results=(larger,))])
    assert html.count(f">{heading}</th>") == tables
    assert f">{cell}</td>" in html


def test_markdown_shows_a_metric_like_any_other(larger: Measurement) -> None:
    text = markdown.render([make_session(0).replace(results=(larger,))])
    assert "| memory | p99 | weights |" in text
    assert "| 64.0 MiB | 45.6 ms | 103.0 MiB |" in text


def test_properties_hold_a_metric_like_any_other(larger: Measurement) -> None:
    stated = properties(larger)
    assert (stated["weight_bytes"], stated["step_s_p99"]) == (103 * 2**20, 0.0456)
    assert stated["weight_bytes_change"] == pytest.approx(0.03, rel=1e-3)


def test_metric_must_be_in_baseline_and_launch(uninstall: Callable[[], None]) -> None:
    with_it = [with_weights(BEFORE, 103)] * 5
    without = [BEFORE] * 5
    check = judge(with_it[:3], from_runs(without), NOISE, Policy()).checks[-1]
    assert (check.metric, check.outcome) == ("weight_bytes", "inconclusive")
    assert check.note == "not in the baseline: accept or record a new baseline"
    verdict = judge(without[:1], from_runs(with_it), NOISE, Policy())
    assert (verdict.outcome, verdict.failure) == ("failed", "missing_metric")
    assert verdict.checks[-1].note == "the baseline has this metric, but this run does not"


UNUSABLE = "weight_bytes (its package cannot be used)"


@pytest.fixture
def old(uninstall: Callable[[], None]) -> Measurement:
    """Return a case that was judged before the package was uninstalled."""
    before = [with_weights(BEFORE, 100)] * 5
    result = make_result(before[0], verdict=judge(before[:1], from_runs(before), NOISE, Policy()))
    uninstall()
    return result


def test_a_metric_without_its_package_is_unknown(uninstall: Callable[[], None], tmp_path: Path) -> None:
    documents.write(tmp_path / "b.json", from_runs([with_weights(BEFORE, 100)] * 5))
    uninstall()
    assert find_metric("weight_bytes") is None
    baseline = documents.read(tmp_path / "b.json", Baseline)
    assert baseline.median("weight_bytes") == 104_858_000  # rounded to six digits


def test_a_metric_without_its_package_is_inconclusive(uninstall: Callable[[], None], tmp_path: Path) -> None:
    documents.write(tmp_path / "b.json", from_runs([with_weights(BEFORE, 100)] * 5))
    uninstall()
    verdict = judge([BEFORE], documents.read(tmp_path / "b.json", Baseline), NOISE, Policy())
    assert verdict.outcome == "inconclusive"
    unknown = "its value is unknown: install its package again, or accept a new baseline without this metric"
    words = " ".join(explanation(make_result(BEFORE, verdict=verdict)).split())
    assert "step_s_p99 (its package cannot be used): " in words
    assert f"{UNUSABLE}: " in words
    assert words.count(f": inconclusive; {unknown}") == 2


def test_an_old_result_names_metrics_without_their_package(old: Measurement) -> None:
    assert f"{UNUSABLE}: 104,857,600.00 (not judged)" in explanation(old)
    assert "weights: 100.0 MiB, baseline 100.0 MiB" in explanation(old)
    assert UNUSABLE in page.render([make_session(0).replace(results=(old,))])
