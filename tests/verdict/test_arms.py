"""Test how pairs of launches are judged by each metric. test_paired_comparison.py tests the decision."""

import json
from typing import Any

import pytest

from perfsuite.analysis.agreement import tokens_differ
from perfsuite.documents import plain
from perfsuite.results.counts import Counts, KeptObjects
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Failure, Observed, RankEvidence, SpanTimes
from perfsuite.results.run import Run
from perfsuite.verdict.arms import judge_counts, judge_pairs, unhealthy_pairs, unless_other
from perfsuite.verdict.checks import NEGLIGIBLE, NO_LOADER
from perfsuite.verdict.overall import THE_SAME
from perfsuite.verdict.paired_comparison import MAX_PAIRS, MIN_CHANGED
from tests.samples import DISTURBED, known, make_figures, make_launches, make_report, make_run
from tests.twin_counts import GATHERED, REDUCED, counts, launch
from tests.verdict.judging import H100, MIB, USUAL, check_of, outcomes, with_loss

A = USUAL[:MAX_PAIRS]
B = tuple(reversed(A))


def arm(speeds: tuple[float, ...] = A, factor: float = 1.0, **figures: Any) -> list[Run]:
    return make_launches(*(factor * speed for speed in speeds), **figures)


def judged(a: list[Run], b: list[Run], **options: Any) -> Verdict:
    """Judge these launches. Check that writing the verdict as JSON and reading it does not change it."""
    verdict = judge_pairs(a, b, **options)
    assert Verdict.model_validate(json.loads(json.dumps(plain(verdict)))) == verdict
    return verdict


def compared(a: list[Run], b: list[Run], **options: Any) -> Verdict:
    """Judge one pair after the other until there is a verdict."""
    for used in range(1, len(a) + 1):
        verdict = judged(a[:used], b[:used], **options)
        if verdict.outcome != "undecided":
            break
    return verdict


@pytest.mark.parametrize(
    ("speed", "outcome", "pairs"),
    [(1.0, "passed", 3), (0.7, "regressed", 5), (1.5, "improved", 5)],
    ids=["same", "slower", "faster"],
)
def test_an_arm_is_slower_faster_or_the_same(speed: float, outcome: str, pairs: int) -> None:
    verdict = compared(arm(), arm(B, speed))
    assert (verdict.outcome, verdict.launches, verdict.against) == (outcome, 2 * pairs, "arm A")
    check = check_of(verdict, "tokens_per_s")
    assert check.change == pytest.approx(speed - 1, abs=0.02)
    assert check.interval is not None
    assert check.interval[0] < speed - 1 < check.interval[1]
    assert (check.measured, check.baseline) == pytest.approx((1000 * speed, 1000), rel=0.01)


SLOWER_ARM = arm(B, 0.93)
LARGER_ARM = arm(B, 0.99, peak_memory_bytes=1.15 * 64 * MIB)


@pytest.mark.parametrize("b", [SLOWER_ARM, LARGER_ARM], ids=["slower", "larger"])
def test_a_cpu_is_allowed_15_or_20_percent(b: list[Run]) -> None:
    assert compared(arm(), b).outcome == "passed"


def test_tolerance_is_for_speed_or_one_metric() -> None:
    verdict = compared(arm(), SLOWER_ARM, tolerance=0.03)
    assert outcomes(verdict)["tokens_per_s"] == verdict.outcome == "regressed"
    assert [check.allowed for check in verdict.checks[:2]] == pytest.approx([1 - 1 / 1.03, 1 - 1 / 1.2])
    verdict = compared(arm(), LARGER_ARM, metric="peak_memory_bytes", tolerance=0.05)
    assert outcomes(verdict)["peak_memory_bytes"] == verdict.outcome == "regressed"
    assert [check.allowed for check in verdict.checks[::2]] == pytest.approx([1 - 1 / 1.15, 0.05])


