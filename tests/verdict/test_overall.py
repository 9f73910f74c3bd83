from typing import Any, Literal

import pytest

from perfsuite.case.case import KnownIssue, Topology
from perfsuite.results.baseline import Acceptance, Baseline, from_runs
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.counts import Counts
from perfsuite.results.outcome import CountCheck, Excuse, Outcome, Verdict
from perfsuite.results.profile import TakenProfile
from perfsuite.results.run import Run
from perfsuite.verdict.overall import (
    NOTHING_TO_COMPARE,
    THE_SAME,
    excuse,
    explained_by_counts,
    with_counts,
    with_unseen,
)
from tests.samples import known, make_case, make_gpu_machine, make_run, metric_check
from tests.traces import taken, unseen_profile
from tests.twin_counts import baseline_of, counts, launch

MORE, FEWER = (launch(counts(host_reads={"forward": reads})) for reads in (80, 2))
SAME = launch()
HIDES = launch(counts=(), hidden=("a replay",))
OTHER_BUCKETS = launch(counts(host_reads={"forward": 39, "optimizer": 1}))


def timed(outcome: Outcome, **changes: Any) -> Verdict:
    """Return a verdict that has no counts. Its only check has the same outcome as the verdict."""
    checks = (metric_check(outcome=outcome),)
    return Verdict(**{"outcome": outcome, "launches": 1, "checks": checks, **changes})


ALL: tuple[Outcome, ...] = (
    *("passed", "improved", "regressed", "inconclusive", "recorded", "unhealthy", "failed"),
)


@pytest.mark.parametrize("outcome", ALL)
def test_verdict_is_the_worse_of_time_and_counts(outcome: Outcome) -> None:
    """Counts can make the verdict from times worse.

    If times are only recorded, as on a new machine, an improvement of the counts is reported as well.
    Otherwise nobody would accept the new counts. If the verdict is "unlike", the counts are still shown.
    """
    failure = "unlike" if outcome == "failed" else None
    timed_alone = timed(outcome, failure=failure)
    more, fewer = (with_counts(timed_alone, [run], baseline_of()) for run in (MORE, FEWER))
    assert (more.outcome, more.failure) == ("failed" if outcome == "failed" else "regressed", failure)
    assert more.counts is not None
    assert more.counts.outcome == "regressed"
    assert fewer.outcome == ("improved" if outcome in ("passed", "recorded") else outcome)
    assert fewer.is_recorded is (outcome == "recorded")
    for run in (SAME, OTHER_BUCKETS, launch(counts=())):
        assert with_counts(timed(outcome), [run], baseline_of()).outcome == outcome
        assert with_counts(timed(outcome), [run], None).outcome == outcome


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (MORE, "host reads in forward: 1 -> 80, in optimizer: 39 -> 0 a step"),
        (FEWER, "host reads in forward: 1 -> 2, in optimizer: 39 -> 0 a step"),
        (OTHER_BUCKETS, "host reads in forward: 1 -> 39, in optimizer: 39 -> 1 a step"),
        *((SAME, f"{THE_SAME} packages, threads and the machine"), (launch(counts=()), None)),
    ],
    ids=["more", "fewer", "other buckets", "same", "not counted"],
)
def test_slower_case_starts_with_changed_counts(run: Run, said: str | None) -> None:
    assert with_counts(timed("regressed"), [run], baseline_of()).explained == said
    assert with_counts(timed("regressed"), [run], None).explained is None
    for outcome in set(ALL) - {"regressed"}:
        assert with_counts(timed(outcome), [run], baseline_of()).explained is None


@pytest.mark.parametrize(
    ("processes", "look_at"), [(2, "kernels, NCCL and the machine"), (1, "kernels and the machine")]
)
def test_advice_fits_the_machine(processes: int, look_at: str) -> None:
    case = make_case(topology=Topology(processes_per_node=processes))
    run = make_run(case=case, machine=make_gpu_machine())
    said = explained_by_counts(timed("regressed").checks, CountCheck(outcome="passed"), run)
    assert said == f"{THE_SAME} {look_at}"


def test_explains_an_unhealthy_verdict() -> None:
    unhealthy = with_counts(timed("regressed").replace(outcome="unhealthy"), [SAME], baseline_of())
    assert (unhealthy.explained or "").startswith(THE_SAME), "an unhealthy verdict is explained as well"


