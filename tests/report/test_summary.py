from __future__ import annotations

import pytest

from perfsuite.case.case import KnownIssue
from perfsuite.case.hardware import AllocatedNode, Allocation
from perfsuite.report import markdown, summary
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Health
from perfsuite.results.session_file import PytestRun
from perfsuite.verdict.comparability import UNEXPLAINED
from perfsuite.verdict.noise import ClassNoise
from tests.counted import BUCKETS, HOST_READ, NOT_COUNTED, make_check, make_counted, make_dry, make_finding
from tests.samples import (
    ARMS,
    judged,
    make_compared,
    make_gpu_machine,
    make_image_result,
    make_machine,
    make_result,
    make_session_file,
    make_shared,
    never_run,
    now,
)
from tests.sessions import make_blind, make_explained, make_gpu_result, make_session

LARGEST = f"{make_finding().sentence}; and 1 count more"
SLOWER = "tokens/s -7.3%, tokens/s with stalls -7.2%"
UNKNOWN = Health(samples=2, seconds=1, steps=2, notes=("GPU health is unknown",))


def test_the_headline_counts_the_worst_first_over_all_sessions() -> None:
    session = make_session(3, lambda number: ("passed", "regressed", "crash")[number])
    assert summary.headline([session]) == "1 failed, 1 regressed, 1 passed, 3 skipped"
    assert summary.headline([session, session]) == "2 failed, 2 regressed, 2 passed, 6 skipped"
    assert summary.headline([make_session(0).replace(skipped=())]) == "nothing was measured"


def test_provenance_is_that_of_the_launches_as_far_as_it_is_known() -> None:
    told = {
        "hardware": "h100-80gb-sxm (NVIDIA H100 80GB HBM3)",
        "torch": "2.13.0",
        "commit": "0123456789ab",
        "started": "2026-01-02 03:00:00 UTC",
        "launches": "8.8 min, 1.2 GPU hours",
        "perfsuite": "0.1.0",
    }
    assert summary.provenance(make_session(2, lambda number: "passed")) == told
    little = summary.provenance(make_session(0).replace(commit=None, machine=make_machine()))
    unknown = {"hardware": "cpu-test-2c (Test CPU)", "torch": "not observed", "commit": "not known to git"}
    unknown["launches"] = "0.0 min"
    assert little == told | unknown
    dirty = make_session(0).replace(dirty=True)
    assert summary.provenance(dirty)["commit"] == "0123456789ab with uncommitted changes"


def test_the_nodes_of_an_allocation_and_their_network_are_told() -> None:
    nodes = (
        AllocatedNode(name="n1", interface="ib0"),
        AllocatedNode(name="n2", interface="ib0"),
        AllocatedNode(name="n3", interface="eth0"),
    )
    variables = {"NCCL_IB_HCA": "mlx5", "GLOO_SOCKET_IFNAME": "ib0"}
    allocation = Allocation(job_id="4711", nodes=nodes, variables=variables)
    session = make_session(0)
    told = summary.provenance(session.replace(machine=make_machine().replace(nodes=3, allocation=allocation)))
    assert list(told.items())[1:5] == [
        ("nodes", "n1, n2, n3"),
        ("job", "4711"),
        ("interface", "eth0, ib0"),
        ("network", "GLOO_SOCKET_IFNAME=ib0, NCCL_IB_HCA=mlx5"),
    ]
    bare = Allocation(job_id="4711", nodes=(AllocatedNode(name="n1"),))
    told = summary.provenance(session.replace(machine=make_machine().replace(allocation=bare)))
    assert not told.keys() & {"interface", "network"}


def test_an_interrupted_session_names_what_was_lost() -> None:
    session = make_session(0)
    assert summary.interruption(session) is None
    cut = session.replace(status="interrupted")
    assert summary.interruption(cut) == "The session was interrupted; what came after it was not measured."
    cut = cut.replace(interrupted_case="c-1")
    assert "interrupted: c-1 was not judged;" in str(summary.interruption(cut))
    assert summary.interruption(cut.replace(status="running")) == (
        "The session is running, or was killed: c-1 was not judged; what comes after it is not measured."
    )