def test_further_pairs_change_no_earlier_decision() -> None:
    a = arm(A[:6])
    b = arm((*B[:3], *(0.5 * speed for speed in B[3:6])))
    early, late = (check_of(judged(a[:used], b[:used]), "tokens_per_s") for used in (3, 6))
    assert (early.outcome, early.note) == ("passed", None)
    assert late == early.replace(note="decided after 3 pairs")


def test_unhealthy_launch_voids_its_pair() -> None:
    a = arm(A[:7])
    b = arm(B[:7], 0.7)
    a[1] = a[1].replace(health=DISTURBED)
    b[2] = make_launches(5.0)[0].replace(health=DISTURBED)
    assert list(unhealthy_pairs(a, b)) == [2, 3]
    verdict = judged(a, b)
    assert (verdict.outcome, verdict.launches, verdict.unhealthy_launches) == ("regressed", 14, (2, 3))
    assert verdict.reasons[0].startswith("pair 2 set aside: arm A: other processes used 60%")
    assert verdict.reasons[1].startswith("pair 3 set aside: arm B: other processes used 60%")
    assert check_of(verdict, "tokens_per_s").change == pytest.approx(0.7 - 1, abs=0.02)


@pytest.mark.parametrize(("sick", "most"), [(0, 5), (1, 6), (2, 6), (2, 8)])
def test_ends_after_the_most_pairs_allowed(sick: int, most: int) -> None:
    doubtful = (1, 1.07, 0.93, 1.03, 0.97, 1.07, 0.93, 1, 1.07, 0.93, 1, 1, 1, 1)
    a = arm((1.0,) * len(doubtful))
    b = arm(doubtful, 0.9)
    b[:sick] = [run.replace(health=DISTURBED) for run in b[:sick]]
    verdict = compared(a, b, max_pairs=most)
    assert (verdict.outcome, verdict.launches) == ("inconclusive", 2 * most)
    assert len(verdict.unhealthy_launches) == sick
    assert check_of(verdict, "tokens_per_s").outcome == "inconclusive"


def test_three_unhealthy_pairs_end_a_comparison() -> None:
    unhealthy = [make_run(health=DISTURBED)] * 3
    assert judged(arm(A[:2]), unhealthy[:2]).outcome == "undecided"
    assert judged(arm(A[:2]), arm(B[:2], 0.5)).outcome == "undecided", "two pairs are too few for a decision"
    assert judged(arm(A[:3]), unhealthy).outcome == "unhealthy"
    assert judged(arm(A[:1]), unhealthy[:1], max_unhealthy=1).outcome == "unhealthy"
    assert judged(arm(A[:1]), unhealthy[:1], max_pairs=1).outcome == "unhealthy", "no pair may follow"


def test_names_the_failing_arm() -> None:
    failed = make_run(failure=Failure(kind="crash", message="boom", at=0.0))
    assert judged([failed], arm(A[:1])).reasons == ("arm A failed: crash: boom",)


def test_names_the_hardware_of_a_failing_arm() -> None:
    error = "CUDA error: uncorrectable ECC error encountered"
    failed = make_run(failure=Failure(kind="crash", message="boom", at=0.0))
    broken = make_run(failure=Failure(kind="timeout", message=error, at=0.0), health=DISTURBED)
    verdict = judged([failed], [broken])
    assert (verdict.outcome, verdict.failure) == ("failed", "crash")
    said, machine, hardware = verdict.reasons[1].split("; meanwhile ")
    assert said == f"arm B failed: timeout: {error}"
    assert machine.startswith("other processes used 60%")
    assert hardware.startswith(f"hardware: {error}: look at ")


def mismatch(message: str) -> Run:
    return make_run(failure=Failure(kind="mismatch", message=message, at=0.0))


def doubled_launch() -> Run:
    evidence = RankEvidence(data_parallel=2, tokens=256, forwards=2)
    reports = [make_report(rank, evidence=evidence) for rank in (0, 1)]
    return mismatch(known(tokens_differ(reports, make_run().case)))