def test_growth_explains_before_other_splits() -> None:
    before = counts(flops={"forward": 10, "backward": 20}, host_reads={"forward": 1})
    for changes, said in (
        ({"flops": {"backward": 30}}, "forward: 10 FLOP -> 0, backward: 20 -> 30 FLOP"),
        ({"kernels": {"forward": 999}}, "kernels in forward: 177 -> 999"),
    ):
        now = launch(before.replace(host_reads={}, **changes))
        verdict = with_counts(timed("regressed"), [now], baseline_of(before))
        assert (verdict.explained or "").startswith(said)
    assert verdict.counts is not None
    both: tuple[Literal["regressed", "improved"], ...] = ("regressed", "improved")
    checks = [timed(outcome).checks[0] for outcome in both]
    why = explained_by_counts(checks, verdict.counts, now, both)
    assert why == verdict.explained, "growth explains any metric that is slower"
    shrank = explained_by_counts(checks[1:], verdict.counts, now, both)
    assert (shrank or "").startswith("host reads in forward: 1 -> 0")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (metric_check(outcome="regressed").metric, THE_SAME),
        ("seconds of start-up: imports", "start-up: "),
        ("seconds of save checkpoint", THE_SAME),
    ],
)
def test_imports_explain_only_start_up_seconds(metric: str, said: str) -> None:
    before, now = (
        counts(spans={"start-up": Counts(modules=dict.fromkeys(names, 60))})
        for names in (["torch"], ["torch", "sympy"])
    )
    checks = (metric_check(outcome="regressed").replace(metric=metric),)
    verdict = with_counts(timed("regressed", checks=checks), [launch(now)], baseline_of(before))
    assert (verdict.explained or "").startswith(said)


OTHER_METHOD = launch(counts(method="hooks-1"))


def test_counts_of_another_method_fail_the_case() -> None:
    verdict = with_counts(timed("passed", reasons=("a",)), [OTHER_METHOD], baseline_of())
    assert (verdict.outcome, verdict.failure) == ("failed", "unlike")
    assert verdict.reasons[0] == "a"
    assert "'dispatch-2', this step with 'hooks-1'" in verdict.reasons[1]
    assert verdict.checks
    failed = timed("failed", failure="loss", reasons=("a",))
    assert with_counts(failed, [OTHER_METHOD], baseline_of()).reasons == ("a",)
    assert with_counts(timed("passed"), [OTHER_METHOD], None).outcome == "passed"


def test_a_baseline_that_did_not_compile_is_accepted_again() -> None:
    """The counts of the baseline have kernels but no compiled graphs."""
    compiled = launch(counts(kernels=None), dry=True)
    verdict = with_counts(timed("passed"), [compiled], baseline_of())
    assert (verdict.outcome, verdict.failure) == ("failed", "unlike")
    assert "this dry run compiled the model" in verdict.reasons[0]
    assert with_counts(timed("passed"), [compiled], baseline_of(counts(kernels=None))).failure is None


@pytest.mark.parametrize(("before", "outcome"), [(0, "passed"), (1, "improved"), (None, "improved")])
def test_a_thread_is_compared_with_the_baselines(before: int | None, outcome: str) -> None:
    fewer = launch(counts(kernels={"forward": 100}), other_threads=1)
    known_threads = baseline_of().replace(other_threads=before)
    assert known(with_counts(timed("passed"), [fewer], known_threads).counts).outcome == outcome


@pytest.mark.parametrize(
    ("events", "outcome"), [((), "not counted"), (("evaluate", "save checkpoint"), "improved")]
)
def test_less_work_needs_the_baselines_events(events: tuple[str, ...], outcome: str) -> None:
    baseline = baseline_of(
        counts(spans={"evaluate": Counts(), "save checkpoint": Counts(), "mine": Counts()})
    )
    fewer = launch(counts(kernels={"forward": 100}, spans={name: Counts() for name in events}))
    check = known(with_counts(timed("passed"), [fewer], baseline).counts)
    assert check.outcome == outcome
    unseen = "evaluate and save checkpoint were not seen"
    assert any(note.startswith(unseen) for note in check.notes) == (outcome == "not counted")


@pytest.mark.parametrize("outcome", ALL)
@pytest.mark.parametrize("inject", [None, "slowdown=30%"])
def test_records_counts_unless_worse_or_injected(outcome: Outcome, inject: str | None) -> None:
    counts = with_counts(timed(outcome), [SAME.replace(inject=inject)], None, "b.json").counts
    recorded = CountCheck(outcome="recorded", compared=False, baseline_file="b.json")
    neither = CountCheck(outcome="passed", compared=False, notes=(NOTHING_TO_COMPARE,))
    assert counts == (neither if inject or outcome in ("regressed", "failed") else recorded)


