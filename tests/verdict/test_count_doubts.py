"""Test the reasons to doubt that smaller counts mean less work."""

import pytest

from perfsuite.frameworks.script import Script
from perfsuite.results.counts import Counts
from perfsuite.results.rank_report import Flops
from tests.samples import make_case
from tests.twin_counts import (
    BYTES,
    REDUCED,
    counts,
    launch,
)
from tests.verdict.counting import judged

NO_FORMULA = "whose FLOPs are unknown because there is no formula"
FEW_FLOPS = counts(flops={"forward": 1_700_000_000})
FEWER = "FLOPs 1.76 -> 1.70 GFLOP"


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (
            counts(flops={}),
            "FLOPs 1.8 GFLOP -> 0 a step: less than half, so the rest might be done without being counted. "
            "If the training no longer does this work, accept the counts "
            "(perfsuite baseline accept --only-counts)",
        ),
        (counts(collectives=()), f"collectives {3 * BYTES / 2**20:.1f} MiB -> 0 a step: less than half"),
        (
            counts(collectives=(REDUCED,)),
            f"collectives {3 * BYTES / 2**20:.1f} -> {BYTES / 2**20:.1f} MiB a step",
        ),
        (FEW_FLOPS.replace(ops={"ours.mlp": 4}), f"{FEWER}: the rest might be in ours.mlp, {NO_FORMULA}"),
        (
            FEW_FLOPS.replace(without_flops={"aten.x": 4}),
            f"{FEWER}: the rest might be in aten.x, {NO_FORMULA}",
        ),
    ],
)
def test_work_that_vanished_is_not_improved(now: Counts, reason: str) -> None:
    check = judged(now)
    assert check.outcome == "not counted"
    assert {finding.outcome for finding in check.findings} == {"passed"}
    assert check.notes[0].startswith(reason)
    assert judged(now, counts()).notes == (), "one launch with all of the work is enough"
    more = judged(now.replace(host_reads={"forward": 99}))
    assert more.outcome == "regressed"
    assert "improved" not in {finding.outcome for finding in more.findings}


def test_less_work_on_a_smaller_input_is_no_improvement() -> None:
    before = counts(inputs={"int64[4, 128]": 1})
    check = judged(FEW_FLOPS.replace(inputs={"int64[4, 121]": 1}), before=before)
    assert check.outcome == "not counted"
    said = f"{FEWER}: the input is 1 x int64[4, 121] instead of 1 x int64[4, 128]"
    assert check.notes[0].startswith(said)
    assert "perfsuite baseline accept" in check.notes[0]
    more = before.replace(flops={"forward": 10**12}, inputs={"int64[4, 999]": 1})
    (finding,) = judged(more, before=before).findings
    assert finding.outcome == "regressed"
    assert finding.sentence.endswith("(input: 1 x int64[4, 999] instead of 1 x int64[4, 128])")
    larger = FEW_FLOPS.replace(inputs={"int64[4, 999]": 1})
    assert judged(larger, before=before).outcome == judged(FEW_FLOPS).outcome, "it is no reason to doubt"


def test_fewer_known_flops_are_improved() -> None:
    flops = Flops(formula="palm-1", per_token=6, parameters=1, matmul_parameters=1)
    few = counts(flops={"forward": 1_000})
    assert judged(launch(few, flops=flops)).outcome == "improved"
    varying = make_case(framework=Script(path="train.py", tokens="vary"))
    assert judged(launch(few, flops=flops, case=varying)).outcome == "not counted"
    before = counts(ops={"ours.fused_mlp": 4})
    assert judged(before.replace(flops={"forward": 1_700_000_000}), before=before).outcome == "improved"
