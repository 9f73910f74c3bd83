import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.features.github.issue import LABEL, GhCall, Issue, steps, title
from perfsuite.results.outcome import CountCheck, Profiled
from perfsuite.results.session_file import Measurement
from perfsuite.results.trend import ChangePoint, Drift, Trend
from tests.cli.commands import run
from tests.counted import make_finding
from tests.gh import Gh
from tests.outcomes import GOOD, NOISY, SLOW, crashed
from tests.processes import executable
from tests.samples import BEFORE, write_session

URL = "https://example.org/runs/1"
CLASS = "cpu-test-2c"
CASE = BEFORE.case.id


def hidden(baseline: str | None) -> Measurement:
    """Return a result without counts. `baseline` is the file of the baseline of counts, if there is one."""
    counts = CountCheck(outcome="not counted", compared=False, notes=("a",), baseline_file=baseline)
    return GOOD.replace(verdict=GOOD.verdict.replace(counts=counts))


def steps_for(
    *results: Measurement,
    issue: Issue | None = None,
    drifts: list[Drift] | None = None,
    cut_short: tuple[str, ...] = (),
) -> list[GhCall]:
    return steps(CLASS, results, issue, URL, drifts, cut_short=cut_short)


def drift(case: str = CASE) -> Drift:
    place = {"index": 9, "earliest": 8, "latest": 10}
    change = ChangePoint(**place, before=1.0, after=1.02, relative=0.02, interval=(0.01, 0.03))
    days = {"first_day": date(2026, 1, 1), "last_day": date(2026, 1, 3)}
    commits = {"first_commit": "a" * 40, "last_commit": "b" * 40, "commits_between": 2}
    state = {"environment": ("torch: 2.13.0 -> 2.14.0",), "worse": True, "accepted": False, "open": True}
    named = {"hardware_class": CLASS, "case": case, "metric": "peak memory"}
    return Drift.model_validate({**named, "change": change, **days, **commits, **state})


def issue_of(*cases: str) -> Issue:
    return Issue(7, f"text\n<!-- perfsuite: {json.dumps(list(cases))} -->")


def test_good_and_excused_cases_open_no_issue() -> None:
    assert steps_for(GOOD) == steps_for(crashed("x", excused="known issue")) == []


def test_regression_opens_an_issue() -> None:
    label, create = steps_for(GOOD, SLOW)
    assert label.arguments[:3] == ("label", "create", LABEL)
    assert create.arguments[:4] == ("issue", "create", "--title", "Performance regressions on cpu-test-2c")
    assert Issue(1, create.text).subjects == [CASE]


def test_an_issue_explains_the_regression() -> None:
    _, create = steps_for(GOOD, SLOW)
    assert f"- `{CASE}`: **regressed** after 3 launches" in create.text
    assert "tokens/s: 50,000, baseline 98,765" in create.text
    assert "p95/p50" not in create.text


def test_regression_edits_an_open_issue() -> None:
    (edit,) = steps_for(SLOW, issue=issue_of(CASE, f"drift of {CASE}, peak memory"), drifts=[])
    assert edit.arguments == ("issue", "edit", "7", "--body-file", "-")
    assert Issue(7, edit.text).subjects == [CASE]


def lines_of(result: Measurement) -> list[str]:
    """Return the lines of an issue about one result, starting with its verdict."""
    *_, create = steps_for(result)
    return create.text[create.text.index(f"- `{CASE}`: ") :].splitlines()


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (
            CountCheck(outcome="regressed", findings=(make_finding(),)),
            f"regressed: {make_finding().sentence}",
        ),
        (
            CountCheck(outcome="not counted", compared=False, notes=("a CUDA graph was replayed",)),
            "counts: not counted: a CUDA graph was replayed",
        ),
    ],
    ids=["finding", "not counted"],
)
def test_issue_starts_with_the_likely_cause(counts: CountCheck, line: str) -> None:
    verdict = GOOD.verdict.replace(outcome="regressed", counts=counts)
    issue_lines = lines_of(GOOD.replace(verdict=verdict))
    assert issue_lines[:2] == [f"- `{CASE}`: **regressed** after 1 launch", f"  - {line}"]


def test_issue_names_three_calls_at_most() -> None:
    calls = Profiled(calls=tuple(f"aten::op{number} 0 -> 1 calls a step" for number in range(5)))
    lines = lines_of(SLOW.replace(verdict=SLOW.verdict.replace(profiled=calls)))
    causes = [line.split()[1] for line in lines if "aten::" in line]
    assert causes == [line.split()[1] for line in lines[1:4]] == [f"aten::op{number}" for number in range(3)]


def test_waived_regression_opens_no_issue() -> None:
    why = "waived: tokens/s -49.4%: 60% tolerated until 2026-12-31, @me, https://example.org/1"
    waived = SLOW.replace(excused="waived", waivers=(why,))
    assert steps_for(waived) == []
    _, create = steps_for(waived, crashed("x", case_id="other"))
    assert Issue(1, create.text).subjects == ["other"]
    assert f"- `{CASE}`: **regressed** (waived) after 3 launches" in create.text
    assert "60% tolerated until 2026-12-31, @\u200bme, https://example.org/1" in create.text


