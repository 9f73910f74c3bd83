import math
from typing import Any

import pytest

from perfsuite.features.history.asv.results import COLUMNS, Slot, costs, in_order, results, slot
from perfsuite.features.history.store import StoredResult
from perfsuite.frameworks.fsdp import FSDP
from tests.samples import IMAGES, make_case

SLOT = Slot("m.1x8.bf16", ("ddp", "4096", "1", "1", "default"))
ENDS = ("stats_ci_99_a", "stats_ci_99_b")


def rows(launches: dict[Slot, list[float]], metric: str = "seconds_per_step") -> list[dict[str, Any]]:
    """Return a dictionary for each benchmark, with its value in each column."""
    groups: dict[str, dict[tuple[str, ...], list[float]]] = {}
    for (group, values), figures in launches.items():
        groups.setdefault(group, {})[values] = figures
    made = results({metric: groups}, 5)
    assert list(made) == [f"{group}.{metric}" for group in groups]
    return [dict(zip(COLUMNS, row, strict=True)) for row in made.values()]


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
    values = ("fsdp-shard_grad_op", "64", "4", "2", "ac_full-compile")
    assert slot(case.parameters) == Slot("llama-3_1-8b.1x2.bf16-mixed", values)
    assert slot(make_case(max_warmup_steps=20, steps=50).parameters).values[-1] == "default"
    assert slot(IMAGES.parameters).values[1] == "none"
    assert in_order({"16", "2", "x", "none", "4"}) == ["2", "4", "16", "none", "x"], "numbers by size"


def test_a_result_has_costs_by_step_and_by_token() -> None:
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
    common = {"seconds_per_step": [0.5, 0.25], "peak_memory": [7.0, 8.0]}
    assert costs(result, "tokens") == {**common, "seconds_per_token": [0.005, 0.0025]}
    assert costs(result, "samples") == {**common, "seconds_per_sample": [0.005, 0.0025]}
    assert costs(result.replace(tokens_per_step=None), "tokens")["seconds_per_token"] == []


@pytest.mark.parametrize(
    ("step_s", "quarters"),
    [
        ([3.0], [3, 3, 3]),
        ([2.0, 1.0], [1.25, 1.5, 1.75]),
        ([4.0, 1.0, 2.0], [1.5, 2, 3]),
        ([1.0, 2.0, 3.0, 5.0], [1.75, 2.5, 3.5]),
    ],
    ids=["one", "two", "three", "four"],
)
def test_a_row_has_the_median_and_quartiles(step_s: list[float], quarters: list[float]) -> None:
    [row] = rows({SLOT: step_s})
    assert [*row["stats_q_25"], *row["result"], *row["stats_q_75"]] == quarters
    assert (row["stats_number"], row["stats_repeat"], row["samples"]) == ([1], [len(step_s)], [step_s])
    assert row["started_at"] == 5


def test_pools_intervals_of_times() -> None:
    """The step times of the two cases differ by a factor of 100, but their relative noise is the same."""
    one = [1.0, 1.01, 0.99, 1.02]
    pooled = rows({SLOT: one, Slot("m.1x8.fp32", SLOT.values): [100 * x for x in one]})
    wide, wide_too = (row["stats_ci_99_b"][0] / row["stats_ci_99_a"][0] for row in pooled)
    assert wide == pytest.approx(wide_too)
    assert 1.03 < wide < 1.1


def test_an_interval_of_memory_is_from_least_to_most() -> None:
    [memory] = rows({SLOT: [8.0, 7.0, 7.0]}, "peak_memory")
    assert [memory[end] for end in ENDS] == [[7.0], [8.0]]


def test_the_noise_of_one_launch_is_unknown() -> None:
    [alone] = rows({SLOT: [1.0]})
    assert [alone[end] for end in ENDS] == [[-math.inf], [math.inf]]


def test_combinations_of_parameters_without_a_case_are_missing() -> None:
    [row] = rows({SLOT: [1.0], Slot(SLOT.group, ("fsdp2", "4096", "2", "1", "default")): [1.0]})
    assert row["params"] == [["ddp", "fsdp2"], ["4096"], ["1", "2"], ["1"], ["default"]]
    assert (row["result"], row["stats_repeat"]) == ([1.0, None, None, 1.0], [1, None, None, 1])
