import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from perfsuite.results.counts import RankCounts
from perfsuite.results.outcome import CountCheck, Finding, Outcome
from perfsuite.results.session_file import Measurement
from perfsuite.results.waivers import Waiver
from perfsuite.verdict.waivers import are_waived, remarks, waive
from tests.counted import make_counts, make_finding
from tests.samples import BEFORE, make_image_result, make_result, metric_check, never_run, now
from tests.verdict.judging import outcomes

TODAY = date(2026, 11, 24)
YESTERDAY = date(2026, 11, 23)
ISSUE = "https://example.org/1"
CASE = BEFORE.case.id
SLOW = make_result(*[now(tokens_per_s=80_000)] * 3)  # 19.0% fewer
SLOW_WITH_STALLS = make_result(*[now(tokens_per_s=80_000, tokens_per_s_mean=79_000)] * 3)  # like any slowdown
GOOD = make_result(BEFORE)


def waiver(**changes: Any) -> Waiver:
    values = {"case": "fake-*", "metric": "tokens_per_s", "tolerated": "22%", "owner": "@me", **changes}
    return Waiver(**{"issue": ISSUE, "until": date(2026, 12, 31), **values})


def counted(
    *findings: Finding, outcome: Any = "regressed", timed: Any = None, counts: Any = None
) -> Measurement:
    """Return the result of a case whose counts changed. Its times are unchanged, or those of `timed`."""
    run = BEFORE.replace(counts=(RankCounts(ranks=(0, 1), counts=make_counts()),))
    checks = (timed or GOOD).verdict.checks
    counts = CountCheck(outcome=counts or outcome, findings=findings)
    verdict = GOOD.verdict.replace(outcome=outcome, counts=counts, checks=checks)
    return make_result(run, verdict=verdict)


GATHER = make_finding(
    quantity="all_gather of 64 ranks", field="all_gather of 64 ranks: bytes", before=100, now=114
)
WRITTEN = make_finding(
    quantity="bytes written", field="bytes written", before=100, now=114, span="save checkpoint"
)
NEW = make_finding(quantity="host reads", field="host reads in backward", unit="calls", before=0, now=24)


@pytest.mark.parametrize(
    ("result", "fields"),
    [
        (SLOW, {}),  # matches the name of a metric
        (SLOW, {"metric": "tokens/s"}),  # matches the label of a metric
        (SLOW, {"metric": "tokens*", "case": CASE}),
        (SLOW, {"tolerated": "19.1%"}),  # the waiver is barely large enough
        (SLOW, {"until": TODAY}),  # today is the waiver's last day
        (make_image_result(), {"case": "*", "metric": "samples_*", "tolerated": "60%"}),
        (counted(GATHER), {"metric": "all_gather of 64 ranks"}),  # `metric` names a quantity
        (counted(GATHER), {"metric": "all_gather"}),  # `metric` names a kind of collective
        (counted(GATHER), {"metric": "all_gather", "tolerated": 14}),  # `tolerated` limits the growth
        (counted(NEW), {"metric": "host reads", "tolerated": 24}),  # `tolerated` limits a growth from 0
        (counted(NEW), {"metric": "host reads in backward", "tolerated": 24}),  # `metric` names a field
        (counted(WRITTEN), {"metric": "save checkpoint: bytes written"}),  # `metric` names an event's work
    ],
)
def test_a_regression_within_the_bound_is_waived(result: Measurement, fields: dict[str, Any]) -> None:
    mine = waiver(**fields)
    is_waived, lines = waive(result, [waiver(metric="peak memory"), mine], TODAY)
    assert is_waived
    assert lines
    assert all(line.startswith("waived: ") and line.endswith(f": {mine.terms}") for line in lines)


def test_refuses_an_exceeded_or_expired_waiver() -> None:
    for result, fields, why in (
        (SLOW, {"tolerated": "18.9%"}, "beyond the waiver of tokens_per_s for fake-*: 18.9%"),
        (
            SLOW,
            {"until": YESTERDAY},
            f"of tokens_per_s for fake-* ended on 2026-11-23, owner @me, issue {ISSUE}",
        ),
        (
            SLOW,
            {"tolerated": 22},
            'tolerates 22, but only counts can grow by a number. Give a share, such as "22%"',
        ),
        # Growth from 0 exceeds any percentage.
        (counted(NEW), {"metric": "host reads", "tolerated": "999%"}, "beyond the waiver"),
        (counted(NEW), {"metric": "host reads", "tolerated": 23}, "beyond the waiver"),
        (counted(GATHER), {"metric": "all_gather", "tolerated": "13.9%"}, "beyond the waiver"),
    ):
        is_waived, (line,) = waive(result, [waiver(**fields)], TODAY)
        assert not is_waived
        assert line.startswith("not waived: ")
        assert why in line


