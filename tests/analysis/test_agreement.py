from pathlib import Path
from typing import Any

import pytest

from perfsuite.analysis import agreement
from perfsuite.case.case import Case
from perfsuite.frameworks.script import Script
from perfsuite.results.counts import Collective, Counts
from perfsuite.results.rank_report import Flops, Observed, RankEvidence, RankReport
from perfsuite.results.run import Run
from tests.collected import collected
from tests.samples import IMAGES, known, make_case, make_report, write_launch
from tests.twin_counts import collective


def reports(*evidence: RankEvidence | None, **changes: Any) -> list[RankReport]:
    return [make_report(rank, evidence=item, **changes) for rank, item in enumerate(evidence)]


def evidence_of(*norms: float, **changes: Any) -> RankEvidence:
    """Return the evidence of a rank with parameters a, b, ... whose norms were 10 before training."""
    replicated = {name: (10.0, norm) for name, norm in zip("abc", norms, strict=False)}
    return RankEvidence(**{"data_parallel": 2, "collectives": 25, "replicated": replicated, **changes})


def run_of(case: Case, directory: Path, ranks: list[RankReport]) -> Run:
    return collected(write_launch(directory, *ranks, case=case))


@pytest.mark.parametrize(
    ("elapsed_s", "uptime_s", "is_reported"),
    [
        *((2.5, uptime_s, False) for uptime_s in (2.5, None, 2.9)),
        *((100.0, 104.9, False), (100.0, 106.0, True), (0.25, 2.5, True), (2.5, 0.25, True)),
    ],
)
def test_distrusts_a_clock_that_disagrees(
    tmp_path: Path, elapsed_s: float, uptime_s: float | None, is_reported: bool
) -> None:
    ranks = [make_report(0), make_report(1, elapsed_s=elapsed_s, uptime_s=uptime_s)]
    failure = run_of(make_case(), tmp_path, ranks).failure
    assert (failure is not None) == is_reported
    other = f"{uptime_s or 0:.2f} s according to the kernel's uptime. Something"
    took = f"took {elapsed_s:.2f} s, but it took {other}"
    assert failure is None or failure.kind == "mismatch"
    assert failure is None or f"rank 1: according to its clock, training {took}" in failure.message


WRAP = "Their gradients are not exchanged: wrap the whole model in DDP or FSDP, or all-reduce its gradients."


@pytest.mark.parametrize("replicas", ["agree", "differ"])
def test_reports_replicas_that_trained_apart(replicas: Any) -> None:
    apart = reports(*[evidence_of(11, collectives=0)] * 2)
    said = f"the 2 ranks trained apart: no collective ran after the first step. {WRAP}"
    assert agreement.trained_apart(apart, case_of(replicas=replicas)) == said


def test_reports_replicas_whose_parameters_differ() -> None:
    assert agreement.trained_apart(
        reports(evidence_of(11, 11, 11), evidence_of(11, 11.02, 11.5)), case_of()
    ) == (
        "the 2 ranks trained apart: 2 of 3 parameters, such as b, are not the same on all ranks after the "
        f"last step. {WRAP} If the parameters are meant to differ, declare this in the case. With tensor "
        "or pipeline parallelism, give data_parallel=, the number of ranks that get different data. If ranks "
        "have different experts, or if replicas are only averaged from time to time, give "
        "Script(replicas='differ')"
    )


@pytest.mark.parametrize(
    ("device", "imported", "is_named"),
    [("cpu", "accelerate", True), ("cuda", "accelerate", False), ("cpu", "lightning", False)],
)
def test_names_accelerate_unaware_of_cpus(device: str, imported: str, is_named: bool) -> None:
    observed = Observed(settings={"device": device}, environment={imported: "1.15.0"})
    first, second = reports(*[evidence_of(11, collectives=0)] * 2)
    why = agreement.trained_apart([first.replace(observed=observed), second], case_of())
    assert (why is not None and "ACCELERATE_USE_CPU" in why and "--use_cpu" in why) == is_named