def test_doubled_work_of_one_arm_is_no_wrong_case() -> None:
    doubled = doubled_launch()
    for verdict in (judge_counts(make_run(), doubled), judged(arm(A[:1]), [doubled])):
        assert (verdict.outcome, verdict.failure) == ("failed", "mismatch")
        (reason,) = verdict.reasons
        expected = "arm B gives the model 512 tokens a step, but arm A gives it 256: the change is the cause"
        assert reason.startswith(expected)
        assert ", in 2 forward calls per rank). To compare the work of both arms, give Script(" in reason


def test_doubled_work_of_both_arms_may_be_a_wrong_case() -> None:
    doubled = doubled_launch()
    both = judge_counts(doubled, doubled).reasons
    assert ["Correct the case" in reason for reason in both] == [True, True], (
        "the case might be what is wrong"
    )
    assert "Correct the case" in judge_counts(doubled, make_run()).reasons[0]


def test_mismatch_in_one_arm_is_due_to_the_change() -> None:
    message = "compute_dtype: the case asks for 'bfloat16', but 'float32' ran"
    ran = f"{message}. The measurements would not be those of this case."
    (reason,) = judge_counts(make_run(), mismatch(ran)).reasons
    assert reason == f"arm B failed: mismatch: {message}. arm A matches the case: the change is the cause"


def test_another_loss_fails_and_hides_no_slowdown() -> None:
    verdict = compared([with_loss(1)] * 5, [with_loss(1.3, speed=0.7)] * 5)
    assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", "loss", 10)
    assert check_of(verdict, "tokens_per_s").outcome == "regressed"
    assert "the loss between 0% and 10% of the steps is 5.1" in verdict.reasons[0]
    assert ", but 3.97" in verdict.reasons[0]


def of_loss(factor: float, norm: float) -> list[Run]:
    return [run.replace(loss=with_loss(factor).loss) for run in arm(A[:3], unclipped_norm=norm)]


def test_a_scaled_loss_of_equal_gradients_is_a_note() -> None:
    verdict = compared(of_loss(1, 7.0), of_loss(4, 7.0))
    assert verdict.outcome == "passed"
    assert verdict.changed == (
        "the loss is x 4.000 in every step, but the gradients are the same: only the loss has another scale",
    )


def test_a_common_factor_of_loss_and_gradients_fails() -> None:
    verdict = compared(of_loss(1, 7.0), of_loss(4, 28.0))
    assert (verdict.outcome, verdict.failure) == ("failed", "loss")
    assert verdict.reasons[0].startswith("loss and gradients x 4.000 in every step, compared with arm A: is")


def test_other_settings_are_a_finding_not_refused() -> None:
    sides = ((arm(), "flash", "2.13.0"), (arm(B, 0.7), "math", "2.14.0"))
    a, b = (
        [run.replace(observed=Observed(settings={"x": x}, environment={"torch": torch})) for run in runs]
        for runs, x, torch in sides
    )
    verdict = compared(a, b)
    assert (verdict.outcome, verdict.failure) == ("regressed", None)
    said = ("settings differ: x is 'flash' in arm A and 'math' in arm B",)
    assert verdict.reasons == judge_counts(a[0], b[0]).reasons[1:] == said
    assert verdict.changed == ("torch: 2.13.0 -> 2.14.0",)


def test_memory_of_a_gpu_is_judged_by_its_medians() -> None:
    verdict = compared(arm(machine=H100), arm(B, machine=H100, peak_memory_bytes=66 * MIB))
    assert outcomes(verdict)["peak_memory_bytes"] == verdict.outcome == "regressed"
    assert check_of(verdict, "peak_memory_bytes").change == pytest.approx(2 / 64)
    assert outcomes(verdict)["tokens_per_s"] == "passed", (
        "the comparison continued until the speed was decided"
    )


