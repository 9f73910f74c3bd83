"""Tests of the page that a CI job shows of a night, and of the annotations that GitHub shows."""

from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.features.nightly.page import Page, github_annotations
from perfsuite.session.option_table import BY_NAME
from tests.features.nightly.interpreter import SESSION
from tests.outcomes import GOOD, NOISY, SLOW, crashed

OUT = Path("out")
STORE = Path(".perfsuite")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Return the page of a night that has begun."""
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    begun = Page(OUT, STORE)
    begun.begin("not over")
    return begun


def leave_session(number: int, page: Page | None = None) -> Path:
    """Write the results of a session to the store, and return their file. `page` is that of its night."""
    results = STORE / f"runs/2026010{number}-000000-000000/results.json"
    documents.write(results, SESSION)
    if page is not None:
        results.with_name("night").write_text(page.night)
    return results


def test_page_has_a_reason_until_there_is_a_report(page: Page) -> None:
    page.explain("doctor found <a problem>")
    assert page.file.read_text().startswith("Nothing was measured: doctor found &#60;a problem>")
    assert not page.has_report()
    page.complete([leave_session(1)])
    assert page.has_report()


def test_beginning_removes_the_report_of_an_earlier_night(page: Page) -> None:
    page.complete([leave_session(1)])
    assert (OUT / "index.html").is_file()
    Page(OUT, STORE).begin("not over")
    assert [file.name for file in OUT.iterdir()] == ["summary.md"]


def test_a_night_replaces_the_page_of_another(page: Page) -> None:
    assert BY_NAME["report"].read("--out", str(OUT)) == OUT


def test_sessions_of_other_nights_do_not_count(page: Page) -> None:
    """Other nights, and sessions without a night, can use the same store at the same time."""
    leave_session(1, Page(Path("elsewhere"), STORE))
    second = leave_session(2, page)
    leave_session(3, Page(Path("elsewhere"), STORE))
    leave_session(4)
    assert page.sessions() == [second]
    assert Page(OUT, STORE).sessions_of_killed() == [second], "another process reports the killed night"


def test_a_reported_night_was_not_killed(page: Page) -> None:
    page.complete([leave_session(1)])
    assert page.sessions_of_killed() == []


def test_appends_to_the_page_of_github(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Path("shown.md")
    shown.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(shown))
    page.append_to_job()
    assert shown.read_text() == f"before\n{page.file.read_text()}"


def test_only_github_gets_annotations(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    results = STORE / "runs/20260101-000000-000000/results.json"
    documents.write(results, SESSION.replace(results=(SLOW,)))
    assert page.complete([results]) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (line,) = page.complete([results])
    assert line.startswith("::error ")


def test_annotations_are_next_to_the_case_file() -> None:
    worse = SLOW.replace(case_id="a,b:c", nodeid="bench_cases/test_x.py::test[1]")
    (line,) = github_annotations([worse])
    titled = "file=bench_cases/test_x.py,title=regressed%3A a%2Cb%3Ac"
    assert line.startswith(f"::error {titled}::tokens/s -49.4%25")


def test_level_of_an_annotation_depends_on_the_outcome() -> None:
    results = [GOOD, SLOW, NOISY, SLOW.replace(shadow=True), SLOW.replace(excused="waived")]
    levels = [line.partition(" ")[0] for line in github_annotations(results)]
    assert levels == ["::error", "::warning", "::warning"]


def test_an_annotation_is_one_line() -> None:
    (line,) = github_annotations([crashed("50%\n::error::evil")])
    assert "\n" not in line