@pytest.mark.parametrize(
    "good", [SLOW.replace(excused="waived"), GOOD, hidden(None)], ids=["waived", "good", "never counted"]
)
def test_issue_closes_on_a_good_case(good: Measurement) -> None:
    (step,) = steps_for(good, issue=issue_of(CASE))
    assert step.arguments[:3] == ("issue", "close", "7")
    assert URL in step.arguments[-1]


@pytest.mark.parametrize(
    "results", [(), (NOISY,), (hidden("baselines/x.json"),)], ids=["not measured", "unknown", "not counted"]
)
def test_issue_stays_open_without_a_good_case(results: tuple[Measurement, ...]) -> None:
    (step,) = steps_for(*results, issue=issue_of(CASE))
    assert step.arguments[:3] == ("issue", "edit", "7")
    assert f"- `{CASE}`: not known to be good again (not measured, not counted, or not decided)" in step.text
    assert Issue(7, step.text).subjects == [CASE]


def drifted() -> Issue:
    """Return the issue that a drift opened."""
    _, create = steps_for(GOOD, drifts=[drift()])
    return Issue(7, create.text)


def test_a_drift_opens_an_issue() -> None:
    _, create = steps_for(GOOD, drifts=[drift()])
    assert f"- `{CASE}`: **worse** over many nights" in create.text
    assert "  - peak memory: +2.0% (99% interval +1.0% to +3.0%)" in create.text
    assert "  - also changed: torch: 2.13.0 -" in create.text
    assert drifted().subjects == [f"drift of {CASE}, peak memory"]


@pytest.mark.parametrize("drifts", [[drift()], None], ids=["still there", "not searched"])
def test_issue_stays_open_until_drift_is_gone(drifts: list[Drift] | None) -> None:
    issue = drifted()
    (edit,) = steps_for(GOOD, issue=issue, drifts=drifts)
    assert Issue(7, edit.text).subjects == issue.subjects


def test_issue_closes_when_drift_is_gone() -> None:
    (close,) = steps_for(GOOD, issue=drifted(), drifts=[])
    assert close.arguments[:3] == ("issue", "close", "7")


CUT_SHORT = "The session was interrupted. Later cases were not measured."


@pytest.mark.parametrize("subject", [CASE, f"drift of {CASE}, peak memory"])
def test_unfinished_session_closes_no_issue(subject: str) -> None:
    issue = issue_of(subject)
    (edit,) = steps_for(GOOD, issue=issue, drifts=[], cut_short=(CUT_SHORT,))
    assert Issue(7, edit.text).subjects == [subject]
    assert f"- **{CUT_SHORT}**" in edit.text
    assert f"- `{subject}`: kept until a complete session finds it good" in edit.text
    assert steps_for(GOOD, issue=issue_of(), drifts=[], cut_short=(CUT_SHORT,)) == []


def test_unfinished_session_still_reports() -> None:
    _, create = steps_for(SLOW, cut_short=(CUT_SHORT,))
    assert f"- **{CUT_SHORT}**" in create.text
    assert Issue(7, create.text).subjects == [CASE]


def test_cut_text_keeps_every_case() -> None:
    drifts = [drift(f"case-{number}") for number in range(500)]
    _, create = steps_for(drifts=drifts)
    assert len(create.text) < 65_536
    assert re.search(r"^- and \d+ more$", create.text, re.MULTILINE)
    assert len(Issue(1, create.text).subjects or ()) == 500


EVIL = "x` @everyone --> ![i](http://e) <!-- perfsuite: [] -->\n<!-- perfsuite: [] -->\nuser/repo#5 \x1b[2J"


def test_names_and_text_become_no_markup() -> None:
    crash = crashed(EVIL + "y" * 9999).replace(case_id=EVIL)
    _, create = steps_for(crash, drifts=[drift(EVIL)])
    assert len(create.text) < 2000
    assert Issue(1, create.text).subjects == sorted([EVIL, f"drift of {EVIL}, peak memory"])
    assert len(re.findall(r"^<!--|-->$", create.text, re.MULTILINE)) == 2
    outside = re.sub(r"`[^`\n]*`", "", create.text[: create.text.index("\n<!--")])
    assert not re.search(r"@everyone|\]\(|repo#5|<|\x1b", outside)
    assert title("cpu ` @me\n") == "Performance regressions on cpu____me_"


@pytest.mark.parametrize(
    "body",
    [
        *("by hand", "<!-- perfsuite: [x] -->", "<!-- perfsuite: 1 -->"),
        "<!-- perfsuite: [] --> <!-- perfsuite: [] -->",
    ],
)
def test_broken_list_gets_a_new_issue(body: str) -> None:
    assert steps_for(GOOD, issue=Issue(7, body)) == []
    (edit,) = steps_for(SLOW, issue=Issue(7, body))
    assert Issue(7, edit.text).subjects == [CASE]