WITHOUT_MEMORY = arm(B, peak_memory_bytes=None)


@pytest.mark.parametrize(
    ("a", "b"),
    [(arm(), WITHOUT_MEMORY), (WITHOUT_MEMORY, arm(B)), (arm(), arm(B, tokens_per_s=0.0))],
    ids=["arm B", "arm A", "no speed"],
)
def test_never_passes_a_metric_an_arm_lacks(a: list[Run], b: list[Run]) -> None:
    assert compared(a, b).failure == "missing_metric"


def test_names_the_arm_without_a_metric() -> None:
    check = check_of(compared(arm(), arm(B, cpu_s_per_step=1.0)), "cpu_s_per_step")
    assert (check.outcome, check.note) == ("inconclusive", "was not measured in arm A")


def test_shows_a_wrong_value_even_beside_missing_ones() -> None:
    values = (0, *[None] * (len(B) - 1))
    b = [arm((speed,), peak_memory_bytes=value)[0] for speed, value in zip(B, values, strict=True)]
    assert check_of(judged(arm(), b), "peak_memory_bytes").note == "is 0.0 in arm B"


MACHINE = (1.0, 1.3, 0.9, 1.2, 1.1, 0.8)
"""How slow the machine is in each launch of an arm. With 2, a launch takes twice as long."""


def on_a_drifting_machine(machine: tuple[float, ...], speed: float = 1.0) -> list[Run]:
    """Return launches whose step time and CPU time grow with the probe's time. Their memory is constant."""
    return [
        make_launches(speed * usual / slow, cpu_s_per_step=0.1 * slow / usual, probe_s_p50=0.01 * slow)[0]
        for slow, usual in zip(machine, A, strict=False)
    ]


def test_corrects_for_the_machines_own_speed() -> None:
    a = on_a_drifting_machine(MACHINE)
    b = on_a_drifting_machine(MACHINE[::-1], speed=0.8)
    verdict = judged(a, b, corrects=True)
    exponents = {check.metric: check.probe_exponent for check in verdict.checks}
    assert exponents.pop("peak_memory_bytes") is None
    follow = ("tokens_per_s", "tokens_per_s_mean", "cpu_s_per_step")
    assert exponents == pytest.approx(dict.fromkeys(follow, 1), abs=0.05)
    assert outcomes(verdict)["tokens_per_s"] == verdict.outcome == "regressed"
    assert check_of(verdict, "tokens_per_s").change == pytest.approx(-0.2, abs=0.02)
    assert outcomes(verdict)["cpu_s_per_step"] == "passed"


def test_a_drifting_machine_hides_an_uncorrected_change() -> None:
    raw = judged(on_a_drifting_machine(MACHINE), on_a_drifting_machine(MACHINE[::-1], speed=0.8))
    assert {check.probe_exponent for check in raw.checks} == {None}
    assert outcomes(raw)["tokens_per_s"] == "undecided"


def test_one_launch_without_a_probe_prevents_correction() -> None:
    a = on_a_drifting_machine(MACHINE)
    b = on_a_drifting_machine(MACHINE[::-1], speed=0.8)
    b[2] = b[2].replace(figures=b[2].figures.replace(probe_s_p50=None))
    assert judged(a, b, corrects=True) == judged(a, b)


def test_slowdown_that_slows_the_probe_remains() -> None:
    a = on_a_drifting_machine(MACHINE)
    b = on_a_drifting_machine(tuple(1.9 * slow for slow in MACHINE[::-1]))
    check = check_of(judged(a, b, corrects=True, max_pairs=len(a)), "tokens_per_s")
    assert check.outcome == "inconclusive"
    assert check.note == (
        "regressed as measured, but passed when corrected for the machine's own speed; the probe might also "
        "differ between the arms"
    )


