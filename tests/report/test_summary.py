import re
from collections.abc import Sequence
from typing import Any

import pytest

from perfsuite.case.case import KnownIssue
from perfsuite.case.hardware import AllocatedNode, Allocation
from perfsuite.report import summary
from perfsuite.results.outcome import BY_THE_MACHINE, QUIET
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Health
from perfsuite.results.session_file import Measurement, PytestRun
from perfsuite.verdict.comparability import UNEXPLAINED
from perfsuite.verdict.noise import ClassNoise
from tests import samples
from tests.counted import BUCKETS, HOST_READ, NOT_COUNTED, make_check, make_counted, make_dry, make_finding
from tests.samples import judged, make_gpu_machine, make_machine, make_result, now
from tests.sessions import make_blind, make_explained, make_gpu_result, make_session

SESSION = make_session(0)
PASSED = make_gpu_result(2)
REGRESSED = make_gpu_result(2, "regressed")
LARGEST = f"{make_finding().sentence}; and 1 count more"
SLOWER = "tokens/s -7.3%, tokens/s with stalls -7.2%"
UNKNOWN = Health(samples=2, seconds=1, steps=2, notes=("GPU health is unknown",))
URL = "https://example.org/1"
GONE = f"known issue gone: {URL}. Remove known_issue from the case"
HIDDEN = "blind to changes of tokens/s below 32.4%"
SPEED, *OTHERS = PASSED.verdict.checks
VAGUE = judged(PASSED, checks=(SPEED.replace(minimum_detectable=47_895.884, probe_exponent=0.5), *OTHERS))
UNCOUNTED = judged(make_result(now()), counts=NOT_COUNTED)
WAIVER = f"waived: tokens/s -49.4%: 60% tolerated until 2026-12-31, @me, {URL}"
WAIVED = make_result(*[now(tokens_per_s=50_000)] * 3, excused="waived", waivers=(WAIVER,))
KNOWN = now().replace(case=now().case.replace(known_issue=KnownIssue(url=URL, failure="crash")))
CRASH = KNOWN.replace(failure=Failure(kind="crash", message="x"))
EXCUSED = make_result(CRASH, excused="known issue")
EXPLAINED = make_explained(REGRESSED)
UNCHANGED = judged(
    REGRESSED,
    outcome="unhealthy",
    checks=tuple(
        check.replace(outcome="inconclusive", note=BY_THE_MACHINE) if check.outcome == "regressed" else check
        for check in REGRESSED.verdict.checks
    ),
)
UNLIKE = judged(EXPLAINED, outcome="failed", failure="unlike", checks=())


