from __future__ import annotations

import pytest

from perfsuite.case.case import KnownIssue
from perfsuite.case.hardware import AllocatedNode, Allocation
from perfsuite.report import markdown, terminal
from perfsuite.report.html import page
from perfsuite.report.summary import (
    arm_lines,
    headline,
    in_short,
    interruption,
    known_issue,
    machine_notes,
    needs_words,
    notes,
    properties,
    provenance,
    reason,
    since,
    tally,
    verdict,
)
from perfsuite.results.outcome import CountCheck
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Health
from perfsuite.results.session_file import PytestRun
from perfsuite.verdict.comparability import UNEXPLAINED
from perfsuite.verdict.noise import ClassNoise
from tests.counted import BUCKETS, HOST_READ, make_check, make_counted, make_dry
from tests.samples import (
    ARMS,
    make_compared,
    make_gpu_machine,
    make_image_result,
    make_machine,
    make_result,
    make_shared,
    never_run,
    now,
)
from tests.sessions import make_blind, make_explained, make_gpu_result, make_session

UNKNOWN = Health(samples=2, seconds=1, steps=2, notes=("GPU health is unknown",))


def test_the_headline_counts_the_worst_first_over_all_sessions() -> None:
    session = make_session(3, lambda number: ("passed", "regressed", "crash")[number])
    assert headline([session]) == "1 failed, 1 regressed, 1 passed, 3 skipped"
    assert headline([session, session]) == "2 failed, 2 regressed, 2 passed, 6 skipped"
    assert headline([make_session(0).replace(skipped=())]) == "nothing was measured"


def test_provenance_is_that_of_the_launches() -> None:
    assert provenance(make_session(2, lambda number: "passed")) == {
        "hardware": "h100-80gb-sxm (NVIDIA H100 80GB HBM3)",
        "torch": "2.13.0",
        "commit": "0123456789ab",
        "started": "2026-01-02 03:00:00 UTC",
        "perfsuite": "0.1.0",
    }


def test_provenance_where_little_is_known() -> None:
    told = provenance(make_session(0).replace(commit=None, machine=make_machine()))
    assert (told["hardware"], told["torch"]) == ("cpu-test-2c (Test CPU)", "not observed")
    assert told["commit"] == "not known to git"
    dirty = make_session(0).replace(dirty=True)
    assert provenance(dirty)["commit"] == "0123456789ab with uncommitted changes"


def test_the_nodes_of_an_allocation_their_network_and_its_queue_are_told() -> None:
    nodes = (
        AllocatedNode(name="n1", switch="s1", interface="ib0"),
        AllocatedNode(name="n2", switch="s1", interface="ib0"),
        AllocatedNode(name="n3", switch="s2", interface="eth0"),
    )
    variables = {"NCCL_IB_HCA": "mlx5", "GLOO_SOCKET_IFNAME": "ib0"}
    allocation = Allocation(job_id="4711", nodes=nodes, queued_s=3120, variables=variables)
    session = make_session(0)
    told = provenance(session.replace(machine=make_machine().replace(nodes=3, allocation=allocation)))
    assert list(told.items())[1:7] == [
        ("nodes", "n1, n2, n3"),
        ("job", "4711"),
        ("queued", "3,120 s, before it began to run"),
        ("switches", "s1: n1, n2; s2: n3"),
        ("interface", "eth0, ib0"),
        ("network", "GLOO_SOCKET_IFNAME=ib0, NCCL_IB_HCA=mlx5"),
    ]
    bare = Allocation(job_id="4711", nodes=(AllocatedNode(name="n1"),))
    told = provenance(session.replace(machine=make_machine().replace(allocation=bare)))
    assert not told.keys() & {"queued", "switches", "interface", "network"}


def test_an_interrupted_session_names_what_was_lost() -> None:
    session = make_session(0)
    assert interruption(session) is None
    cut = session.replace(status="interrupted")
    assert interruption(cut) == "The session was interrupted; what came after it was not measured."
    assert "interrupted: c-1 was not judged;" in str(interruption(cut.replace(interrupted_case="c-1")))
    assert interruption(cut.replace(status="running", interrupted_case="c-1")) == (
        "The session is running, or was killed: c-1 was not judged; what comes after it is not measured."
    )