@pytest.mark.parametrize(
    "ranks",
    [
        [evidence_of(11, 12), evidence_of(11, 12)],
        [evidence_of(11.0, 12), evidence_of(11.001, 12)],  # the order of the sums differed
        [evidence_of(1e6, 2e6), evidence_of(1e6 + 0.4, 2e6 + 0.9)],
        # Split by hand: one rank does not hold the whole parameters.
        [evidence_of(11), RankEvidence(data_parallel=2, collectives=9)],
        [
            evidence_of(11, collectives=None),
            evidence_of(11, collectives=None),
        ],  # the backend does not count collectives
        [evidence_of(11, collectives=0), evidence_of(11)],
        [evidence_of(11, collectives=0, data_parallel=1), evidence_of(13, collectives=0, data_parallel=1)],
        [evidence_of(11, collectives=0)],
        [None, None],
        [evidence_of(11, collectives=0), None],
    ],
)
def test_accepts_ranks_that_agree_or_are_silent(ranks: list[RankEvidence | None]) -> None:
    assert agreement.trained_apart(reports(*ranks), case_of()) is None


@pytest.mark.parametrize(
    ("one", "other", "is_apart"),
    [
        ((0.0, 100.0), (0.0, 99.0), False),  # the ranks differ by a hundredth of what training changed
        *((((0.0, 100.0), (0.0, end), True)) for end in (98.9, 101.1)),
        ((0.0, 100.0), (99.5, 99.25), False),  # relative to the larger change
        # Rounding: at most one part in two million of the larger norm.
        ((2e6, 2e6), (2e6 - 1, 2e6 - 1), False),
        ((2e6, 2e6), (2e6 - 1.01, 2e6 - 1.01), True),
    ],
    ids=["by a hundredth", "below", "above", "of the larger change", "by rounding", "by more"],
)
def test_replicas_may_differ_by_rounding(
    one: tuple[float, float], other: tuple[float, float], is_apart: bool
) -> None:
    """Each of the two ranks has a pair: the norms of a parameter before and after training."""
    both = (RankEvidence(data_parallel=2, collectives=25, replicated={"a": norms}) for norms in (one, other))
    assert (agreement.trained_apart(reports(*both), case_of()) is not None) is is_apart


@pytest.mark.parametrize(
    ("norm", "collectives", "replicas", "is_apart"),
    [
        *((13, 25, "agree", True), (13, 25, "differ", False)),
        *((11, 0, "agree", True), (11, 25, "agree", False)),
    ],
)
def test_refuses_ranks_that_trained_apart(
    tmp_path: Path, norm: int, collectives: int, replicas: Any, is_apart: bool
) -> None:
    evidence = (evidence_of(first_norm, collectives=collectives) for first_norm in (11, norm))
    failure = run_of(case_of(replicas=replicas), tmp_path, reports(*evidence)).failure
    assert (failure is not None) is is_apart
    assert failure is None or (failure.kind, "trained apart" in failure.message) == ("mismatch", True)


def saw(*tokens: int | None, **changes: Any) -> list[RankReport]:
    values = {"data_parallel": 2, "forwards": 1, **changes}
    return reports(*(RankEvidence(tokens=count, **values) for count in tokens))


def case_of(**options: Any) -> Case:
    return make_case(framework=Script(path="train.py", **options))


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ((256, 256), {"forwards": 2}),  # gradient accumulation over two micro-batches
        ((100, 120), {}),
        ((100, 100), {"data_parallel": 1}),  # layers are split, so both ranks get the same tokens
        ((512, 512), {"data_parallel": 1}),
        ((90, 110), {"padding": 20}),
    ],
)
def test_tokens_not_given_to_the_model_mismatch(
    tmp_path: Path, tokens: tuple[int, ...], changes: Any
) -> None:
    ranks = [report.replace(tokens_per_step=256) for report in saw(*tokens, **changes)]
    run = run_of(case_of(), tmp_path, ranks)
    failure = known(run.failure)
    assert (failure.kind, run.notes) == ("mismatch", ()), "there is no second note, which would be wrong"
    data_parallel = changes.get("data_parallel", 2)
    padding = changes.get("padding", 0)
    given = f"{sum(tokens) * data_parallel // 2}{', 20% of them padding' if padding else ''}"
    assert failure.message == (
        "tokens: the case claims 256 a step (sequence_length x micro_batch x gradient_accumulation = 64 x 2 "
        f"x 1, on {data_parallel} data-parallel ranks), but in the second step the model was given {given}, "
        f"in {changes.get('forwards', 1)} forward calls per rank. Correct the case, or give "
        "Script(tokens='vary') if the number varies from step to step. Then tokens/s counts the tokens that "
        "the case claims"
    )