@pytest.mark.parametrize(
    ("result", "tally", "reason", "in_short"),
    [
        (PASSED, "passed", "", ""),
        (make_gpu_result(2, "recorded"), "recorded", "", ""),
        (REGRESSED, "regressed", SLOWER, ""),
        (make_gpu_result(4, "larger"), "regressed", "peak memory +6.0%", ""),
        (make_gpu_result(5, "improved"), "improved", "tokens/s +11.1%, tokens/s with stalls +11.0%", ""),
        (make_gpu_result(2, "throttled"), "unhealthy", "3 launches set aside", ""),
        (UNCHANGED, "unhealthy", f"{SLOWER}, although nothing changed", ""),
        (make_gpu_result(2, "crash"), "failed", "crash", ""),
        (make_result(now(peak_memory_bytes=None)), "failed", "missing metric: peak memory", ""),
        (samples.never_run(), "failed", "no baseline", ""),
        (samples.make_shared(), "unhealthy (1 shared)", "1 launch set aside", ""),
        (make_blind(REGRESSED), "regressed (1 blind)", f"{SLOWER}; {HIDDEN}", ""),
        (make_dry(), "regressed (1 dry run)", LARGEST, ""),
        (make_counted(), "regressed", LARGEST, ""),
        (make_counted(make_check(HOST_READ, BUCKETS)), "regressed", HOST_READ.sentence, ""),
        (EXPLAINED, "regressed", f"{LARGEST}; {SLOWER}", ""),
        (judged(EXPLAINED, outcome="failed", failure="loss"), "failed", f"loss: {LARGEST}; {SLOWER}", ""),
        (UNLIKE, "failed", f"unlike: {LARGEST}", ""),
        (judged(UNLIKE, counts=None), "failed", "unlike", ""),
        (UNCOUNTED, "passed (1 not counted)", "", "note on ID: not counted: a CUDA graph was replayed"),
        (WAIVED, "waived", "tokens/s -49.4%", f"ID: {WAIVER}"),
        (make_result(KNOWN, before=None), "recorded", "", f"ID: {GONE}"),
        (make_result(CRASH), "failed", "crash", ""),
        (EXCUSED, "known issue", "crash", f"ID: known issue still there: {URL}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_summarizes_a_case_in_a_few_words(
    result: Measurement, tally: str, reason: str, in_short: str
) -> None:
    assert summary.tally([result]) == [f"1 {tally}"]
    assert summary.reason(result) == reason
    assert summary.needs_words(result) == (tally.split(" (")[0] not in QUIET)
    lines = [line.replace(result.case_id, "ID") for line in summary.in_short([result])]
    assert lines == list(filter(None, [in_short]))


def test_headline_counts_worst_first() -> None:
    session = make_session(3, lambda number: ("passed", "regressed", "crash")[number])
    assert summary.headline([session]) == "1 failed, 1 regressed, 1 passed, 3 skipped"
    assert summary.headline([session, session]) == "2 failed, 2 regressed, 2 passed, 6 skipped"
    assert summary.headline([SESSION.replace(skipped=())]) == "nothing was measured"


def test_headline_starts_with_unfinished_sessions() -> None:
    session = make_session(1, lambda number: "passed").replace(skipped=())
    cut = session.replace(status="interrupted")
    killed = session.replace(status="running")
    assert summary.headline([cut]) == "interrupted, 1 passed"
    assert summary.headline([killed]) == "running or killed, 1 passed"
    assert summary.headline([cut, session, killed, killed]) == (
        "1 of 4 sessions interrupted, 2 of 4 sessions running or killed, 4 passed"
    )
    assert summary.headline([cut.replace(results=())]) == "interrupted, nothing was measured"


def test_provenance_is_that_of_the_launches() -> None:
    expected = {
        "hardware": "h100-80gb-sxm (NVIDIA H100 80GB HBM3)",
        "torch": "2.13.0",
        "commit": "0123456789ab",
        "started": "2026-01-02 03:00:00 UTC",
        "time in launches": "8.8 min, 1.2 GPU hours",
        "perfsuite": "0.1.0",
    }
    assert summary.provenance(make_session(2, lambda number: "passed")) == expected
    unknown = {"hardware": "cpu-test-2c (Test CPU)", "torch": "2.13.0", "commit": "not known to git"}
    little = summary.provenance(SESSION.replace(commit=None, machine=make_machine()))
    assert little == expected | unknown | {"time in launches": "0.0 min"}
    dirty = summary.provenance(SESSION.replace(dirty=True))
    assert dirty["commit"] == "0123456789ab with uncommitted changes"


def test_provenance_names_the_parts_of_a_session() -> None:
    first = PytestRun(started_at="2026-01-02T03:04:05+00:00", status="interrupted", cases=12)
    second = first.replace(started_at="2026-01-02T05:06:07+00:00", status="complete", cases=1)
    parts = "2026-01-02 03:04:05 UTC: 12 cases, interrupted; 2026-01-02 05:06:07 UTC: 1 case, complete"
    assert "parts" not in summary.provenance(SESSION.replace(parts=(first,)))
    assert summary.provenance(SESSION.replace(parts=(first, second)))["parts"] == parts


def test_provenance_describes_arms() -> None:
    arms = {"arm A": "main X=1 (commit 0123abcd0123, X 1)", "arm B": ". ()"}
    assert (summary.arm_descriptions(samples.ARMS), summary.arm_descriptions(())) == (arms, {})
    assert arms.items() <= summary.provenance(SESSION.replace(arms=samples.ARMS)).items()
    assert summary.since(samples.make_compared().verdict) == "different from arm A"


def test_torch_of_no_rank_is_that_of_pytest() -> None:
    seen = SESSION.conditions.replace(environment={"torch": "2.12.1"})
    assert summary.provenance(SESSION.replace(conditions=seen))["torch"] == "2.12.1"
    assert summary.provenance(SESSION.replace(arms=samples.ARMS))["torch"] == "not observed"
    without = SESSION.conditions.replace(environment={})
    assert summary.provenance(SESSION.replace(conditions=without))["torch"] == "not observed"


def test_reports_an_allocations_nodes_and_network() -> None:
    def facts_of(allocation: Allocation) -> dict[str, str]:
        return summary.provenance(SESSION.replace(machine=make_machine(nodes=3, allocation=allocation)))

    interfaces = (("n1", "ib0"), ("n2", "ib0"), ("n3", "eth0"))
    nodes = tuple(AllocatedNode(name=name, interface=interface) for name, interface in interfaces)
    variables = {"NCCL_IB_HCA": "mlx5", "GLOO_SOCKET_IFNAME": "ib0"}
    assert list(facts_of(Allocation(job_id="4711", nodes=nodes, variables=variables)).items())[1:5] == [
        ("nodes", "n1, n2, n3"),
        ("job", "4711"),
        ("interface", "eth0, ib0"),
        ("network", "GLOO_SOCKET_IFNAME=ib0, NCCL_IB_HCA=mlx5"),
    ]
    bare = facts_of(Allocation(job_id="4711", nodes=(AllocatedNode(name="n1"),)))
    assert not bare.keys() & {"interface", "network", "cores"}


@pytest.mark.parametrize(
    ("cores", "said"),
    [
        (((96, 192), (96, 192)), "96 of 192 (12 per GPU) on each node"),
        (((96, 192), (12, 192)), "96 of 192 (12 per GPU) on n1, 12 of 192 (1.5 per GPU) on n2"),
        (((96, None), (None, 192)), "96 (12 per GPU) on n1"),
        (((None, None), (None, None)), None),
    ],
)
def test_reports_the_cores_of_an_allocation(cores: Sequence[Any], said: str | None) -> None:
    nodes = tuple(
        AllocatedNode(name=f"n{number}", cores=own, cores_of_machine=all_cores)
        for number, (own, all_cores) in enumerate(cores, 1)
    )
    machine = make_gpu_machine().replace(nodes=2, allocation=Allocation(job_id="4711", nodes=nodes))
    assert summary.provenance(SESSION.replace(machine=machine)).get("cores") == said
    on_cpus = make_machine(nodes=2, allocation=Allocation(job_id="4711", nodes=nodes))
    expected = None if said is None else re.sub(r" \([\d.]+ per GPU\)", "", said)
    assert summary.provenance(SESSION.replace(machine=on_cpus)).get("cores") == expected


def test_interrupted_session_names_what_was_lost() -> None:
    cut = SESSION.replace(status="interrupted")
    assert summary.interruption(SESSION) is None
    assert summary.interruption(cut) == "The session was interrupted. Later cases were not measured."
    cut = cut.replace(interrupted_case="c-1")
    assert "interrupted: c-1 was not judged." in str(summary.interruption(cut))
    killed = summary.interruption(cut.replace(status="running", interrupted_launches=(now(),)))
    why = "c-1 was not judged (1 launch of it in results.json). Later cases are not measured."
    assert killed == f"The session is running, or was killed: {why}"


def test_names_cases_that_earlier_parts_lost() -> None:
    ended = SESSION.replace(interrupted_case="c-1")
    earlier = "An earlier part of the session was interrupted:"
    assert summary.interruption(ended) == f"{earlier} c-1 was not judged."
    twice = ended.replace(interrupted_before=("c-0",))
    assert summary.interruption(twice) == f"{earlier} c-0, c-1 were not judged."


def test_counts_the_launches_of_the_newest_lost_case() -> None:
    first, second = (now().case.replace(micro_batch=size) for size in (8, 9))
    launches = (now().replace(case=first), now().replace(case=second), now().replace(case=second))
    cut = SESSION.replace(status="interrupted", interrupted_case=second.id, interrupted_before=(first.id,))
    said = summary.interruption(cut.replace(interrupted_launches=launches))
    lost = f"{second.id} was not judged (2 launches of it in results.json), and neither was {first.id}"
    assert said == f"The session was interrupted: {lost}. Later cases were not measured."


@pytest.mark.parametrize(
    "change",
    [{"notes": ("n",)}, {"health": UNKNOWN}, {"inject": "slowdown=1%"}],
    ids=["a note", "unknown health", "a fault"],
)
def test_a_quiet_blind_case_needs_no_words(change: dict[str, Any]) -> None:
    assert not summary.needs_words(make_blind(make_result(now().replace(**change))))


def test_one_line_covers_what_needs_no_action() -> None:
    passed = make_result(now())
    assert summary.in_short([passed, make_blind(REGRESSED)]) == []
    (line,) = summary.in_short([make_blind(passed), passed, make_blind(passed)])
    assert line.startswith("blind: in 2 of 3 cases, noise hides changes as large as the tolerance")
    assert line.endswith("is found in each case: see -v or the HTML report")


def test_the_tally_counts_qualified_cases() -> None:
    passed = make_result(now())
    assert summary.tally([make_blind(passed), passed, samples.make_shared()]) == [
        "1 unhealthy (1 shared)",
        "2 passed (1 blind)",
    ]


def test_a_stale_waiver_is_an_excuse_that_is_named() -> None:
    slow = make_result(*[KNOWN.replace(figures=run.figures) for run in WAIVED.runs])
    assert summary.excuses(slow.replace(excused="waived", waivers=(WAIVER,))) == [WAIVER, GONE]


def test_an_injected_fault_is_named() -> None:
    faulty = make_result(*[now().replace(inject="nan")] * 2)
    assert summary.in_short([faulty]) == [f"{faulty.case_id}: a fault was injected: nan"]


def test_reason_names_unknown_and_hidden_changes() -> None:
    assert summary.reason(VAGUE) == "blind to changes of tokens/s of any size"
    unknown = summary.reason(make_result(now(), noise=ClassNoise(by_metric={})))
    assert unknown.startswith("tokens/s not known, ")


def test_counts_each_distinct_note_once() -> None:
    noted = make_result(now().replace(notes=("n",), health=UNKNOWN))
    other = make_result(now().replace(notes=("o",)), case_id="other")
    notes = ["note on 2 cases: n", "note on 2 cases: GPU health is unknown", "note on other: o"]
    assert summary.in_short([noted, other, noted]) == notes
    *shown, more = summary.in_short([make_result(now().replace(notes=tuple("abcdefg")))])
    assert (len(shown), more) == (5, "2 notes not shown: see -v or the HTML report")
    machine = samples.make_gpu_machine().replace(note="unknown peak")
    run = now().replace(notes=("a",), health=UNKNOWN, machine=machine)
    result = make_result(run, run.replace(notes=()), before=None)
    assert summary.notes(result) == ["a", "GPU health is unknown (2 launches)", "unknown peak"]
    assert summary.machine_notes([result, result]) == ["unknown peak"]
    assert summary.notes(make_result(now().replace(machine=make_machine(note="NVML found no GPU")))) == []


def test_properties_hold_the_verdict() -> None:
    properties = summary.properties(REGRESSED)
    assert (properties["outcome"], properties["launches"], properties["hardware_class"]) == (
        "regressed",
        3,
        "h100-80gb-sxm",
    )
    assert properties["reason"] == SLOWER
    low, change, high = (float(properties[f"tokens_per_s_change{end}"]) for end in ("_low", "", "_high"))
    assert low < change < high < 0
    assert "peak_memory_bytes_change_low" not in properties  # on a GPU, it has no interval


def test_properties_of_unlaunched_cases() -> None:
    never = " ".join(summary.properties(samples.never_run()))
    assert never == "case_id framework outcome reason launches"
    assert summary.properties(make_dry())["outcome"] == "regressed"


def test_properties_hold_what_hides_a_change() -> None:
    blind = summary.properties(make_blind(PASSED))
    assert (blind["blind"], blind["tokens_per_s_minimum_detectable"]) == ("tokens_per_s", 0.324)
    assert blind["reason"] == HIDDEN


def test_properties_hold_who_shared_the_machine() -> None:
    assert summary.properties(samples.make_shared())["shared"] == "other jobs used the machine"


def test_properties_of_a_sharp_verdict_have_no_qualifiers() -> None:
    sharp = summary.properties(PASSED)
    assert not {"blind", "shared", "counts", "tokens_per_s_probe_exponent"} & set(sharp)
    assert float(sharp["tokens_per_s_minimum_detectable"]) < 0.03


def test_properties_hold_the_correction_for_the_machine() -> None:
    assert summary.properties(VAGUE)["tokens_per_s_probe_exponent"] == 0.5


def test_properties_hold_why_nothing_was_counted() -> None:
    assert summary.properties(UNCOUNTED)["counts"] == "not counted: a CUDA graph was replayed"


def test_properties_hold_waivers() -> None:
    waived = summary.properties(WAIVED)
    assert (waived["outcome"], waived["excused"], waived["waivers"]) == ("regressed", "waived", WAIVER)


def test_sample_counting_names_samples_everywhere() -> None:
    images = samples.make_image_result()
    assert summary.reason(images) == "samples/s -50.0%, samples/s with stalls -50.0%"
    properties = summary.properties(images)
    assert (properties["samples_per_s"], properties["energy_per_sample_j"]) == (1234, 0.002)
    assert float(properties["samples_per_s_change"]) == pytest.approx(-0.5, abs=0.05)
    assert [name for name in properties if "token" in name] == []


def test_reports_unjudged_changes_of_passed_cases() -> None:
    passed = make_result(now())
    remark = f"{UNEXPLAINED}: attention_kernel: Flash -> math"
    changed = judged(passed, reasons=("launch 1 set aside: x", remark))
    assert summary.in_short([changed, passed, changed]) == [f"note on 2 cases: {remark}"]
    listed = make_counted(make_check(BUCKETS, outcome="passed"))
    remark = "2 cases with changed counts that are not judged: see -v or the HTML report"
    assert remark in summary.in_short([listed, listed, passed])
    equal = make_counted(make_check(outcome="passed").replace(findings=()))
    assert not [line for line in summary.in_short([equal, passed]) if "counts" in line]


def test_the_hardware_of_a_dry_run_is_simulated() -> None:
    simulated = "h100-80gb-sxm (NVIDIA H100 80GB HBM3, simulated)"
    assert summary.hardware((make_dry(), make_result(now()))) == f"cpu-test-2c (Test CPU), {simulated}"
    unknown = samples.make_gpu_machine("NVIDIA X9000")
    notes = [summary.machine_notes([make_dry(machine=unknown, dry=dry)]) for dry in (True, False)]
    assert list(map(len, notes)) == [0, 1]