def counted(factor: float, **changes: Any) -> list[Run]:
    runs = make_launches(*(factor * speed for speed in A[:6]))
    return [launch(counts(**changes), figures=run.figures, started_at=run.started_at) for run in runs]


MORE = {"host_reads": {"forward": 9, "optimizer": 39}}
MIXED = {**MORE, "collectives": (GATHERED, REDUCED)}
READS = "host reads in forward: 1 -> 9 a step"
FEWER = "all_gather of 2 ranks: 5 fewer calls a step in backward (-3.50 MiB)"


SAME_COUNTS = f"{THE_SAME} packages, threads and the machine"


@pytest.mark.parametrize(
    ("speed", "outcome", "changes", "said"),
    [
        *(
            (0.7, "regressed", MORE, READS),
            (0.7, "regressed", MIXED, READS),
            (0.7, "regressed", {}, SAME_COUNTS),
        ),
        *((1.0, "passed", MORE, None), (1.5, "improved", MIXED, FEWER)),
    ],
    ids=["slower, more", "slower, mixed", "slower, same", "same, more", "faster, mixed"],
)
def test_counts_only_explain_a_timed_change(
    speed: float, outcome: str, changes: dict[str, Any], said: str | None
) -> None:
    verdict = compared(counted(1.0), counted(speed, **changes))
    assert (verdict.outcome, verdict.explained) == (outcome, said)
    assert verdict.counts is not None
    assert {finding.outcome for finding in verdict.counts.findings} == ({"passed"} if changes else set())


def test_upgrade_is_a_note_of_the_counts() -> None:
    upgraded = compared(counted(1.0), [launch(counts(**MORE), torch="2.14.0")] * 6).counts
    assert upgraded is not None
    assert upgraded.notes == ("counted with other versions: torch 2.13.0 -> 2.14.0",)


@pytest.mark.parametrize("b", [arm(B, 0.7), counted(0.7)], ids=["neither", "arm A"])
def test_an_uncounted_arm_has_no_counts(b: list[Run]) -> None:
    assert compared(arm(), b).counts is None


def test_growth_is_judged_beside_times() -> None:
    """A leak makes a long run fail, although it hardly slows down the few measured steps."""
    clean = counted(1.0, kept=KeptObjects())
    leaking = counted(1.0, kept=KeptObjects(by_type={"Spec": 5}))
    verdict = compared(clean, leaking)
    assert verdict.outcome == "regressed"
    (finding,) = known(verdict.counts).findings
    assert (finding.outcome, finding.quantity) == ("regressed", "objects kept per step")
    assert compared(leaking, clean).outcome == "passed", "less growth is not an improvement"


def later(flops: int) -> dict[str, Any]:
    """Return the counts of a launch in which step 24 was also counted. `flops` are the FLOPs of step 24."""
    whole = {"flops": {"forward": 10**9}}
    return {**whole, "also_counted": (24,), "spans": {"step 24": Counts(step=24, flops={"forward": flops})}}


def test_steps_that_shrink_later_are_no_faster() -> None:
    """An arm whose later steps do less work is not faster. Tokens are checked only in the second step."""
    whole = counted(1.0, **later(10**9))
    shrunk = counted(1.5, **later(6 * 10**8))
    verdict = compared(whole, shrunk)
    assert verdict.outcome == "inconclusive"
    assert "step 24 does 40% fewer FLOPs than step 4 of the same launch" in verdict.reasons[0]
    assert compared(shrunk, counted(2.5, **later(6 * 10**8))).outcome == "improved", (
        "both arms shrink in the same way"
    )
    assert judge_counts(whole[0], shrunk[0]).outcome == "inconclusive"