@pytest.mark.parametrize(
    ("tokens", "changes"), [((128, 128), {"data_parallel": 1}), ((64,) * 4, {})], ids=["two", "four"]
)
def test_sequences_may_be_split_among_ranks(tokens: tuple[int, ...], changes: dict[str, Any]) -> None:
    """Context parallelism gives each of two ranks half of a sequence. The second case has two such groups."""
    world = len(tokens)
    ranks = [report.replace(tokens_per_step=256, world_size=world) for report in saw(*tokens, **changes)]
    assert agreement.tokens_differ(ranks, case_of()) is None
    assert agreement.token_notes(ranks, case_of()) == (
        "tokens/s counts 256 tokens a step. This number matches the second step only "
        f"if each of the {world} ranks has its own part of the sequences, as with context or sequence "
        "parallelism",
    )


@pytest.mark.parametrize(("parts", "is_other"), [("1", True), ("2", False)])
def test_ranks_may_train_the_same_part(parts: str, is_other: bool) -> None:
    """256 tokens on eight ranks are two sequences, each in two parts. Each part is trained by two ranks."""
    split = {"tokens_per_step": 256, "world_size": 8, "observed": in_parts(parts)}
    ranks = [report.replace(**split) for report in saw(*[64] * 8)]
    assert (agreement.tokens_differ(ranks, case_of()) is not None) == is_other


@pytest.mark.parametrize(
    ("tokens", "case", "padding", "note"),
    [
        ((127, 127), case_of(), 0, ". In the second step, the model was given 254"),
        ((128, 128), case_of(), 64, ". In the second step, the model was given 256, 50% of them padding"),
        (
            (50, 60),
            case_of(tokens="vary"),
            0,
            " (which vary, according to the case). In the second step, the model was given 110",
        ),
        ((128, 128), case_of(), 0, None),
        ((None, None), case_of(), 0, None),  # the model gets images
        ((128, None), case_of(), 0, None),  # the second rank is the second stage of a pipeline
    ],
    ids=["fewer", "padding", "vary", "same", "images", "pipeline"],
)
def test_other_tokens_are_a_note(
    tmp_path: Path, tokens: Any, case: Any, padding: int, note: str | None
) -> None:
    run = run_of(case, tmp_path, saw(*tokens, padding=padding))
    said = f"tokens/s counts 256 tokens a step{note}"
    assert (run.failure, run.notes) == (None, (said,) if note else ())


def test_no_tokens_are_claimed_without_reports() -> None:
    """The input of a model for tables can be integers that are not tokens."""
    ranks = reports(*[evidence_of(11, tokens=9, padding=3, forwards=1)] * 2)
    assert agreement.tokens_differ(ranks, make_case()) is not None
    for silent, case in ((ranks, IMAGES), (reports(None, None), case_of())):
        assert (agreement.tokens_differ(silent, case), agreement.token_notes(silent, case)) == (None, ())


def test_notes_an_input_that_changes_later() -> None:
    shorter = Counts(step=24, inputs={"int64[2, 32]": 1})
    counts = Counts(inputs={"int64[2, 64]": 1}, also_counted=(23, 24), spans={"step 24": shorter})
    ranks = [make_report(0), make_report(1, counts=counts)]
    assert agreement.input_notes(ranks, case_of()) == (
        f"tokens/s counts {ranks[0].tokens_per_step} tokens in every step, but the input of step 24 is "
        "1 x int64[2, 32] instead of 1 x int64[2, 64], the input of step 4. If the number of tokens varies, "
        "give Script(tokens='vary')",
    )
    (note,) = agreement.input_notes(ranks, make_case())
    assert note.endswith("the input of step 4"), "other frameworks have no such option"
    assert agreement.input_notes(ranks, case_of(tokens="vary")) == ()
    assert agreement.input_notes([make_report(0, counts=counts.replace(spans={}))], case_of()) == ()


@pytest.mark.parametrize(("samples", "is_noted"), [(128, False), (64, True), (None, False)])
def test_notes_samples_the_case_does_not_claim(tmp_path: Path, samples: int | None, is_noted: bool) -> None:
    """This is only a note, because the first dimension of a model's input need not be its samples."""
    said = (
        "samples/s is computed with 256 per step (micro_batch x gradient_accumulation on 2 data-parallel "
        "ranks). In the second step, the first dimension of the model's inputs added up to 128. If this sum "
        "is the number of samples, correct the case"
    )
    run = run_of(IMAGES, tmp_path, reports(*[evidence_of(11, samples=samples)] * 2))
    assert (run.failure, run.notes) == (None, (said,) if is_noted else ())


