from __future__ import annotations

import json
import os
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from perfsuite import documents
from perfsuite.cli.github_issue import LABEL, Issue, Step, steps, title
from perfsuite.history.changepoint import ChangePoint
from perfsuite.history.trend import Drift, Trend
from perfsuite.results.outcome import CountCheck, Profiled
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Measurement
from tests.cli.commands import run
from tests.counted import make_finding
from tests.samples import BEFORE, make_result, make_run, now, write_session

URL = "https://example.org/runs/1"
CLASS = "cpu-test-2c"
GH = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1 $2" in
  "issue list") cat "$OPEN" ;;
  "issue create" | "issue edit") cat >> "$CALLS" ;;
esac
"""

GOOD = make_result(BEFORE)
SLOW = make_result(*[now(tokens_per_s=50000)] * 3)
NOISY = make_result(BEFORE, verdict=GOOD.verdict.replace(outcome="inconclusive"))
CASE = BEFORE.case.id


def hidden(baseline: str | None) -> Measurement:
    """Its step was not counted, and was if there is a baseline."""
    counts = CountCheck(outcome="not counted", compared=False, notes=("a",), baseline_file=baseline)
    return GOOD.replace(verdict=GOOD.verdict.replace(counts=counts))


def crashed(message: str, **changes: Any) -> Measurement:
    return make_result(make_run(failure=Failure(kind="crash", message=message)), **changes)


def told(*results: Measurement, issue: Issue | None = None, drifts: list[Drift] | None = None) -> list[Step]:
    return steps(CLASS, results, issue, URL, drifts)


def drift(case: str = CASE) -> Drift:
    place = {"index": 9, "earliest": 8, "latest": 10}
    change = ChangePoint(**place, before=1.0, after=1.02, relative=0.02, interval=(0.01, 0.03))
    return Drift(
        hardware_class=CLASS,
        case=case,
        metric="peak memory",
        change=change,
        first_day=date(2026, 1, 1),
        last_day=date(2026, 1, 3),
        first_commit="a" * 40,
        last_commit="b" * 40,
        commits_between=2,
        environment=("torch: 2.13.0 -> 2.14.0",),
        worse=True,
        accepted=False,
        open=True,
    )


def issue_of(*cases: str) -> Issue:
    return Issue(7, f"text\n<!-- perfsuite: {json.dumps(list(cases))} -->")


def test_a_regression_opens_an_issue_with_the_figures_which_is_then_brought_up_to_date() -> None:
    assert told(GOOD) == told(crashed("x", excused="known issue")) == []
    label, create = told(GOOD, SLOW)
    assert label.arguments[:3] == ("label", "create", LABEL)
    assert create.arguments[:4] == ("issue", "create", "--title", "Performance regressions on cpu-test-2c")
    assert f"- `{CASE}`: **regressed** after 3 launches" in create.text
    assert "tokens/s: 50,000, baseline 98,765" in create.text
    assert "p95/p50" not in create.text
    assert Issue(1, create.text).subjects == [CASE]
    (edit,) = told(SLOW, issue=issue_of(CASE, f"drift of {CASE}, peak memory"), drifts=[])
    assert edit.arguments == ("issue", "edit", "7", "--body-file", "-")
    assert Issue(7, edit.text).subjects == [CASE]


def test_counts_that_regressed_are_named_and_why_there_are_none() -> None:
    finding, why = make_finding(), "a CUDA graph was replayed"
    for counts, line in (
        (CountCheck(outcome="regressed", findings=(finding,)), f"regressed: {finding.sentence}"),
        (CountCheck(outcome="not counted", compared=False, notes=(why,)), f"counts: not counted: {why}"),
    ):
        verdict = GOOD.verdict.replace(outcome="regressed", counts=counts)
        [*_, create] = told(make_result(BEFORE, verdict=verdict))
        assert f"- `{CASE}`: **regressed** after 1 launch\n  - {line}" in create.text


def test_an_issue_says_first_what_is_likely_to_be_the_cause() -> None:
    found = Profiled(calls=tuple(f"aten::op{number} 0 -> 1 calls a step" for number in range(5)))
    slow = SLOW.replace(verdict=SLOW.verdict.replace(profiled=found))
    _, create = told(slow)
    lines = create.text.splitlines()
    at = next(number for number, line in enumerate(lines) if CASE in line)
    assert [line.split()[1] for line in lines[at + 1 : at + 4]] == [f"aten::op{n}" for n in range(3)]
    assert "aten::op3" not in create.text


def test_a_waived_regression_opens_no_issue_and_is_told_where_one_is_open() -> None:
    why = "waived: tokens/s -49.4%: 60% tolerated until 2026-12-31, @me, https://example.org/1"
    waived = SLOW.replace(excused="waived", waivers=(why,))
    assert told(waived) == []
    _, create = told(waived, crashed("x", case_id="other"))
    assert Issue(1, create.text).subjects == ["other"]
    assert f"- `{CASE}`: **regressed** (waived) after 3 launches" in create.text
    assert "60% tolerated until 2026-12-31, @\u200bme, https://example.org/1" in create.text


@pytest.mark.parametrize(
    ("night", "call"),
    [
        pytest.param((SLOW.replace(excused="waived"),), "close", id="waived"),
        pytest.param((GOOD,), "close", id="good"),
        pytest.param((), "edit", id="not measured"),
        pytest.param((NOISY,), "edit", id="inconclusive"),
        pytest.param((hidden(None),), "close", id="never counted"),
        pytest.param((hidden("baselines/x.json"),), "edit", id="not counted again"),
    ],
)
def test_an_issue_closes_only_when_its_cases_are_known_to_be_good(
    night: tuple[Measurement, ...], call: str
) -> None:
    (step,) = told(*night, issue=issue_of(CASE))
    assert step.arguments[:3] == ("issue", call, "7")
    if call == "close":
        assert URL in step.arguments[-1]
    else:
        assert f"- `{CASE}`: not measured or not counted again, or not known" in step.text
        assert Issue(7, step.text).subjects == [CASE]


def test_a_drift_opens_an_issue_and_keeps_it_open_until_it_is_gone() -> None:
    _, create = told(GOOD, drifts=[drift()])
    assert f"- `{CASE}`: **worse** over many nights" in create.text
    assert "  - peak memory: +2.0% (99 % interval +1.0% to +3.0%)" in create.text
    assert "  - changed there: torch: 2.13.0 -" in create.text
    issue = Issue(7, create.text)
    assert issue.subjects == [f"drift of {CASE}, peak memory"]
    for drifts in ([drift()], None):  # None: nobody looked
        (edit,) = told(GOOD, issue=issue, drifts=drifts)
        assert Issue(7, edit.text).subjects == issue.subjects
    (close,) = told(GOOD, issue=issue, drifts=[])
    assert close.arguments[:3] == ("issue", "close", "7")


def test_a_long_text_is_cut_and_every_case_is_still_known() -> None:
    drifts = [drift(f"case-{number}") for number in range(500)]
    _, create = told(drifts=drifts)
    assert len(create.text) < 65_536
    assert re.search(r"^- and \d+ more$", create.text, re.MULTILINE)
    assert len(Issue(1, create.text).subjects or ()) == 500


EVIL = "x` @everyone --> ![i](http://e) <!-- perfsuite: [] -->\n<!-- perfsuite: [] -->\nuser/repo#5 \x1b[2J"


def test_no_name_and_no_text_is_markup_a_mention_or_a_list() -> None:
    crash = crashed(EVIL + "y" * 9999).replace(case_id=EVIL)
    _, create = told(crash, drifts=[drift(EVIL)])
    assert len(create.text) < 2000
    assert Issue(1, create.text).subjects == sorted([EVIL, f"drift of {EVIL}, peak memory"])
    assert len(re.findall(r"^<!--|-->$", create.text, re.MULTILINE)) == 2
    outside = re.sub(r"`[^`\n]*`", "", create.text[: create.text.index("\n<!--")])
    assert not re.search(r"@everyone|\]\(|repo#5|<|\x1b", outside)
    assert title("cpu ` @me\n") == "Performance regressions on cpu____me_"


LIST = "<!-- perfsuite: [] -->"


@pytest.mark.parametrize(
    "body", ["by hand", "<!-- perfsuite: [x] -->", f"{LIST} {LIST}", "<!-- perfsuite: 1 -->"]
)
def test_an_issue_whose_list_somebody_broke_is_not_closed_and_gets_a_new_one(body: str) -> None:
    broken = Issue(7, body)
    assert told(GOOD, issue=broken) == []
    (edit,) = told(SLOW, issue=broken)
    assert Issue(7, edit.text).subjects == [CASE]


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for gh that keeps what it is told, no open issue, and a night with a regression."""
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "open.json").write_text("[]")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("OPEN", str(tmp_path / "open.json"))
    write_session(tmp_path, SLOW, commit=None)
    return tmp_path