def test_steps_that_shrink_later_name_their_input() -> None:
    usual = later(10**9)
    shorter = Counts(step=24, flops={"forward": 6 * 10**8}, inputs={"int64[4, 64]": 1})
    shrunk = {**usual, "inputs": {"int64[4, 128]": 1}, "spans": {"step 24": shorter}}
    verdict = compared(counted(1.0, **usual), counted(1.5, **shrunk))
    assert verdict.reasons[0].startswith(
        "step 24 does 40% fewer FLOPs than step 4 of the same launch: its input is 1 x int64[4, 64] instead "
        "of 1 x int64[4, 128], so less work"
    )


# Judged by counts alone


def test_a_new_event_is_more_work() -> None:
    """The same perfsuite counts both arms. A baseline of another perfsuite might not know the event."""
    saving = launch(counts(spans={"save checkpoint": Counts(bytes_written=9)}))
    verdict = judge_counts(launch(), saving)
    assert verdict.outcome == "regressed"
    counted_both = known(verdict.counts)
    assert [finding.sentence for finding in counted_both.findings] == ["save checkpoint: only in arm B"]
    assert counted_both.notes == ()


def test_work_moved_into_a_thread_is_no_gain() -> None:
    assert judge_counts(launch(), launch(other_threads=1)).outcome == "passed", "it might only write a log"
    fewer = launch(counts(kernels={"forward": 100}))
    assert judge_counts(launch(), fewer).outcome == "improved"
    verdict = judge_counts(launch(), fewer.replace(other_threads=1))
    assert verdict.outcome == "inconclusive"
    assert verdict.reasons[-1] == "1 more thread computes in a step, and the work of threads is not counted"
    both = launch(other_threads=1)
    assert judge_counts(both, fewer.replace(other_threads=1)).outcome == "improved", (
        "both arms have an uncounted thread"
    )


@pytest.mark.parametrize(("kernels", "outcome"), [(100, "improved"), (178, "regressed"), (177, "passed")])
def test_a_step_without_an_event_is_no_better(kernels: int, outcome: str) -> None:
    event = {"save checkpoint": Counts(bytes_written=9)}
    saving = launch(counts(kernels={"forward": 177}, spans=event))
    now = counts(kernels={"forward": kernels})
    assert judge_counts(saving, launch(now.replace(spans=event))).outcome == outcome
    verdict = judge_counts(saving, launch(now))
    assert verdict.outcome == (outcome if outcome == "regressed" else "inconclusive")
    assert known(verdict.counts).notes[0] == (
        "save checkpoint was not seen, and might be done in a way that is not recognised"
    )


KERNEL_MORE = counts(kernels={"forward": 178, "backward": 327, "optimizer": 351})


@pytest.mark.parametrize(
    ("a", "b", "outcome", "words"),
    [
        (launch(), launch(), "passed", ""),
        (launch(), launch(KERNEL_MORE), "regressed", "kernels in forward: 177 -> 178"),
        (launch(KERNEL_MORE), launch(), "improved", "kernels in forward: 178 -> 177"),
        (launch(), launch(KERNEL_MORE, torch="2.14.0"), "regressed", "kernels in forward: 177 -> 178"),
        (launch(), launch(counts(collectives=())), "inconclusive", "less than half, so the rest might be"),
        (launch(), launch(counts=()), "inconclusive", "no launch was counted"),
        (launch(counts=()), launch(), "inconclusive", "nothing was counted"),
        (launch(), launch(counts(method="hooks-1")), "failed", "use the same perfsuite in both"),
        (launch(), launch(failure=Failure(kind="crash", message="boom")), "failed", "arm B failed: crash"),
        (launch(), launch(hidden=("a CUDA graph",)), "inconclusive", "a CUDA graph"),
    ],
)
def test_counts_alone_judge_across_versions(a: Run, b: Run, outcome: str, words: str) -> None:
    verdict = judge_counts(a, b)
    assert (verdict.outcome, verdict.against) == (outcome, "arm A")
    sentences = [finding.sentence for finding in verdict.counts.findings] if verdict.counts else []
    assert words in "; ".join([*sentences, *verdict.reasons])
    is_compared = verdict.counts is not None and verdict.counts.compared
    assert not (is_compared and (b.hidden or not b.counts or outcome == "failed"))
    assert is_compared or outcome not in ("passed", "regressed", "improved")