@pytest.mark.parametrize("outcome", ALL)
@pytest.mark.parametrize(
    ("baseline", "file"), [(baseline_of(), "b.json"), (None, None)], ids=["baseline", "none"]
)
def test_names_the_file_of_a_baseline_that_exists(
    outcome: Outcome, baseline: CountBaseline | None, file: str | None
) -> None:
    check = with_counts(timed(outcome), [HIDES], baseline, "b.json").counts
    assert check is not None
    assert check.baseline_file == file


UNSEEN = {"": taken(unseen_profile(0.9))}


@pytest.mark.parametrize("outcome", ["passed", "improved", "inconclusive", "recorded"])
@pytest.mark.parametrize("run", [SAME, FEWER, OTHER_BUCKETS, HIDES])
def test_counts_without_profiled_work_say_nothing(outcome: Outcome, run: Run) -> None:
    verdict = with_unseen(with_counts(timed(outcome), [run], baseline_of(), "b.json"), UNSEEN)
    assert (verdict.outcome, verdict.explained) == (outcome, None)
    check = verdict.counts
    assert check is not None
    assert (check.outcome, check.compared, check.findings) == ("not counted", False, ())
    assert check.baseline_file == "b.json"
    assert check.notes[:-1] == run.hidden, "the note comes in addition to the launch's notes"
    assert check.notes[-1].startswith("according to the profile, 90% of the GPU's computing time")


def test_counts_without_profiled_work_are_no_baseline() -> None:
    first = with_unseen(with_counts(timed("passed"), [SAME], None, "b.json"), UNSEEN).counts
    assert first is not None
    assert (first.outcome, first.baseline_file) == ("not counted", None), "nothing is recorded as a baseline"


def test_profile_excuses_no_visible_growth() -> None:
    before = with_counts(timed("passed"), [MORE], baseline_of())
    verdict = with_unseen(before, UNSEEN)
    assert verdict.counts is not None
    assert before.counts is not None
    assert (verdict.outcome, verdict.counts.outcome) == ("regressed", "regressed")
    assert verdict.counts.findings == before.counts.findings
    assert "the counts do not contain them" in verdict.counts.notes[-1]


@pytest.mark.parametrize(
    "profile", [taken(), TakenProfile(why_none="out of memory")], ids=["nothing unseen", "failed"]
)
def test_silent_profile_changes_no_counts(profile: TakenProfile) -> None:
    before = with_counts(timed("passed"), [FEWER], baseline_of())
    assert with_unseen(before, {"": profile}) == before


def test_unseen_work_without_counts_changes_nothing() -> None:
    assert with_unseen(timed("passed"), UNSEEN) == timed("passed")


# Known issues and other excuses

ISSUE: dict[str, Any] = {"known_issue": KnownIssue(url="https://example.org/issues/209", failure="timeout")}
SWEPT: dict[str, Any] = {"may_run_out_of_memory": True}
LOCAL = from_runs([make_run()] * 5)
REVIEWED = LOCAL.replace(accepted=Acceptance(by="somebody", date="2026-01-01", commit=None))


@pytest.mark.parametrize(
    ("changes", "failure", "baseline", "shared", "expected"),
    [
        *(
            (ISSUE, "timeout", baseline, shared, "known issue")
            for baseline in (None, LOCAL)
            for shared in (0, 1)
        ),
        (ISSUE, "timeout", REVIEWED, False, None),
        *((ISSUE, failure, None, False, None) for failure in ("crash", "out_of_memory")),
        (SWEPT, "out_of_memory", None, False, "out of memory"),
        (SWEPT, "out_of_memory", None, True, None),  # other processes might have used the memory
        *((SWEPT, "out_of_memory", baseline, False, None) for baseline in (LOCAL, REVIEWED)),
        (SWEPT, "crash", None, False, None),
        (ISSUE | SWEPT, "timeout", None, False, "known issue"),
        (ISSUE | SWEPT, "out_of_memory", None, False, "out of memory"),
        (ISSUE | SWEPT, None, None, False, None),  # the case passed
        *(({}, failure, None, False, None) for failure in ("out_of_memory", "timeout")),
    ],
)
def test_which_failures_are_no_surprise(
    changes: dict[str, Any], failure: Any, baseline: Baseline | None, shared: bool, expected: Excuse | None
) -> None:
    verdict = Verdict(outcome="failed" if failure else "passed", launches=1, failure=failure)
    assert excuse(make_case(**changes), verdict, baseline, shared=shared) == expected
