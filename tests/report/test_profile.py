import pytest

from perfsuite.report import profile
from perfsuite.report.text import NONE
from perfsuite.results.outcome import Profiled, Verdict
from perfsuite.results.profile import TakenProfile, Work
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.overall import THE_SAME
from perfsuite.verdict.profiled import NOT_IN_EACH_STEP
from tests.samples import judged, make_compared, make_result, now
from tests.traces import EAGER, make_profile, taken

FOUND = Profiled(
    calls=("aten::bmm 0 -> 24 calls a step", "aten::softmax 0 -> 4 calls a step"),
    hints=("hint from times: compute 1.0 -> 2.0 ms (+1.0 of +1.0 ms)",),
    notes=("a note",),
)
COUNTED = "FLOPs in forward: 1.0 -> 2.0 MFLOP"
EQUAL = f"{THE_SAME} packages, threads and the machine"
NOW_AND_THEN = f"{NOT_IN_EACH_STEP}: aten::item"


def make_explained() -> Measurement:
    """Return a comparison in which arm B computes attention with other operators than arm A."""
    result = judged(make_compared(), profiled=FOUND, explained=COUNTED)
    return result.replace(profile=taken(EAGER, EAGER), profile_before=taken())


@pytest.mark.parametrize(
    ("explained", "profiled", "lines"),
    [
        (COUNTED, FOUND, [*FOUND.calls, COUNTED, *FOUND.hints, *FOUND.notes]),
        (EQUAL, FOUND, [*FOUND.calls, *FOUND.hints, *FOUND.notes]),
        (EQUAL, FOUND.replace(calls=()), [EQUAL, "no call differs", *FOUND.hints, *FOUND.notes]),
        (EQUAL, FOUND.replace(calls=(), notes=(NOW_AND_THEN,)), [EQUAL, *FOUND.hints, NOW_AND_THEN]),
        (COUNTED, None, [COUNTED]),
        (None, None, []),
    ],
    ids=["both", "equal counts", "equal calls", "calls now and then", "only counts", "none"],
)
def test_calls_precede_counts_and_times(
    explained: str | None, profiled: Profiled | None, lines: list[str]
) -> None:
    verdict = Verdict(outcome="regressed", launches=3, explained=explained, profiled=profiled)
    assert profile.because(verdict) == lines


def test_one_line_lists_step_parts() -> None:
    parts = "compute 60.0, optimizer 10.0, all_gather exposed 12.1, idle 17.9"
    assert profile.split(make_profile().split) == f"100.0 ms a step: {parts}"


def test_a_line_lists_each_trace() -> None:
    file = "/tmp/runs/x/profile/trace-0.json.gz (opens in https://ui.perfetto.dev)"
    of_arms = [f"trace of arm A, rank 0: {file}", f"trace of arm B, rank 0, with 1 other: {file}"]
    assert profile.traces(make_explained()) == of_arms
    assert profile.traces(make_result(now(), profile=taken())) == [f"trace of rank 0: {file}"]
    assert profile.traces(make_result(now(), profile=TakenProfile(why_none="boom"))) == []


def test_parts_appear_beside_their_former_values() -> None:
    faster = make_profile()
    slower = faster.replace(split=faster.split.replace(step_us=110_000, exposed_us={"all_gather": 22_100}))
    result = make_explained().replace(profile=taken(slower), profile_before=taken(faster))
    parts, longest = profile.tables(result)
    assert parts.headers == ("part", "arm A, ms", "now, ms", "change")
    assert {
        ("all_gather exposed", "12.10", "22.10", "+10.00"),
        ("step", "100.00", "110.00", "+10.00"),
        ("all_gather hidden", "20.00", "20.00", "+0.00"),
    } <= set(parts.rows)
    assert longest.rows[0] == ("nvjet_gemm", "24", "24", "40.00", "40.00")
    works = tuple(Work(name=f"aten::op{n}", calls=1, us=n) for n in range(profile.MOST_ROWS + 5))
    many = make_result(now(), profile=taken(make_profile(operators=works, kernels=())))
    assert len(profile.tables(many)[1].rows) == profile.MOST_ROWS


def test_shows_the_rank_that_differs_most() -> None:
    usual = make_profile()
    loss = Work(name="aten::loss", calls=1, us=9)
    last_stage, slower = (
        measured.replace(operators=(*measured.operators, loss)) for measured in (usual, EAGER)
    )
    result = make_result(now(), profile=taken(usual, slower), profile_before=taken(usual, last_stage))
    assert profile.tables(result)[0].caption.count("rank 1.") == 1


def test_equal_profiles_have_differences_of_zero() -> None:
    result = make_result(now(), profile=taken(), profile_before=taken())
    assert profile.tables(result)[0].rows[0] == ("compute", "60.00", "60.00", "+0.00")


def another_method() -> TakenProfile:
    before = taken()
    assert before.profile is not None
    return before.replace(profile=before.profile.replace(method="another"))


@pytest.mark.parametrize("before", [another_method(), None], ids=["another method", "none"])
def test_a_profile_of_another_method_is_not_compared(before: TakenProfile | None) -> None:
    parts, longest = profile.tables(make_result(now(), profile=taken(), profile_before=before))
    assert parts.rows[0] == ("compute", NONE, "60.00", NONE)
    assert longest.rows[0] == ("nvjet_gemm", NONE, "24", NONE, "40.00")


@pytest.mark.parametrize("missing", [None, TakenProfile(why_none="boom")], ids=["none", "failed"])
def test_without_a_profile_there_are_no_tables(missing: TakenProfile | None) -> None:
    assert profile.tables(make_result(now(), profile=missing)) == []