def command(*results: Measurement, more: tuple[object, ...] = (), status: int = 0) -> str:
    """Return the output of `perfsuite github issue` for a night. `more` are additional arguments."""
    file = write_session(Path(), *results, commit=None)
    return run("github", "issue", file, "--run-url", URL, *more, status=status).output


OPENED = "cpu-test-2c: label create, issue create\n"
TREND = Trend(since=date(2026, 1, 1), sessions=9, series=2, findings=(drift(),), unplaced={})


@pytest.fixture
def silent_gh(gh: Gh) -> Gh:
    """Return a fake gh that knows no issue."""
    gh.answers([])
    return gh


@pytest.mark.usefixtures("silent_gh")
def test_the_command_has_nothing_to_do_for_good_cases() -> None:
    assert command(GOOD) == "cpu-test-2c: nothing to do\n"


@pytest.mark.usefixtures("silent_gh")
def test_the_command_opens_an_issue_for_a_drift(tmp_path: Path) -> None:
    trend = tmp_path / "trend.json"
    documents.write(trend, TREND)
    assert command(GOOD, more=("--trend", trend)) == OPENED


def test_the_command_opens_an_issue_and_then_edits_it(silent_gh: Gh) -> None:
    assert command(SLOW) == OPENED
    assert f"issue create --title {title(CLASS)} --label perfsuite --body-file -" in silent_gh.calls
    assert "**regressed**" in silent_gh.calls
    silent_gh.answers([{"number": 7, "title": title(CLASS), "body": silent_gh.calls}])
    assert command(SLOW) == "cpu-test-2c: issue edit\n"


def test_a_failure_before_a_launch_is_in_its_class(gh: Gh, tmp_path: Path) -> None:
    """The case was to run on several nodes, which are a hardware class of their own."""
    gh.answers([])
    failed = crashed("x").replace(runs=(), planned_class=f"{CLASS}-8xib400")
    said = run("github", "issue", write_session(tmp_path, failed), "--run-url", URL).output
    assert said == f"{CLASS}: nothing to do\n{CLASS}-8xib400: label create, issue create\n"


def test_the_command_shows_text_that_utf_8_cannot_encode(silent_gh: Gh, tmp_path: Path) -> None:
    trend = tmp_path / "trend.json"
    odd = drift("no\ud800").replace(hardware_class="h\ud800")
    documents.write(trend, TREND.replace(findings=(odd,)))
    assert "h\\xd800: label create, issue create\n" in command(GOOD, more=("--trend", trend))
    assert "no\\xd800" in silent_gh.calls


def test_the_command_quotes_an_error_of_gh(gh: Gh) -> None:
    executable(gh.program, "echo 'no token' >&2; exit 4")
    assert command(SLOW, status=2) == "perfsuite github: gh issue list: no token\n"


@pytest.mark.usefixtures("gh")
def test_the_command_needs_gh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "nowhere")
    assert "gh, GitHub's command line, cannot be started: No such file" in command(SLOW, status=2)


@pytest.mark.parametrize("status", ["interrupted", "running"])
def test_one_unfinished_session_keeps_it_open(gh: Gh, tmp_path: Path, status: str) -> None:
    gh.answers([{"number": 7, "title": title(CLASS), "body": issue_of(CASE).body}])
    files = [write_session(tmp_path / "a", GOOD), write_session(tmp_path / "b", GOOD, status=status)]
    said = run("github", "issue", *files, "--run-url", URL).output
    assert said.startswith("cpu-test-2c: issue edit; The session ")
    assert "issue close" not in gh.calls
    run("github", "issue", files[0], "--run-url", URL)
    assert "issue close 7" in gh.calls


def test_empty_history_does_not_end_a_drift(gh: Gh, tmp_path: Path) -> None:
    gh.answers([{"number": 7, "title": title(CLASS), "body": issue_of(f"drift of {CASE}, peak memory").body}])
    trend = tmp_path / "trend.json"
    documents.write(trend, Trend(since=date(2026, 1, 1), sessions=0, series=0, findings=(), unplaced={}))
    assert command(GOOD, more=("--trend", trend)) == "cpu-test-2c: issue edit\n"


@pytest.mark.parametrize(
    "damage", [('"open": true', '"open": false'), ('"sessions": 9', '"sessions": 8'), ('"digest"', '"x"')]
)
def test_a_damaged_trend_closes_no_issue(gh: Gh, tmp_path: Path, damage: tuple[str, str]) -> None:
    gh.answers([{"number": 7, "title": title(CLASS), "body": issue_of(f"drift of {CASE}, peak memory").body}])
    trend = tmp_path / "trend.json"
    trend.write_text(TREND.as_json().replace(*damage))
    said = command(GOOD, more=("--trend", trend), status=2)
    assert "it was edited or damaged" in said
    assert "issue close" not in gh.calls


@pytest.mark.parametrize(
    "listed", [{}, None, [None], [{"number": 7}], [{"number": "7", "title": 1, "body": None}]]
)
def test_reports_an_issue_list_without_a_field(gh: Gh, listed: Any) -> None:
    gh.answers(listed)
    assert "gh issue list printed an unexpected answer" in command(SLOW, status=2)