def test_the_parts_of_a_session_that_went_on_are_told() -> None:
    first = PytestRun(started_at="2026-01-02T03:04:05+00:00", status="interrupted", cases=12)
    second = first.replace(started_at="2026-01-02T05:06:07+00:00", status="complete", cases=1)
    told = "2026-01-02 03:04:05 UTC: 12 cases, interrupted; 2026-01-02 05:06:07 UTC: 1 case, complete"
    assert "parts" not in summary.provenance(make_session(0).replace(parts=(first,)))
    assert summary.provenance(make_session(0).replace(parts=(first, second)))["parts"] == told


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("passed", ""),
        ("recorded", ""),
        ("regressed", SLOWER),
        ("larger", "peak memory +6.0%"),
        ("improved", "tokens/s +11.1%, tokens/s with stalls +11.0%"),
        ("throttled", "3 launches set aside"),
        ("crash", "crash"),
    ],
)
def test_a_verdicts_reason_in_a_few_words(kind: str, why: str) -> None:
    assert summary.reason(make_gpu_result({"larger": 4, "improved": 5}.get(kind, 2), kind)) == why


def test_what_is_missing_and_what_is_not_known_is_the_reason() -> None:
    assert summary.reason(make_result(now(peak_memory_bytes=None))) == "missing metric: peak memory"
    assert summary.reason(never_run()) == "no baseline"
    unknown = make_result(now(), noise=ClassNoise(by_metric={}))
    assert summary.reason(unknown).startswith("tokens/s not known, ")


def test_what_nobody_has_to_act_upon_is_told_in_a_line_for_all() -> None:
    passed, regressed = make_result(now()), make_blind(make_gpu_result(2, "regressed"))
    assert summary.needs_words(regressed)
    for change in ({"notes": ("n",)}, {"health": UNKNOWN}, {"inject": "slowdown=1%"}):
        assert not summary.needs_words(make_blind(make_result(now().replace(**change))))
    assert summary.in_short([passed, regressed]) == []
    (line,) = summary.in_short([make_blind(passed), passed, make_blind(passed)])
    assert line.startswith("blind: in 2 of 3 cases noise hides changes as large as the tolerance")
    assert line.endswith("How large: -v or the HTML report tells")


def test_a_step_that_was_not_counted_is_told_with_its_case_and_why() -> None:
    passed = make_result(now())
    result, why = judged(passed, counts=NOT_COUNTED), "not counted: a CUDA graph was replayed"
    assert summary.tally([result, passed]) == ["2 passed (1 not counted)"]
    assert summary.in_short([result, passed]) == [f"note on {result.case_id}: {why}"]
    assert summary.properties(result)["counts"] == why
    assert "counts" not in summary.properties(passed)
    assert why in markdown.render([make_session_file(result)])


def test_a_note_of_several_cases_is_one_line() -> None:
    noted = make_result(now().replace(notes=("n",), health=UNKNOWN))
    other = make_result(now().replace(notes=("o",)), case_id="other")
    told = ["note on 2 cases: n", "note on 2 cases: GPU health is unknown", "note on other: o"]
    assert summary.in_short([noted, other, noted]) == told
    *shown, more = summary.in_short([make_result(now().replace(notes=tuple("abcdefg")))])
    assert (len(shown), more) == (5, "2 notes more: -v or the HTML report tells")


def test_notes_are_those_of_launches_health_and_machine_each_once_and_how_often() -> None:
    machine = make_gpu_machine().replace(note="unknown peak")
    run = now().replace(notes=("a",), health=UNKNOWN, machine=machine)
    result = make_result(run.replace(inject="nan"), run.replace(notes=()), before=None)
    of_launches = ["a fault was injected: nan", "a", "GPU health is unknown (2 launches)"]
    assert summary.notes(result) == [*of_launches, "unknown peak"]
    assert summary.machine_notes([result, result]) == ["unknown peak"]
    assert not summary.needs_words(result)
    assert summary.notes(make_result(now().replace(machine=make_machine(note="NVML found no GPU")))) == []


