"""Tests of this repository's cases: their measurements on GPUs are long enough, and they learn steadily."""

from functools import cache
from itertools import chain

import pytest

from perfsuite import Case, Model
from perfsuite.case.catalog import MODELS
from perfsuite.case.hardware import PRODUCTS
from perfsuite.worker.counting.flops import count
from tests.bench_cases.test_published import CASES
from tests.frameworks.removable import needs_every_framework

NIGHTLY = [
    case
    for case in CASES.values()
    if case.topology.nodes == 1 and {"h100", "h200"} & {name.split("-")[0] for name in case.hardware}
]
H100 = PRODUCTS["NVIDIA H100 80GB HBM3"]
OF_REGISTRY = dict.fromkeys(("llama3_8b_whole_loss", "llama3_8b_float8"), MODELS["llama-3.1-8b"])
"""The models of configurations in torchtitan's registry. The cases contain only the configuration's name."""


@cache
def of_a_token(model: Model, length: int) -> float:
    return count(model, length).per_token


def least_step_s(case: Case) -> float:
    """Return the shortest plausible step on an H100, assuming that it reaches a share of the peak."""
    reached, peak = (0.7, H100.peak_fp32) if case.precision == "fp32" else (0.4, H100.peak_16bit)
    assert peak is not None
    options = case.framework.model_dump()
    model = case.model if case.model.config else OF_REGISTRY[options["config"]]
    counted = of_a_token(model, case.sample_length) * (1 if case.lora is None else 2 / 3)
    recomputed = 4 / 3 if case.activation_checkpointing == "full" else 1
    parts: int = options.get("tp", 1) * options.get("pp", 1)
    tokens = case.micro_batch * case.gradient_accumulation * case.sample_length
    return tokens * counted * recomputed / parts / (reached * 1e12 * peak)


@pytest.mark.parametrize("case", NIGHTLY, ids=lambda case: case.id)
def test_clocks_settle_before_a_long_window(case: Case) -> None:
    """Warm-up should take about 10 s and the window about 20 s. A pipeline also has to fill and to empty."""
    bubble = 1 + (case.framework.model_dump().get("pp", 1) - 1) / case.gradient_accumulation
    step_s = bubble * least_step_s(case)
    assert case.max_warmup_steps * step_s > 8
    assert case.steps * step_s > 16
    assert 5 * case.total_steps * step_s < case.timeout_s


@needs_every_framework
def test_large_models_learn_without_spikes() -> None:
    """Large models train without clipping and without a warm-up of the learning rate."""
    full = [case for case in CASES.values() if case.lora is None and case.hardware != ("cpu",)]
    rates = {size: {case.learning_rate for case in full if size in case.model.name} for size in ("8b", "70b")}
    assert rates["8b"] == {3e-4}
    assert rates["70b"] == {1e-4}


def test_h200_measures_something_compiled() -> None:
    alone = [case for case in NIGHTLY if case.topology.world_size == 1 and "h200" in case.hardware]
    assert len(alone) >= 15
    assert {case.framework.name for case in alone if case.compile} == {"ddp", "fsdp2"}
    traits = set(chain.from_iterable((case.model.name, case.quantization, case.precision) for case in alone))
    assert traits >= {"llama-3.1-8b", "8bit", "4bit", "fp32", "bf16", "bf16-mixed"}