def test_every_regression_needs_its_own_waiver() -> None:
    both = counted(GATHER, NEW, timed=SLOW)
    one = [waiver(), waiver(metric="all_gather")]
    is_waived, lines = waive(both, one, TODAY)
    assert (is_waived, len(lines)) == (False, 3)
    assert lines[2] == f"not waived: {NEW.sentence}: no waiver for this case names this metric or count"
    assert waive(both, [*one, waiver(metric="host reads", tolerated=24)], TODAY)[0]
    widest = waive(SLOW, [waiver(tolerated="5%"), waiver()], TODAY)
    assert widest == (True, (f"waived: tokens/s -19.0%: {waiver().terms}",))


def test_steps_waiver_does_not_cover_an_event() -> None:
    kernels = make_finding(quantity="kernels", field="kernels in forward", unit="calls", before=100, now=110)
    for span, is_covered in (("", True), ("evaluate", False)):
        result = counted(kernels.replace(span=span))
        assert waive(result, [waiver(metric="kernels")], TODAY)[0] is is_covered


@pytest.mark.parametrize("metric", ["tokens_per_s", "tokens/s"])
def test_speed_waiver_covers_speed_with_stalls(metric: str) -> None:
    is_waived, lines = waive(SLOW_WITH_STALLS, [waiver(metric=metric)], TODAY)
    assert is_waived
    assert [line.split(" -")[0] for line in lines] == ["waived: tokens/s", "waived: tokens/s with stalls"]
    images = make_image_result(tokens_per_s_mean=1200.0)
    assert waive(images, [waiver(case="*", metric="samples/s", tolerated="60%")], TODAY)[0]


def test_speed_waiver_does_not_cover_more_stalls() -> None:
    stalled = make_result(*[now(tokens_per_s=80_000, tokens_per_s_mean=60_000)] * 3)
    is_waived, lines = waive(stalled, [waiver()], TODAY)
    assert not is_waived
    assert lines[1].startswith("not waived: tokens/s with stalls -")


def test_stall_waiver_does_not_cover_the_speed() -> None:
    is_waived, lines = waive(SLOW_WITH_STALLS, [waiver(metric="tokens/s with stalls")], TODAY)
    assert not is_waived
    assert lines[-1].startswith("not waived: tokens/s -")
    assert lines[-1].endswith(": no waiver for this case names this metric or count")


def test_example_on_the_page_waives_a_slowdown() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text()
    (example,) = re.findall(r"```toml\n(\[\[waiver\]\]\n.*?)```", page, re.DOTALL)
    (fields,) = tomllib.loads(example)["waiver"]
    assert waive(SLOW_WITH_STALLS, [Waiver(**{**fields, "case": "*"})], TODAY)[0]


def test_waives_no_regression_of_unknown_size() -> None:
    checks = tuple(check.replace(change=None) for check in SLOW.verdict.checks)
    unknown = SLOW.replace(verdict=SLOW.verdict.replace(checks=checks))
    is_waived, lines = waive(unknown, [waiver(metric="*", tolerated="1000%")], TODAY)
    assert not is_waived
    assert lines[0].startswith("not waived: ")


@pytest.mark.parametrize(
    ("result", "fields"),
    [
        (SLOW, {"case": "ddp-*"}),
        *((SLOW, {"metric": metric}) for metric in ("peak memory", "tokens_per_second")),
        (SLOW.replace(verdict=SLOW.verdict.replace(checks=())), {"metric": "*", "tolerated": "1000%"}),
        # A waiver applies to regressions only.
        (SLOW.replace(verdict=SLOW.verdict.replace(outcome="failed", failure="loss")), {}),
        *((never_run(), {}), (GOOD, {})),
    ],
)
def test_a_waiver_of_something_else_says_nothing(result: Measurement, fields: dict[str, Any]) -> None:
    assert waive(result, [waiver(**fields)], TODAY) == (False, ())
    assert waive(result, [], TODAY) == (False, ())


OF = "perf-waivers.toml: the waiver of tokens_per_s for"
GONE = f"{OF} fake-* is no longer needed: remove it"


def test_reports_a_waiver_that_matches_no_case() -> None:
    mine = waiver(case="ddp-*")
    assert remarks([mine], [GOOD], {CASE, "x"}, TODAY) == (f"{OF} ddp-* matches none of the 2 cases here",)
    assert remarks([mine], [GOOD], (), TODAY) == ()
    assert remarks([waiver()], [], {CASE}, TODAY) == ()  # the case exists, but was not selected


def test_event_waiver_is_known_by_its_name() -> None:
    counts = make_counts(spans={"save checkpoint": make_counts(bytes_written=100)})
    run = BEFORE.replace(counts=(RankCounts(ranks=(0, 1), counts=counts),))
    saved = make_result(run, verdict=counted(outcome="passed").verdict)
    (remark,) = remarks([waiver(metric="save checkpoint: bytes*")], [saved], {CASE}, TODAY)
    assert remark.endswith("is no longer needed: remove it")