def test_what_makes_a_verdict_worth_less_is_counted_and_named() -> None:
    passed, regressed = make_gpu_result(2), make_gpu_result(2, "regressed")
    shared, blind = make_shared(), make_blind(passed)
    assert summary.tally([passed, blind, blind, shared]) == ["1 unhealthy (1 shared)", "3 passed (2 blind)"]
    session = make_session(0).replace(results=(passed, make_blind(regressed)))
    assert summary.headline([session]) == "1 regressed (1 blind), 1 passed, 3 skipped"
    hidden = "blind to changes of tokens/s below 32.4%"
    assert summary.reason(blind) == hidden
    assert summary.reason(make_blind(regressed)) == f"{SLOWER}; {hidden}"
    told, sharp = summary.properties(blind), summary.properties(passed)
    assert (told["blind"], told["tokens_per_s_minimum_detectable"]) == ("tokens_per_s", 0.324)
    assert told["reason"] == hidden
    assert summary.properties(shared)["shared"] == "others used the machine"
    assert not {"blind", "shared", "tokens_per_s_probe_exponent"} & set(sharp)
    assert float(sharp["tokens_per_s_minimum_detectable"]) < 0.03
    [speed, *others] = passed.verdict.checks
    vague = speed.replace(minimum_detectable=47_895.884, probe_exponent=0.5)
    vague_too = judged(passed, checks=(vague, *others))
    assert summary.reason(vague_too) == "blind to changes of tokens/s of any size"
    assert summary.properties(vague_too)["tokens_per_s_probe_exponent"] == 0.5


def test_properties_hold_verdict_figures_and_changes() -> None:
    told = summary.properties(make_gpu_result(2, "regressed"))
    assert (told["outcome"], told["launches"], told["hardware_class"]) == ("regressed", 3, "h100-80gb-sxm")
    assert told["reason"] == SLOWER
    low, change, high = (float(told[f"tokens_per_s_change{end}"]) for end in ("_low", "", "_high"))
    assert low < change < high < 0
    assert "peak_memory_bytes_change_low" not in told  # exact on a GPU
    assert set(summary.properties(never_run())) == {"case_id", "framework", "outcome", "launches", "reason"}


def test_what_counts_samples_says_so_for_machines_too() -> None:
    images = make_image_result()
    assert summary.reason(images) == "samples/s -50.0%, samples/s with stalls -50.0%"
    told = summary.properties(images)
    assert (told["samples_per_s"], told["energy_per_sample_j"]) == (1234, 0.002)
    assert float(told["samples_per_s_change"]) == pytest.approx(-0.5, abs=0.05)
    assert [name for name in told if "token" in name] == []


def test_a_waived_regression_is_told_in_few_words_and_says_who_tolerates_it() -> None:
    why = "waived: tokens/s -49.4%: 60% tolerated until 2026-12-31, @me, https://example.org/1"
    slow = make_result(*[now(tokens_per_s=50_000)] * 3, excused="waived", waivers=(why,))
    assert summary.tally([slow]) == ["1 waived"]
    assert summary.in_short([slow]) == [f"{slow.case_id}: {why}"]
    assert (summary.verdict(slow), summary.needs_words(slow)) == ("waived", False)
    assert summary.reason(slow).startswith("tokens/s -49.4%")
    told = summary.properties(slow)
    assert (told["outcome"], told["excused"], told["waivers"]) == ("regressed", "waived", why)
    issue = KnownIssue(url="https://example.org/1", failure="crash")
    known = tuple(run.replace(case=run.case.replace(known_issue=issue)) for run in slow.runs)
    gone = "known issue gone: https://example.org/1: take known_issue from the case"
    assert summary.excuses(slow.replace(runs=known)) == [why, gone]


