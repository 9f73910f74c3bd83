from __future__ import annotations

import math
from typing import Any

import pytest

from perfsuite.frameworks.fsdp import FSDP
from perfsuite.history.asv.results import COLUMNS, Slot, costs, in_order, results, slot
from perfsuite.history.store import StoredResult
from tests.samples import IMAGES, make_case

SLOT = Slot("m.1x8.bf16", ("ddp", "4096", "1", "1", "default"))


def column(name: str, rows: dict[str, list[Any]], benchmark: str = "m.1x8.bf16.seconds_per_step") -> Any:
    return rows[benchmark][COLUMNS.index(name)]


def of_cases(launches: dict[Slot, list[float]], metric: str = "seconds_per_step") -> dict[str, list[Any]]:
    groups: dict[str, dict[tuple[str, ...], list[float]]] = {}
    for (group, values), figures in launches.items():
        groups.setdefault(group, {})[values] = figures
    return results({metric: groups}, 5)


def test_a_slot_follows_from_the_case_alone() -> None:
    case = make_case(
        model="llama-3.1-8b",
        framework=FSDP(sharding_strategy="SHARD_GRAD_OP"),
        precision="bf16-mixed",
        activation_checkpointing="full",
        compile=True,
        micro_batch=4,
        gradient_accumulation=2,
        max_warmup_steps=20,
        steps=50,
    )
    assert slot(case.parameters) == Slot(
        "llama-3_1-8b.1x2.bf16-mixed", ("fsdp-shard_grad_op", "64", "4", "2", "ac_full-compile")
    )


def test_a_case_without_options_or_tokens_says_so() -> None:
    assert slot(make_case(max_warmup_steps=20, steps=50).parameters).values[-1] == "default"
    assert slot(IMAGES.parameters).values[1] == "none"


def test_costs_of_a_result() -> None:
    result = StoredResult(
        case="c",
        outcome="passed",
        step_s_p50=(0.5, None, 0.25),
        step_s_mean=(),
        probe_s_p50=(),
        peak_memory_bytes=(None, 7.0 * 2**20, 8.0 * 2**20),
        tokens_per_step=100,
        settings=0,
        environment=0,
    )
    assert costs(result, "tokens") == {
        "seconds_per_step": [0.5, 0.25],
        "seconds_per_token": [0.005, 0.0025],
        "peak_memory": [7.0, 8.0],
    }
    assert costs(result.replace(tokens_per_step=None), "tokens")["seconds_per_token"] == []
    assert costs(result, "samples")["seconds_per_sample"] == [0.005, 0.0025]
    assert "seconds_per_token" not in costs(result, "samples")


@pytest.mark.parametrize(
    ("step_s", "quarter", "middle", "three_quarters"),
    [
        ((3.0,), 3, 3, 3),
        ((2.0, 1.0), 1.25, 1.5, 1.75),
        ((4.0, 1.0, 2.0), 1.5, 2, 3),
        ((1.0, 2.0, 3.0, 5.0), 1.75, 2.5, 3.5),
    ],
)
def test_median_and_quartiles(
    step_s: tuple[float, ...], quarter: float, middle: float, three_quarters: float
) -> None:
    rows = of_cases({SLOT: list(step_s)})
    assert column("result", rows) == [middle]
    assert column("stats_q_25", rows) == [quarter]
    assert column("stats_q_75", rows) == [three_quarters]
    assert (column("stats_number", rows), column("stats_repeat", rows)) == ([1], [len(step_s)])
    assert column("samples", rows) == [list(step_s)]
    assert column("started_at", rows) == 5


def test_the_interval_of_memory_is_what_was_seen() -> None:
    rows = of_cases({SLOT: [8.0, 7.0, 7.0]}, "peak_memory")
    assert column("stats_ci_99_a", rows, "m.1x8.bf16.peak_memory") == [7.0]
    assert column("stats_ci_99_b", rows, "m.1x8.bf16.peak_memory") == [8.0]


def test_the_interval_of_times_is_pooled_over_all_cases() -> None:
    """Two cases differ by a hundred times and have the same relative noise."""
    one = [1.0, 1.01, 0.99, 1.02]
    other = Slot("m.1x8.fp32", SLOT.values)
    rows = of_cases({SLOT: one, other: [100 * x for x in one]})
    names = [f"{each.group}.seconds_per_step" for each in (SLOT, other)]
    lows, highs = (
        [column(end, rows, name)[0] for name in names] for end in ("stats_ci_99_a", "stats_ci_99_b")
    )
    assert highs[0] / lows[0] == pytest.approx(highs[1] / lows[1])
    assert 1.03 < highs[0] / lows[0] < 1.1


def test_one_launch_has_no_interval() -> None:
    rows = of_cases({SLOT: [1.0]})
    assert (column("stats_ci_99_a", rows), column("stats_ci_99_b", rows)) == ([-math.inf], [math.inf])


def test_combinations_that_nobody_ran_are_none() -> None:
    far = Slot(SLOT.group, ("fsdp2", "4096", "2", "1", "default"))
    rows = of_cases({SLOT: [1.0], far: [1.0]})
    assert column("params", rows) == [["ddp", "fsdp2"], ["4096"], ["1", "2"], ["1"], ["default"]]
    assert column("result", rows) == [1.0, None, None, 1.0]
    assert column("stats_repeat", rows) == [1, None, None, 1]


def test_numbers_are_in_order_of_size() -> None:
    assert in_order({"16", "2", "x", "none", "4"}) == ["2", "4", "16", "none", "x"]