def command(night: Path, *more: object, status: int = 0) -> Result:
    """What the command says of the night; `more` words of its line."""
    return run("github", "issue", night / "results.json", "--run-url", URL, *more, status=status)


OPENED = "cpu-test-2c: label create, issue create\n"


@pytest.mark.launch
def test_the_command_tells_gh(night: Path) -> None:
    assert command(night).output == OPENED
    calls = (night / "calls").read_text()
    assert (
        "issue create --title Performance regressions on cpu-test-2c --label perfsuite --body-file -" in calls
    )
    assert "**regressed**" in calls
    listed = [{"number": 7, "title": "Performance regressions on cpu-test-2c", "body": calls}]
    (night / "open.json").write_text(json.dumps(listed))
    assert command(night).output == "cpu-test-2c: issue edit\n"


TREND = Trend(since=date(2026, 1, 1), sessions=9, series=2, findings=(drift(),), unplaced={})


@pytest.mark.launch
def test_drifts_of_a_history_count(night: Path) -> None:
    write_session(night, GOOD)
    assert command(night).output == "cpu-test-2c: nothing to do\n"
    documents.write(night / "trend.json", TREND)
    assert command(night, "--trend", night / "trend.json").output == OPENED


@pytest.mark.launch
def test_what_has_no_encoding_is_told_all_the_same(night: Path) -> None:
    text = TREND.as_json().replace(CASE, "no\\ud800").replace(CLASS, "h\\ud800")
    (night / "trend.json").write_text(text)
    told = command(night, "--trend", night / "trend.json").output
    assert "h\\xd800: label create, issue create\n" in told
    assert "no\\xd800" in (night / "calls").read_text()


@pytest.mark.launch
def test_what_gh_says_is_shown(night: Path) -> None:
    (night / "gh").write_text("#!/bin/sh\necho 'no token' >&2; exit 4\n")
    assert command(night, status=2).stderr == "perfsuite github: gh issue list: no token\n"


def test_without_gh(night: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(night / "nowhere"))
    assert "gh, GitHub's command line, cannot be started: No such file" in command(night, status=2).stderr