@pytest.mark.parametrize(("samples", "is_noted"), [(250, False), (125, True)])
def test_compares_the_samples_of_a_single_process(samples: int, is_noted: bool) -> None:
    alone = reports(RankEvidence(data_parallel=1, samples=samples), tokens_per_step=250, world_size=1)
    assert bool(agreement.token_notes(alone, IMAGES)) is is_noted


@pytest.mark.parametrize(
    ("tokens", "is_other"), [(244, True), (245, False), (250, False), (255, False), (256, True)]
)
def test_token_counts_may_differ_by_two_percent(tokens: int, is_other: bool) -> None:
    alone = reports(RankEvidence(data_parallel=1, tokens=tokens), tokens_per_step=250, world_size=1)
    assert (agreement.tokens_differ(alone, case_of()) is not None) is is_other
    assert bool(agreement.token_notes(alone, case_of())) is (tokens != 250 and not is_other)


FLOPS = Flops(formula="palm-1", per_token=18.0, parameters=3, matmul_parameters=2)
"""In forward, 2 weights (2 FLOPs each) and attention (2 FLOPs) take 6 FLOPs per token."""
FORWARD = make_report(0).tokens_per_step * 6 // 2
"""The FLOPs of one of two ranks in forward."""
EVIDENCE = RankEvidence(
    data_parallel=2, collectives=99, replicated={"w": (1.0, 2.0)}, replicated_bytes=4_000_000
)
"""The evidence for a parameter of 4 MB that both ranks hold and that training changed."""


def sent(size: int, ranks: int = 2) -> Collective:
    return collective("all_reduce", ranks=ranks, count=1, bytes=size)


def in_parts(parts: str) -> Observed:
    return Observed(settings={"context_parallel": parts}, environment={})


FULL = Counts(collectives=(sent(4_000_000),), flops={"forward": FORWARD, "backward": 2 * FORWARD})
"""Counts of all FLOPs and bytes that the formulas expect."""
ALONE = FULL.replace(collectives=())


def launch(counts: Counts = FULL, **changes: Any) -> list[RankReport]:
    """Return the reports of two ranks."""
    values: dict[str, Any] = {"counts": counts, "flops": FLOPS, "evidence": EVIDENCE}
    return [make_report(rank, **{**values, **changes}) for rank in range(2)]


def why(reports: list[RankReport], case: Case | None = None) -> tuple[str, ...]:
    return agreement.hidden(reports, case or make_case())


def test_nearly_complete_step_hides_nothing() -> None:
    nearly = Counts(collectives=(sent(400),), flops={"forward": int(0.91 * FORWARD)})
    assert why(launch()) == why(launch(nearly)) == ()
    just = FULL.replace(flops={"forward": 675})  # 90% of the 1500 FLOPs on both ranks
    assert why(launch(just, tokens_per_step=250)) == ()
    first, second = launch(hidden=("a CUDA graph was replayed",))
    assert why([first, second]) == ("a CUDA graph was replayed",)
    assert why([first, second.replace(hidden=("b",))]) == ("a CUDA graph was replayed", "b")


def test_finds_fewer_flops_than_the_formula() -> None:
    assert why(launch(FULL.replace(flops={"backward": 2 * FORWARD}))) == (
        "only 0 FLOP were counted in forward on all ranks, but according to the formula palm-1, forward "
        f"takes {2 * FORWARD:.4g}",
    )
    # In forward, frozen weights are multiplied like any others.
    frozen = FLOPS.replace(per_token=14.0, trained_parameters=0)
    assert why(launch(flops=frozen)) == ()
    assert why(launch(FULL.replace(flops={"forward": int(0.91 * FORWARD)}), flops=frozen)) == ()
    assert why(launch(FULL.replace(flops={"forward": int(0.89 * FORWARD)}), flops=frozen))
    none = FULL.replace(flops={})
    varying = make_case(framework=Script(path="t.py", tokens="vary"))
    assert why(launch(none))
    assert why(launch(none, flops=None)) == why(launch(none), varying) == (), "the expected FLOPs are unknown"
    unseen = none.replace(without_flops={"flash_attn._flash_attn_forward": 4})
    assert why(launch(unseen)) == why([launch(none)[0], launch(unseen)[1]]) == ()


def test_ring_attention_leaves_out_what_is_masked() -> None:
    """With four parts, (4 + 1) / (2 x 4) of attention's products remain.

    A token then takes 4 + 2 x 5 / 8 FLOPs.
    """
    takes = FORWARD * 5.25 / 6
    enough, less = (FULL.replace(flops={"forward": int(share * takes)}) for share in (0.91, 0.89))
    assert why(launch(enough, observed=in_parts("4"))) == ()
    assert why(launch(less, observed=in_parts("4")))
    assert why(launch(enough, observed=in_parts("1")))