@pytest.mark.parametrize(("norm", "outcome"), [(1.0, "improved"), (0.36, "inconclusive"), (None, "improved")])
def test_less_work_with_other_gradients_is_no_gain(norm: float | None, outcome: str) -> None:
    """If gradients differ in one launch of each arm, the comparison is `inconclusive`. In two, it fails."""
    difference = "the norm of the gradients after clipping in step 4: 1 -> 0.36 (at most 2.0% is allowed)"
    a = launch(KERNEL_MORE, figures=make_figures(gradient_norm=1.0))
    b = launch(figures=make_figures(gradient_norm=norm))
    verdict = judge_counts(a, b)
    assert verdict.outcome == outcome
    assert [why.startswith(difference) for why in verdict.reasons] == [True] * (outcome == "inconclusive")
    of_more = unless_other(verdict, [a, a], [b, b])
    assert of_more.reasons == ((f"{difference}, in 2 launches of each arm",) if verdict.reasons else ())


@pytest.mark.parametrize(
    ("a", "b", "losses", "outcome"),
    [
        ((1.0, 1.0), (0.36, 0.36), 1.0, "failed"),
        ((1.0, 1.001), (0.36, 0.36), 1.0, "failed"),
        ((1.0, 1.0), (2.0, 2.0), 1.0, "failed"),
        ((1.0, 1.0), (0.99, 0.99), 1.0, "passed"),  # small differences come from the order of sums
        ((1.0, 1.1), (0.5, 0.5), 1.0, "passed"),  # without a seed, arm A itself varies
        ((1.0, 1.0), (0.5, None), 1.0, "passed"),
    ],
)
def test_other_gradients_in_every_launch_fail(
    a: tuple[float, float], b: tuple[float, float], losses: float, outcome: str
) -> None:
    """If the gradients already vary between the launches of one arm, a difference proves nothing."""
    curves = (tuple(scale * (5 - step / 10) for step in range(20)) for scale in (1, losses))
    before, now = (
        [launch(loss=loss, figures=make_figures(gradient_norm=norm)) for norm in norms]
        for norms, loss in zip((a, b), curves, strict=True)
    )
    verdict = unless_other(judge_counts(before[0], now[0]), before, now)
    allowed = 3 if a[1] != 1 else 2
    change = f"the norm of the gradients after clipping in step 4: 1 -> {b[0]:g}"
    difference = f"{change} (at most {allowed}.0% is allowed), in 2 launches of each arm"
    expected: tuple[str | None, tuple[str, ...]]
    expected = ("loss", (difference,)) if outcome == "failed" else (None, ())
    if outcome == "passed" and b[0] != 0.99:
        expected = (
            None,
            (f"{change} (at most 2.0% is allowed), which more launches did not confirm",),
        )
    assert (verdict.outcome, verdict.failure, verdict.reasons) == (outcome, *expected)


def waits(seconds: float, speeds: tuple[float, ...] = A, *, step_s: float = 1.0) -> list[Run]:
    return [
        run.replace(figures=run.figures.replace(data_wait_s=seconds * speed, step_s_mean=step_s))
        for run, speed in zip(arm(), speeds, strict=True)
    ]


@pytest.mark.parametrize(
    ("now", "outcome"), [(0.01, "passed"), (0.08, "regressed"), (0.025, "passed")], ids=str
)
def test_an_arm_that_waits_for_data_regresses(now: float, outcome: str) -> None:
    verdict = compared(waits(0.01), waits(now, B))
    assert (verdict.outcome, outcomes(verdict)["data_wait_s"]) == (outcome, outcome)