def test_a_known_issue_excuses_a_failure_and_is_told_whether_it_is_gone() -> None:
    run = now()
    issue = KnownIssue(url="https://example.org/1", failure="crash")
    known = run.replace(case=run.case.replace(known_issue=issue))
    assert summary.excuses(make_result(run)) == []
    gone = "known issue gone: https://example.org/1: take known_issue from the case"
    recorded = make_result(known, before=None)
    assert summary.in_short([recorded]) == [f"{recorded.case_id}: {gone}"]
    crash = known.replace(failure=Failure(kind="crash", message="x"))
    assert summary.excuses(make_result(crash)) == []
    excused = make_result(crash, excused="known issue")
    there = f"{excused.case_id}: known issue still there: https://example.org/1"
    assert summary.in_short([excused]) == [there]
    assert (summary.verdict(excused), summary.reason(excused)) == ("known issue", "crash")
    assert summary.tally([excused, make_gpu_result(2)]) == ["1 known issue", "1 passed"]
    assert not summary.needs_words(excused)


def test_the_largest_count_that_regressed_is_the_reason_and_stands_behind_a_failure_to_compare() -> None:
    assert summary.reason(make_counted()) == LARGEST
    assert summary.reason(make_counted(make_check(HOST_READ, BUCKETS))) == HOST_READ.sentence
    slower = make_explained(make_gpu_result(2, "regressed"))
    unlike = {"outcome": "failed", "failure": "unlike", "checks": ()}
    for changes, told in (
        ({}, f"{SLOWER}, {LARGEST}"),
        ({"outcome": "failed", "failure": "loss"}, f"loss: {SLOWER}, {LARGEST}"),
        (unlike, f"unlike: {LARGEST}"),
        ({**unlike, "counts": None}, "unlike"),
    ):
        assert summary.reason(judged(slower, **changes)) == told


def test_what_changed_and_is_not_judged_is_told_of_cases_that_passed_too() -> None:
    passed = make_result(now())
    told = f"{UNEXPLAINED}: attention_kernel: Flash -> math"
    changed = judged(passed, reasons=("launch 1 set aside: x", told))
    assert summary.in_short([changed, passed, changed]) == [f"note on 2 cases: {told}"]
    listed = make_counted(make_check(BUCKETS, outcome="passed"))
    equal = make_counted(make_check(outcome="passed").replace(findings=()))
    told = "counts changed, not judged, in 2 cases: -v or the HTML report tells"
    assert told in summary.in_short([listed, listed, passed])
    assert not [line for line in summary.in_short([equal, passed]) if "counts" in line]


def test_a_dry_run_is_marked_and_its_hardware_is_pretended() -> None:
    session = make_session(0).replace(results=(make_dry(), make_result(now())))
    assert summary.headline([session]) == "1 regressed (1 dry run), 1 passed, 3 skipped"
    assert summary.provenance(session)["hardware"] == (
        "cpu-test-2c (Test CPU), h100-80gb-sxm (NVIDIA H100 80GB HBM3, pretended)"
    )
    assert summary.properties(make_dry())["outcome"] == "regressed"
    unknown = make_gpu_machine("NVIDIA X9000")
    assert summary.machine_notes([make_dry(machine=unknown)]) == []
    assert len(summary.machine_notes([make_dry(machine=unknown, dry=False)])) == 1


def test_the_arms_of_a_comparison_are_told_as_they_were_given_and_what_they_are() -> None:
    told = {"arm A": "main X=1 (commit 0123abcd0123, X 1)", "arm B": ". ()"}
    assert summary.arms_told(ARMS) == told
    assert told.items() <= summary.provenance(make_session(0).replace(arms=ARMS)).items()
    assert (summary.since(make_compared().verdict), summary.arms_told(())) == ("not as in arm A", {})
