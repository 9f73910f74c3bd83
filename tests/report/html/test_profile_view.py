from __future__ import annotations

from perfsuite.report.html import page
from perfsuite.report.html.profile_view import MOST_ROWS, profile_tables
from perfsuite.report.table import NONE
from perfsuite.results.profile import TakenProfile, Work
from tests.report.test_profile import FOUND, make_explained
from tests.samples import make_result, now
from tests.sessions import make_session
from tests.traces import EAGER, make_profile, taken


def test_parts_stand_beside_what_they_were() -> None:
    faster = make_profile()
    slower = faster.replace(split=faster.split.replace(step_us=110_000, exposed_us={"all_gather": 22_100}))
    result = make_explained().replace(profile=taken(slower), profile_before=taken(faster))
    parts, longest = profile_tables(result)
    assert parts.headers == ("part", "arm A, ms", "now, ms", "change")
    assert ("all_gather exposed", "12.10", "22.10", "+10.00") in parts.rows
    assert ("step", "100.00", "110.00", "+10.00") in parts.rows
    assert ("all_gather hidden", "20.00", "20.00", "+0.00") in parts.rows
    assert longest.rows[0] == ("nvjet_gemm", "24", "24", "40.00", "40.00")


def test_of_several_ranks_the_one_is_shown_that_differs_most() -> None:
    usual = make_profile()
    last_stage = usual.replace(operators=(*usual.operators, Work(name="aten::loss", calls=1, us=9)))
    slower = EAGER.replace(operators=(*EAGER.operators, Work(name="aten::loss", calls=1, us=9)))
    result = make_result(now(), profile=taken(usual, slower), profile_before=taken(usual, last_stage))
    assert profile_tables(result)[0].caption.count("ranks 1.") == 1


def test_without_a_profile_before_there_is_nothing_beside_it() -> None:
    parts, longest = profile_tables(make_result(now(), profile=taken()))
    assert parts.rows[0] == ("compute", NONE, "60.00", NONE)
    assert longest.rows[0] == ("nvjet_gemm", NONE, "24", NONE, "40.00")


def test_a_profile_of_before_that_cannot_be_compared_is_not_beside_it() -> None:
    result = make_result(now(), profile=taken(), profile_before=taken())
    assert result.profile_before is not None
    assert result.profile_before.profile is not None
    other = result.profile_before.profile.replace(method="another")
    unlike = result.replace(profile_before=result.profile_before.replace(profile=other))
    assert profile_tables(result)[0].rows[0] == ("compute", "60.00", "60.00", "+0.00")
    assert profile_tables(unlike)[0].rows[0] == ("compute", NONE, "60.00", NONE)


def test_without_a_profile_there_are_no_tables() -> None:
    assert profile_tables(make_result(now())) == []
    assert profile_tables(make_result(now(), profile=TakenProfile(why_none="boom"))) == []


def test_many_operators_are_cut() -> None:
    works = tuple(Work(name=f"aten::op{number}", calls=1, us=number) for number in range(MOST_ROWS + 5))
    alone = make_profile(operators=works, kernels=())
    assert len(profile_tables(make_result(now(), profile=taken(alone)))[1].rows) == MOST_ROWS


def test_the_page_tells_why_and_shows_the_tables() -> None:
    html = page.render([make_session(0).replace(results=(make_explained(),))])
    at = [html.index(line.split(" -> ")[0]) for line in (*FOUND.calls, *FOUND.hints)]
    assert at == sorted(at)
    assert "<h4>Profile of a step</h4>" in html
    assert "trace of arm A, rank 0: /tmp/runs/x/profile/trace-0.json.gz" in html
    assert "nvjet_gemm" in html