def test_the_parts_of_a_session_that_went_on_are_told() -> None:
    first = PytestRun(started_at="2026-01-02T03:04:05+00:00", status="interrupted", cases=12)
    second = PytestRun(started_at="2026-01-02T05:06:07+00:00", status="complete", cases=1)
    session = make_session(0)
    assert "parts" not in provenance(session.replace(parts=(first,)))
    assert provenance(session.replace(parts=(first, second)))["parts"] == (
        "2026-01-02 03:04:05 UTC: 12 cases, interrupted; 2026-01-02 05:06:07 UTC: 1 case, complete"
    )


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("passed", ""),
        ("recorded", ""),
        ("regressed", "tokens/s -7.3%, tokens/s with stalls -7.2%"),
        ("larger", "peak memory +6.0%"),
        ("improved", "tokens/s +11.1%, tokens/s with stalls +11.0%"),
        ("throttled", "3 launches set aside"),
        ("crash", "crash"),
    ],
)
def test_a_verdicts_reason_in_a_few_words(kind: str, why: str) -> None:
    assert reason(make_gpu_result({"larger": 4, "improved": 5}.get(kind, 2), kind)) == why


def test_a_missing_metric_is_named_and_noise_that_is_not_known_is_said() -> None:
    assert reason(make_result(now(peak_memory_bytes=None))) == "missing metric: peak memory"
    assert reason(never_run()) == "no baseline"
    unknown = make_result(now(), noise=ClassNoise(by_metric={}))
    assert reason(unknown).startswith("tokens/s not known, ")


def test_only_what_somebody_may_have_to_act_upon_needs_words() -> None:
    assert needs_words(make_gpu_result(2, "regressed"))
    assert not needs_words(make_blind(make_result(now())))
    for change in ({"notes": ("n",)}, {"health": UNKNOWN}, {"inject": "slowdown=1%"}):
        assert not needs_words(make_result(now().replace(**change)))


def test_what_is_blind_is_one_line_for_all() -> None:
    passed = make_result(now())
    assert in_short([passed, make_blind(make_gpu_result(2, "regressed"))]) == []
    (line,) = in_short([make_blind(passed), passed, make_blind(passed)])
    assert line.startswith("blind: in 2 of 3 cases noise hides changes as large as the tolerance")
    assert line.endswith("How large: -v or the HTML report tells")


def test_a_step_that_was_not_counted_is_told_with_its_case_and_why() -> None:
    check = CountCheck(outcome="not counted", compared=False, notes=("a CUDA graph was replayed", "b"))
    passed = make_result(now())
    result = passed.replace(verdict=passed.verdict.replace(counts=check))
    why = "not counted: a CUDA graph was replayed; b"
    assert tally([result, passed]) == ["2 passed (1 not counted)"]
    assert in_short([result, passed]) == [f"note on {result.case_id}: {why}"]
    assert properties(result)["counts"] == why
    assert "counts" not in properties(passed)
    assert f"counts: {why}" in terminal.explanation(result)
    assert "passed (not counted)" in terminal.table([result], color=False, width=None)
    assert why in markdown.render([make_session(0).replace(results=(result,))])
    assert why in page.render([make_session(0).replace(results=(result,))])
    bad = result.replace(verdict=result.verdict.replace(outcome="regressed"))
    assert f"counts: {why}" in markdown.render([make_session(0).replace(results=(bad,))])


def test_a_note_of_several_cases_is_one_line() -> None:
    noted = make_result(now().replace(notes=("n",), health=UNKNOWN))
    other = make_result(now().replace(notes=("o",)), case_id="other")
    assert in_short([noted, other, noted]) == [
        "note on 2 cases: n",
        "note on 2 cases: GPU health is unknown",
        "note on other: o",
    ]
    many = make_result(now().replace(notes=tuple("abcdefg")))
    told = in_short([many])
    assert len(told) == 6
    assert told[-1] == "2 notes more: -v or the HTML report tells"


