from __future__ import annotations

import pytest

from tests.memory_rule import ModelMemory, ZeroStage, model_memory


def test_the_published_examples() -> None:
    """40 B parameters (2 + 2 + 12 bytes of weights, gradients, Adam); ZeRO's figure 1, 7.5 B on 64 GPUs."""
    assert model_memory(40 * 10**9) == ModelMemory(weights=80e9, gradients=80e9, optimizer=480e9)
    assert model_memory(40 * 10**9).total == 640e9
    zero = [model_memory(7_500_000_000, ranks=64, zero_stage=stage).total / 1e9 for stage in (0, 1, 2, 3)]
    assert zero == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


@pytest.mark.parametrize(
    ("zero_stage", "expected"), [(0, (200, 20, 120)), (1, (200, 20, 30)), (2, (200, 5, 30)), (3, (50, 5, 30))]
)
def test_frozen_parameters_are_weights_only(
    zero_stage: ZeroStage, expected: tuple[float, float, float]
) -> None:
    memory = model_memory(100, trained=10, ranks=4, zero_stage=zero_stage)
    assert (memory.weights, memory.gradients, memory.optimizer) == expected


def test_frozen_parameters_may_be_quantised() -> None:
    assert model_memory(100, trained=10, frozen_bytes=0.5).weights == 65


def test_one_rank_has_nobody_to_share_with() -> None:
    assert model_memory(7, zero_stage=3) == model_memory(7)


def test_ddp_keeps_gradients_twice() -> None:
    """Llama-3.2-1B: the dry run of its DDP case holds 23.02 GiB at the end of a step."""
    memory = model_memory(1_235_814_400, buckets=True)
    assert memory.total / 2**30 == pytest.approx(18.42 + 4.60, abs=0.005)
    assert model_memory(100, trained=10, buckets=True).buckets == 40
