"""Test that each mode of comparison notices two sides that compute different things."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from perfsuite.results import baseline as baselines
from perfsuite.results import count_baseline
from perfsuite.results.counts import Counts
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Observed
from perfsuite.results.run import Run
from perfsuite.verdict.arms import judge_counts, judge_pairs, needs_more, unless_other
from perfsuite.verdict.computation import (
    DIGITS,
    Computed,
    does_less,
    less_precise,
    more_precise,
    other_computation,
)
from perfsuite.verdict.loss import few_differ
from perfsuite.verdict.overall import NOT_COMPARED, OF_A_DRY_RUN, OF_COUNTS, with_counts
from tests.samples import make_figures
from tests.twin_counts import counts, launch
from tests.verdict.judging import judged, with_loss

FP32 = {"parameters": {"float32": 100}, "optimizer state": {"float32": 200}}
MORE = counts(kernels={"forward": 178, "backward": 327, "optimizer": 351})


@pytest.mark.parametrize(
    ("then", "now", "less", "more"),
    [
        ({"float32": 100}, {"float32": 100}, [], []),
        ({"float32": 100}, {"bfloat16": 100}, ["x: float32 -> bfloat16"], []),
        ({"bfloat16": 100}, {"float32": 100}, [], ["x: bfloat16 -> float32"]),
        ({"float32": 200}, {"float32": 100}, [], []),  # the world size differs
        ({"float32": 3}, {"float32": 2, "bfloat16": 1}, ["x: float32 -> float32 66.7%, bfloat16 33.3%"], []),
        ({"float32": 100}, {"uint8": 100, "float32": 1}, ["x: float32 -> uint8 99%, float32 0.99%"], []),
        ({"float16": 100}, {"bfloat16": 100}, ["x: float16 -> bfloat16"], []),
        # If some elements become more precise and others less precise, the whole counts as less precise.
        ({"bfloat16": 9}, {"float32": 5, "int8": 5}, ["x: bfloat16 -> float32 50%, int8 50%"], []),
        ({"int64": 5}, {"float32": 5}, [], []),  # indices have no precision
        ({"float32": 10}, {"float32": 9, "bfloat16": 1}, ["x: float32 -> float32 90%, bfloat16 10%"], []),
        # Elements of one dtype that are added or removed do not change the precision of the others.
        ({"bfloat16": 990, "float32": 10}, {"bfloat16": 991, "float32": 10}, [], []),
        ({"bfloat16": 991, "float32": 10}, {"bfloat16": 990, "float32": 10}, [], []),
        ({"bfloat16": 100, "float32": 4}, {"bfloat16": 100, "float32": 2}, [], []),
        ({"bfloat16": 100, "float32": 4}, {"bfloat16": 100, "float32": 6}, [], []),
        ({"bfloat16": 990, "float32": 10}, {"bfloat16": 1980, "float32": 20}, [], []),
        ({"float32": 3}, {"float32": 3, "bfloat16": 1}, [], []),
        ({"float32": 10**8, "bfloat16": 1}, {"float32": 10**8 - 1, "bfloat16": 2}, [], []),  # padding
        # Half of the elements are no longer trained, and the other half has a lower precision.
        ({"float32": 100}, {"bfloat16": 50}, ["x: float32 -> bfloat16"], []),
        ({"float32": 10}, {"int4": 10}, ["x: float32 -> int4"], []),
        ({"float8_e4m3fn": 10}, {"uint4": 10}, ["x: float8_e4m3fn -> uint4"], []),
        ({"int4": 10}, {"int8": 10}, [], ["x: int4 -> int8"]),
        ({"float32": 10}, {"float8_e8m0fnu": 9}, ["x: float32 -> float8_e8m0fnu"], []),
    ],
)  # fmt: skip
def test_elements_that_lose_bits_are_less_precise(
    then: dict[str, int], now: dict[str, int], less: list[str], more: list[str]
) -> None:
    assert less_precise({"x": then}, {"x": now}) == less
    assert more_precise({"x": then}, {"x": now}) == more
    assert less_precise({"x": then}, {"y": now}) == less_precise({}, {"x": now}) == []


def test_every_float_of_torch_has_a_precision() -> None:
    kinds = {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    floats = {str(kind).removeprefix("torch.") for kind in kinds if kind.is_floating_point or kind.is_complex}
    assert floats - DIGITS.keys() == set()


def test_a_dtype_of_unknown_precision_is_reported() -> None:
    exact = launch(dtypes=FP32)
    packed = launch(dtypes={**FP32, "parameters": {"float32": 1, "int32": 1234}})
    said = "not compared, because the precision is unknown: parameters: 0 -> 1,234 elements of int32"
    for mode, verdict in each_mode(exact, packed).items():
        assert said in verdict.changed or mode == "counts against a baseline", mode
    for mode, verdict in each_mode(packed, packed).items():
        assert verdict.changed == (), mode


def lowered(what: str) -> dict[str, dict[str, int]]:
    return {**FP32, what: {"bfloat16": 100}}


def each_mode(before: Run, now: Run) -> dict[str, Verdict]:
    """Compare a launch `now` with launches like `before`. Return the verdict of each mode of comparison."""
    baseline = baselines.from_runs([before] * 5)
    recorded = count_baseline.from_runs([before] * 3)
    passed = Verdict(outcome="passed", launches=1)
    dry = [run.replace(dry=True) for run in (before, now)]
    return {
        "times against a baseline": judged([now], baseline),
        "counts against a baseline": with_counts(passed, [now], recorded),
        "times of pairs": judge_pairs([before] * 3, [now] * 3),
        "a quick look at pairs": judge_pairs([before] * 2, [now] * 2, max_pairs=2),
        "counts of one launch": judge_counts(before, now),
        "counts of dry runs": judge_counts(*dry),
    }


@pytest.mark.parametrize("what", ["parameters", "optimizer state"])
def test_less_precision_fails_and_more_is_listed(what: str) -> None:
    exact = launch(dtypes=FP32)
    low = launch(dtypes=lowered(what))
    for mode, verdict in each_mode(exact, low).items():
        assert (verdict.outcome, verdict.failure) == ("failed", "unlike"), mode
        assert any(f"{what}: float32 -> bfloat16" in reason for reason in verdict.reasons), mode
    for mode, verdict in each_mode(low, exact).items():
        assert verdict.failure is None, mode
        listed = any(f"{what}: bfloat16 -> float32" in sentence for sentence in verdict.changed)
        assert listed or mode == "counts against a baseline", mode


def valued(factor: float = 1, *, clipped: bool, more: bool = False, **figures: Any) -> Run:
    """Return a launch whose loss and gradients are the usual ones times `factor`."""
    norm = 1.0 if clipped else 7.0 * factor
    measured = make_figures(gradient_norm=norm, unclipped_norm=7.0 * factor, **figures)
    return launch(MORE if more else counts(), loss=with_loss(factor).loss, figures=measured)


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("factor", [4, 0.25])
@pytest.mark.parametrize("less_work", [True, False])
def test_a_common_factor_fails_in_each_mode(factor: float, clipped: bool, less_work: bool) -> None:
    before = valued(clipped=clipped, more=less_work)
    for mode, verdict in each_mode(before, valued(factor, clipped=clipped)).items():
        assert (verdict.outcome, verdict.failure) == ("failed", "loss"), mode
        said = f"loss and gradients x {factor:.3f} in every step"
        assert any(reason.startswith(said) for reason in verdict.reasons), mode
    for mode, verdict in each_mode(before, valued(1.0005, clipped=clipped)).items():
        assert verdict.failure is None, mode


def tokened(tokens: float | None, **changes: Any) -> Run:
    return launch(figures=make_figures(tokens_given=tokens), **changes)


def test_other_tokens_are_another_computation() -> None:
    """With 63 instead of 64 tokens, there is 1.6% less work. This is not an improvement."""
    more = launch(MORE, figures=make_figures(tokens_given=64.0))
    said = "in the second step, the model was given 63 instead of 64"
    for mode, verdict in each_mode(more, tokened(63.0)).items():
        if mode == "counts of one launch":
            assert (verdict.outcome, needs_more(more, tokened(63.0))) == ("inconclusive", True)
            verdict = unless_other(verdict, [more] * 2, [tokened(63.0)] * 2)
        assert (verdict.outcome, verdict.failure) == ("failed", "unlike"), mode
        assert any(reason.endswith(said) for reason in verdict.reasons), mode


@pytest.mark.parametrize(("then", "now"), [((64.0, 63.0), (63.0, 64.0)), ((None, None), (63.0, 63.0))])
def test_varying_or_unknown_tokens_say_nothing(
    then: Sequence[float | None], now: Sequence[float | None]
) -> None:
    a, b = ([tokened(tokens) for tokens in side] for side in (then, now))
    assert unless_other(judge_counts(a[0], b[0]), a, b).outcome == "passed"


@pytest.mark.parametrize("run", [launch(loss=()), launch()], ids=["without a loss", "with a loss"])
def test_less_work_without_a_value_is_not_improved(run: Run) -> None:
    more = launch(MORE, loss=())
    old = count_baseline.from_runs([more]).replace(computed=())
    timed = Verdict(outcome="recorded", launches=1)
    verdict = with_counts(timed, [run], old)
    assert verdict.outcome == "recorded"
    assert verdict.counts is not None
    assert (verdict.counts.outcome, verdict.counts.notes) == (
        "passed",
        (f"less, but not `improved`: {NOT_COMPARED}",),
    )
    assert {finding.outcome for finding in verdict.counts.findings} == {"passed"}


def test_arms_without_a_loss_are_not_improved() -> None:
    assert judge_counts(launch(MORE, loss=()), launch(loss=())).outcome == "inconclusive"


def test_less_work_with_a_judged_loss_is_improved() -> None:
    more = launch(MORE, loss=())
    old = count_baseline.from_runs([more]).replace(computed=())
    timed = Verdict(outcome="recorded", launches=1)
    assert with_counts(timed, [launch()], count_baseline.from_runs([launch(MORE)])).outcome == "improved"
    baseline = baselines.from_runs([launch()] * 3)
    assert with_counts(timed, [launch()], old, times=baseline).outcome == "improved", (
        "the loss is judged with the times"
    )


def test_says_that_a_dry_run_computes_no_values() -> None:
    more, less = (launch(rank_counts, loss=(), dry=True) for rank_counts in (MORE, counts()))
    verdict = judge_counts(more, less)
    assert (verdict.outcome, verdict.reasons) == ("improved", (OF_A_DRY_RUN,))
    verdict = with_counts(Verdict(outcome="passed", launches=1), [less], count_baseline.from_runs([more]))
    assert verdict.outcome == "improved"
    assert verdict.counts is not None
    assert verdict.counts.notes == (OF_A_DRY_RUN,)


def test_count_baseline_keeps_computed_values() -> None:
    run = valued(clipped=True, tokens_given=64.0).replace(dtypes=FP32)
    kept = count_baseline.from_runs([run])
    assert kept.dtypes == FP32
    (launch_kept,) = kept.computed
    assert launch_kept.figures.by_name() == {
        "gradient_norm": 1.0, "unclipped_norm": 7.0, "tokens_given": 64.0
    }  # fmt: skip
    assert len(launch_kept.loss) == 10
    assert type(kept).model_validate_json(kept.as_json()) == kept


def observed(counted: Counts | None = None, *, elements: int = 100, **settings: Any) -> Run:
    """Return a launch with these settings. Each rank has `elements` parameters and `elements` gradients."""
    environment = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
    seen = Observed(settings={"wrapper": "DDP", **settings}, environment=environment)
    dtypes = {"parameters": {"float32": elements}, "gradients": {"float32": elements}}
    return launch(counted or counts(), observed=seen, dtypes=dtypes)


@pytest.mark.parametrize("counted", [MORE, None])
def test_a_smaller_model_is_another_computation(counted: Counts | None) -> None:
    for mode, verdict in each_mode(observed(counted), observed(elements=99)).items():
        assert (verdict.outcome, verdict.failure) == ("failed", "unlike"), mode
        assert any("100 -> 99 elements of parameters" in reason for reason in verdict.reasons), mode


def test_a_larger_model_is_not_called_smaller() -> None:
    assert {verdict.failure for verdict in each_mode(observed(), observed(elements=101)).values()} == {None}


def test_other_sharding_is_not_a_smaller_model() -> None:
    sharded = observed(elements=50, sharding="FULL_SHARD")
    assert other_computation(Computed.of([observed()]), Computed.of([sharded]), "arm A") == []


@pytest.mark.parametrize("setting", ["fp32_matmul", "fp32_convolution"])
def test_less_precise_products_fail_in_each_mode(setting: str) -> None:
    ieee: dict[str, Any] = {setting: "ieee"}
    tf32: dict[str, Any] = {setting: "tf32"}
    exact = observed(**ieee)
    low = observed(MORE, **tf32)
    for mode, verdict in each_mode(exact, low).items():
        assert (verdict.outcome, verdict.failure) == ("failed", "unlike"), mode
    more_exact = Computed.of([low]), Computed.of([exact])
    assert other_computation(*more_exact, "arm A") == []


def test_other_trained_parameters_always_fail() -> None:
    for mode, verdict in each_mode(observed(MORE, trained="all"), observed(trained="others")).items():
        assert (verdict.outcome, verdict.failure) == ("failed", "unlike"), mode


def frozen() -> Run:
    run = observed()
    return run.replace(dtypes={**run.dtypes, "gradients": {"float32": 80}})


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (frozen(), "fewer gradients than in arm A: 100 -> 80 elements on all ranks"),
        (observed(optimizer="SGD (fused)"), "another optimizer than in arm A: AdamW -> SGD"),
    ],
)
def test_less_work_of_another_training_is_no_gain(now: Run, said: str) -> None:
    before = observed(MORE, optimizer="AdamW (fused)")
    for verdict in (
        judge_counts(before, now),
        judge_counts(*(run.replace(dry=True) for run in (before, now))),
    ):
        assert verdict.outcome == "inconclusive"
        assert said in verdict.reasons
    recorded = with_counts(
        Verdict(outcome="recorded", launches=1), [now], count_baseline.from_runs([before] * 3)
    )
    assert recorded.outcome == "recorded"
    assert recorded.counts is not None
    assert any(said.replace("arm A", OF_COUNTS) in note for note in recorded.counts.notes)


def test_forms_of_one_optimizer_are_the_same() -> None:
    then, now = (Computed.of([observed(optimizer=name)]) for name in ("AdamW", "AdamW (fused)"))
    assert does_less(then, now, "arm A") == []


def test_counts_judge_the_loss_by_two_launches() -> None:
    timed = Verdict(outcome="unhealthy", launches=2)
    recorded = count_baseline.from_runs([valued(clipped=True)] * 2)
    other = valued(1.5, clipped=True)
    assert with_counts(timed, [other] * 2, recorded).failure == "loss"
    once = with_counts(timed, [other], recorded)
    assert (once.outcome, once.failure) == ("unhealthy", None)
    assert once.reasons[0].startswith(
        f"unlike {OF_COUNTS}: the norm of the gradients before clipping in step 4"
    )


def test_counts_leave_loss_to_the_time_baseline() -> None:
    """Only the baseline of times shows how much the loss varies between launches."""
    recorded = count_baseline.from_runs([valued(clipped=True)] * 2)
    baseline = baselines.from_runs([valued(clipped=True)] * 5)
    verdict = with_counts(
        Verdict(outcome="passed", launches=2), [valued(1.5, clipped=True)] * 2, recorded, times=baseline
    )
    assert (verdict.outcome, verdict.reasons) == ("passed", ())


def test_few_launches_excuse_a_scaled_loss() -> None:
    before = valued(clipped=True)
    scaled = before.replace(loss=tuple(2 * value for value in before.loss))
    assert few_differ([scaled] * 2, [before] * 2, "arm A") is None
    assert not needs_more(before, scaled)