def test_what_is_not_known_of_the_machine_is_told_once_and_not_with_each_case() -> None:
    machine = make_gpu_machine().replace(note="unknown peak")
    results = [make_result(now().replace(machine=machine), before=None)] * 2
    assert machine_notes(results) == ["unknown peak"]
    assert not needs_words(results[0])


def test_notes_are_those_of_launches_health_and_machine_each_once_and_how_often() -> None:
    machine = make_gpu_machine().replace(note="unknown peak")
    run = now().replace(notes=("a",), health=UNKNOWN, machine=machine)
    result = make_result(run.replace(inject="nan"), run.replace(notes=()), before=None)
    assert notes(result) == [
        "a fault was injected: nan",
        "a",
        "GPU health is unknown (2 launches)",
        "unknown peak",
    ]
    assert notes(make_result(now().replace(machine=make_machine(note="NVML found no GPU")))) == []


def test_what_noise_hides_is_counted_and_named_with_the_smallest_change_that_is_found() -> None:
    passed, regressed = make_gpu_result(2), make_gpu_result(2, "regressed")
    assert tally([passed, make_blind(passed), make_blind(passed)]) == ["3 passed (2 blind)"]
    session = make_session(0).replace(results=(passed, make_blind(regressed)))
    assert headline([session]) == "1 regressed (1 blind), 1 passed, 3 skipped"
    hidden = "blind to changes of tokens/s below 32.4%"
    assert reason(make_blind(passed)) == hidden
    assert reason(make_blind(regressed)) == f"tokens/s -7.3%, tokens/s with stalls -7.2%; {hidden}"
    told = properties(make_blind(passed))
    assert (told["blind"], told["tokens_per_s_minimum_detectable"]) == ("tokens_per_s", 0.324)
    assert told["reason"] == hidden
    sharp = properties(passed)
    assert not {"blind", "tokens_per_s_probe_exponent"} & set(sharp)
    [speed, *others] = passed.verdict.checks
    vague = passed.verdict.replace(checks=(speed.replace(minimum_detectable=47_895.884), *others))
    assert reason(passed.replace(verdict=vague)) == "blind to changes of tokens/s of any size"
    checks = (speed.replace(probe_exponent=0.5), *others)
    corrected = properties(passed.replace(verdict=passed.verdict.replace(checks=checks)))
    assert corrected["tokens_per_s_probe_exponent"] == 0.5
    assert float(sharp["tokens_per_s_minimum_detectable"]) < 0.03


def test_what_others_disturbed_is_counted_and_a_property() -> None:
    shared = make_shared()
    assert tally([shared, make_blind(make_gpu_result(2))]) == ["1 unhealthy (1 shared)", "1 passed (1 blind)"]
    assert properties(shared)["shared"] == "others used the machine"
    assert "shared" not in properties(make_gpu_result(2))


def test_properties_hold_verdict_figures_and_changes() -> None:
    told = properties(make_gpu_result(2, "regressed"))
    assert (told["outcome"], told["launches"], told["hardware_class"]) == ("regressed", 3, "h100-80gb-sxm")
    assert told["reason"] == "tokens/s -7.3%, tokens/s with stalls -7.2%"
    low, change, high = (float(told[f"tokens_per_s_change{end}"]) for end in ("_low", "", "_high"))
    assert low < change < high < 0
    assert "peak_memory_bytes_change_low" not in told  # exact on a GPU
    assert set(properties(never_run())) == {"case_id", "framework", "outcome", "launches", "reason"}


def test_what_counts_samples_says_so_for_machines_too() -> None:
    images = make_image_result()
    assert reason(images) == "samples/s -50.0%, samples/s with stalls -50.0%"
    told = properties(images)
    assert (told["samples_per_s"], told["energy_per_sample_j"]) == (1234, 0.002)
    assert float(told["samples_per_s_change"]) == pytest.approx(-0.5, abs=0.05)
    assert [name for name in told if "token" in name] == []


def test_an_excused_failure_is_counted_as_what_excuses_it() -> None:
    excused = make_gpu_result(1, "crash").replace(excused="known issue")
    assert (verdict(excused), reason(excused)) == ("known issue", "crash")
    assert tally([excused, make_gpu_result(2)]) == ["1 known issue", "1 passed"]
    assert not needs_words(excused)