def test_finds_one_model_with_too_few_bytes_sent() -> None:
    norm_only = FULL.replace(collectives=(sent(4), sent(4_000_000, ranks=1)))
    assert why(launch(norm_only)) == (
        "the ranks train one model, whose gradients have 4,000,000 bytes, but the ranks were seen to send "
        "only 4 bytes: gradients were exchanged without being counted, or all ranks are given the same data",
    )
    first, second = launch(norm_only)
    assert why([first]) == why([second]) != (), "a single rank does not do the work of both"
    assert why([first, second.replace(counts=FULL)]) == (), "one rank that sends them is enough"


@pytest.mark.parametrize(
    "changes",
    [
        {"data_parallel": 1},  # both ranks get the same data
        {"replicated": {}, "replicated_bytes": 0},  # the model is sharded
        {"replicated": {"w": (1.0, 1.0)}},  # training changed nothing
        {"collectives": None},  # the number of collectives is unknown
        {"collectives": 23},  # replicas are averaged only in some steps
    ],
)
def test_gradients_may_skip_exchanges(changes: dict[str, Any]) -> None:
    between = len(make_report(0).step_s) - 1
    assert why(launch(ALONE, evidence=EVIDENCE.replace(collectives=between)))
    assert why(launch(ALONE, evidence=EVIDENCE.replace(**changes))) == ()
    assert why(launch(ALONE), case_of(replicas="differ")) == ()
    first, second = launch(ALONE)
    holds_none = second.replace(evidence=EVIDENCE.replace(replicated_bytes=0))
    assert why([first, holds_none]) == why([holds_none, first]) == why([first, second])
    silent = second.replace(evidence=EVIDENCE.replace(collectives=None))
    assert why([first, silent]) == why([silent, first]) == ()
    assert why([first, second.replace(counts=None)]) == why([first, second.replace(evidence=None)]) == ()


def test_a_launch_with_hidden_work_has_no_counts(tmp_path: Path) -> None:
    reasons = ("a CUDA graph was replayed",)
    run, seen = (
        run_of(make_case(), tmp_path / str(len(hidden)), launch(hidden=hidden)) for hidden in (reasons, ())
    )
    assert (run.failure, run.counts, run.hidden) == (None, (), reasons)
    assert (len(seen.counts), seen.hidden) == (1, ())
    assert run.window == seen.window  # in both runs a step was counted, so it was not measured


@pytest.mark.parametrize(
    ("blocks", "claim", "flops", "said"),
    [
        ("0 of 4", "none", {}, None),
        ("4 of 4", "full", {"recompute": 1}, None),  # the counts agree with the claim
        ("0 of 0", "none", {}, None),
        ("0 of 0", "none", {"recompute": 1}, "activation_checkpointing='none' (some of the forward is rec"),
        ("0 of 0", "full", {}, "activation_checkpointing='full' (no recomputation was detected, but"),
        ("not observed (compiled)", "full", {}, "activation_checkpointing='full' (no recomputation"),
    ],
)
def test_notes_recomputation_that_is_only_claimed(
    blocks: str, claim: str, flops: dict[str, float], said: str | None
) -> None:
    case = case_of().replace(activation_checkpointing=claim)
    observed = Observed(settings={"recomputing_blocks": blocks}, environment={})
    ranks = reports(*[evidence_of(11, tokens=128)] * 2)
    ranks = [report.replace(observed=observed, counts=Counts(flops=flops)) for report in ranks]
    notes = agreement.claim_notes(ranks, case)
    assert [note.startswith(f"claimed, not checked: {said}") for note in notes] == ([True] if said else [])
    assert agreement.claim_notes(ranks, make_case()) == (), "the framework itself builds the model"


def test_length_of_non_integer_inputs_is_a_claim() -> None:
    observed = Observed(settings={"recomputing_blocks": "0 of 4"}, environment={})
    first, last = (
        report.replace(observed=observed) for report in reports(*[evidence_of(11, tokens=None)] * 2)
    )
    (note,) = agreement.claim_notes([first, last], case_of())
    assert note == "claimed, not checked: sequence_length=64 (the model was given no integers)"
    (given,) = reports(evidence_of(11, tokens=128))
    assert agreement.claim_notes([first, given], case_of()) == (), (
        "the first stage of a pipeline is given integers"
    )