def test_certain_wait_below_the_floor_passes() -> None:
    """The wait grows by 0.9 ms. That is negligible, although it is 9% of a step of 10 ms."""
    before = waits(0.0005, step_s=0.01)
    now = waits(0.0014, B, step_s=0.01)
    check = check_of(compared(before, now), "data_wait_s")
    assert (check.outcome, check.note) == ("passed", NEGLIGIBLE)


def lasts(seconds: float, speeds: tuple[float, ...] = A, *, cold: bool = False) -> list[Run]:
    """Return launches whose imports take this long. If `cold`, the first launch has a cold start-up."""
    spans = [
        "cold start-up: imports" if cold and not number else "start-up: imports"
        for number in range(len(speeds))
    ]
    return [
        run.replace(figures=run.figures.replace(spans_s={span: seconds * speed}))
        for run, span, speed in zip(arm(), spans, speeds, strict=True)
    ]


@pytest.mark.parametrize(("now", "outcome"), [(6.0, "passed"), (9.0, "regressed")])
def test_slower_start_up_regresses(now: float, outcome: str) -> None:
    verdict = compared(lasts(6), lasts(now, B))
    assert (verdict.outcome, outcomes(verdict)["seconds of start-up: imports"]) == (outcome, outcome)


def test_span_search_continues_until_decided() -> None:
    """A search continues until there is a verdict on its span.

    A nightly run does not launch again for a span that looks unchanged.
    """
    a, b = (lasts(6, tuple(speed**6 for speed in speeds)) for speeds in (A, B))
    name = "seconds of start-up: imports"
    assert judged(a[:3], b[:3], metric=name, tolerance=0.05).outcome == "undecided"
    assert judged(a[:4], b[:4], metric=name, tolerance=0.05).outcome == "passed"


def saves(seconds: float, *, times: int, speeds: tuple[float, ...] = A) -> list[Run]:
    """Return launches that save this many checkpoints, each of which takes this long."""
    return [
        run.replace(
            figures=run.figures.replace(spans_s={"save checkpoint": seconds * speed}),
            spans={"save checkpoint": SpanTimes(seconds=(seconds * speed,) * times)},
        )
        for run, speed in zip(arm(), speeds, strict=True)
    ]


def test_more_but_shorter_events_are_no_improvement() -> None:
    name = "seconds of save checkpoint"
    fewer = compared(saves(8, times=2), saves(4, times=2, speeds=B))
    more = compared(saves(8, times=2), saves(4, times=4, speeds=B))
    assert (fewer.outcome, outcomes(fewer)[name]) == ("improved", "improved")
    assert (more.outcome, outcomes(more)[name]) == ("passed", "passed")
    note = check_of(more, name).note
    assert note == "arm B has more such spans, 4 instead of 2, so a shorter time is not better"


def test_warm_start_ups_omit_compiling_pairs() -> None:
    verdict = compared(lasts(6, cold=True), lasts(9, B, cold=True))
    check = check_of(verdict, "seconds of start-up: imports")
    assert check.outcome == "regressed"
    assert verdict.launches == 2 * (MIN_CHANGED + 1)


def test_a_span_of_one_arm_is_shown_or_unknown() -> None:
    assert "seconds of start-up: imports" not in outcomes(compared(arm(), lasts(6)))
    verdict = compared(lasts(6), arm())
    assert (verdict.outcome, outcomes(verdict)["seconds of start-up: imports"]) == (
        "inconclusive",
        "inconclusive",
    )


@pytest.mark.parametrize(
    ("a", "b", "lacking"),
    [(waits(0.1), arm(), "arm B"), (arm(), waits(0.1), "arm A")],
    ids=["arm B", "arm A"],
)
def test_unseen_loader_is_inconclusive(a: list[Run], b: list[Run], lacking: str) -> None:
    check = check_of(compared(a, b), "data_wait_s")
    assert (check.outcome, check.note) == ("inconclusive", f"was not measured in {lacking}; {NO_LOADER}")