def test_a_known_issue_is_told_whether_it_is_still_there_or_gone() -> None:
    run = now()
    issue = KnownIssue(url="https://example.org/1", failure="crash")
    known = run.replace(case=run.case.replace(known_issue=issue))
    assert known_issue(make_result(now())) is None
    gone = "known issue gone: https://example.org/1: take known_issue from the case"
    recorded = make_result(known, before=None)
    assert known_issue(recorded) == gone
    assert in_short([recorded]) == [f"{recorded.case_id}: {gone}"]
    crash = known.replace(failure=Failure(kind="crash", message="x"))
    assert known_issue(make_result(crash)) is None
    excused = make_result(crash, excused="known issue")
    assert in_short([excused]) == [f"{excused.case_id}: known issue still there: https://example.org/1"]


LARGEST = "reduce_scatter of 64 ranks: bytes 29.9 -> 59.8 GiB and 1 count more"
SLOWER = "tokens/s -7.3%, tokens/s with stalls -7.2%"


def test_the_largest_count_that_regressed_is_the_reason() -> None:
    assert reason(make_counted()) == LARGEST
    assert reason(make_counted(make_check(HOST_READ, BUCKETS))) == "host reads in forward 1 -> 2"
    slower = make_explained(make_gpu_result(2, "regressed"))
    assert reason(slower) == f"{SLOWER}, {LARGEST}"


def test_what_was_judged_all_the_same_stands_beside_a_failure_to_compare() -> None:
    slower = make_explained(make_gpu_result(2, "regressed"))
    judged = slower.verdict.replace(outcome="failed", failure="loss")
    assert reason(slower.replace(verdict=judged)) == f"loss: {SLOWER}, {LARGEST}"
    unlike = judged.replace(failure="unlike", checks=())
    assert reason(slower.replace(verdict=unlike)) == f"unlike: {LARGEST}"
    assert reason(slower.replace(verdict=unlike.replace(counts=None))) == "unlike"


def test_a_setting_that_changed_by_itself_is_told_of_a_case_that_passed_too() -> None:
    passed = make_result(now())
    told = f"{UNEXPLAINED}: attention_kernel: Flash -> math"
    reasons = ("launch 1 set aside: x", told)
    changed = passed.replace(verdict=passed.verdict.replace(reasons=reasons))
    assert in_short([changed, passed, changed]) == [f"note on 2 cases: {told}"]


def test_changes_that_are_only_listed_are_told_in_one_line() -> None:
    listed = make_counted(make_check(BUCKETS, outcome="passed"))
    told = "counts changed, not judged, in 2 cases: -v or the HTML report tells"
    assert told in in_short([listed, listed, make_result(now())])
    equal = make_counted(make_check(outcome="passed").replace(findings=()))
    assert not [line for line in in_short([equal, make_result(now())]) if "counts" in line]


def test_a_dry_run_is_marked_and_its_hardware_is_pretended() -> None:
    session = make_session(0).replace(results=(make_dry(), make_result(now())))
    assert headline([session]) == "1 regressed (1 dry run), 1 passed, 3 skipped"
    assert provenance(session)["hardware"] == (
        "cpu-test-2c (Test CPU), h100-80gb-sxm (NVIDIA H100 80GB HBM3, pretended)"
    )
    assert properties(make_dry())["outcome"] == "regressed"
    unknown = make_gpu_machine("NVIDIA X9000")
    assert machine_notes([make_dry(machine=unknown)]) == []
    assert len(machine_notes([make_dry(machine=unknown, dry=False)])) == 1


def test_the_arms_of_a_comparison_are_told_as_they_were_given_and_what_they_are() -> None:
    session = make_session(0).replace(arms=ARMS)
    told = ["arm A: main X=1 (commit 0123abcd0123, X 1)", "arm B: . ()"]
    assert arm_lines(session.arms) == told
    assert provenance(session)["arm A"] == "main X=1 (commit 0123abcd0123, X 1)"
    assert (since(make_compared().verdict), arm_lines(())) == ("not as in arm A", [])