def test_unmatched_metric_waiver_lists_the_known() -> None:
    (remark,) = remarks([waiver(metric="tokens")], [counted(GATHER)], {CASE}, TODAY)
    head = (
        f"{OF.replace('tokens_per_s', 'tokens')} fake-* matches no metric or count of its cases. These have "
    )
    assert remark.startswith(head)
    names = {"tokens_per_s", "peak memory", "kernels in forward", "reduce_scatter", "all_gather of 64 ranks"}
    assert names <= {*remark.removeprefix(head).split(", ")}
    # The case never ran, so its metrics are unknown, and nothing is reported.
    assert remarks([waiver(metric="tokens")], [never_run()], {CASE}, TODAY) == ()


@pytest.mark.parametrize("metric", ["tokens_per_s", "nosuch"])
def test_keeps_waivers_of_unmeasured_cases(metric: str) -> None:
    mine = waiver(metric=metric)
    (said,) = remarks([mine], [GOOD], {CASE, "ddp-other"}, TODAY)
    assert "of the 2 cases" not in said, "the waiver matches one of them"
    assert remarks([mine], [GOOD], {CASE, "fake-other"}, TODAY) == ()
    assert remarks([mine], [GOOD], (), TODAY) == (), "the list of all cases is unknown"
    assert remarks([mine.replace(case=CASE)], [GOOD], (), TODAY) != ()


@pytest.mark.parametrize(
    ("results", "metric", "is_gone"),
    [
        ([GOOD], "tokens_per_s", True),
        ([GOOD, SLOW], "tokens_per_s", False),  # another case needs the waiver
        ([], "tokens_per_s", False),  # the case was not measured
        ([SLOW], "peak memory", True),
        ([make_result(BEFORE, before=None)], "tokens_per_s", False),  # the case was only recorded
        ([counted(outcome="passed")], "reduce_scatter", True),
        ([counted(GATHER)], "reduce_scatter", True),  # another count regressed
        ([counted(GATHER)], "all_gather", False),
        ([counted(outcome="passed", counts="not counted")], "reduce_scatter", False),
    ],
)
def test_a_waiver_that_no_case_needs_says_so(results: list[Measurement], metric: str, is_gone: bool) -> None:
    mine = waiver(metric=metric)
    said = remarks([mine], results, {CASE}, TODAY)
    assert said == ((GONE.replace("tokens_per_s", mine.metric),) if is_gone else ())
    ended = remarks([mine.replace(until=date(2026, 11, 1))], results, {CASE}, TODAY)
    assert ended == tuple(line.replace(" is ", " (ended on 2026-11-01) is ") for line in said)


def test_speed_waiver_does_not_cover_stalls_alone() -> None:
    stalled = make_result(*[now(tokens_per_s_mean=79_000)] * 3)
    assert outcomes(stalled.verdict)["tokens_per_s"] == "passed"
    assert waive(stalled, [waiver()], TODAY) == (False, ())


def with_open_speed(result: Measurement, outcome: Outcome) -> Measurement:
    """Return a result in which both speeds have this outcome."""
    checks = tuple(
        check.replace(outcome=outcome) if check.metric.startswith("tokens_per_s") else check
        for check in result.verdict.checks
    )
    return result.replace(verdict=result.verdict.replace(checks=checks))


@pytest.mark.parametrize("outcome", ["inconclusive", "improved"])
def test_waived_counts_do_not_hide_strict_outcomes(outcome: Outcome) -> None:
    both = with_open_speed(counted(GATHER), outcome)
    mine = [waiver(metric="all_gather")]
    is_waived, lines = waive(both, mine, TODAY, {outcome})
    assert not is_waived
    assert lines[1:] == (
        f"not waived: tokens/s: {outcome}, and --perf-strict={outcome} is set",
        f"not waived: tokens/s with stalls: {outcome}, and --perf-strict={outcome} is set",
    )


def test_other_outcomes_do_not_end_a_waiver() -> None:
    mine = [waiver(metric="all_gather")]
    assert waive(with_open_speed(counted(GATHER), "inconclusive"), mine, TODAY, {"improved"})[0]
    assert waive(counted(GATHER), mine, TODAY, {"inconclusive", "improved"})[0]


def test_strictness_ignores_a_span_left_open() -> None:
    span = metric_check(outcome="inconclusive", metric="seconds of evaluate", label="seconds of evaluate")
    verdict = SLOW.verdict.replace(checks=(*SLOW.verdict.checks, span))
    assert waive(SLOW.replace(verdict=verdict), [waiver()], TODAY, {"inconclusive"})[0]


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, True), ({"tolerated": "1%"}, False), ({"case": "ddp-*"}, False)]
)
def test_checks_are_waived_within_the_bound(fields: dict[str, Any], expected: bool) -> None:
    checks = SLOW_WITH_STALLS.verdict.checks
    assert are_waived(checks, BEFORE.case, [waiver(**fields)], TODAY) is expected
