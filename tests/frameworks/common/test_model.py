from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perfsuite.case.case import Case, Topology
from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import Ranks, Workload
from perfsuite.frameworks.common.model import build_model, data_parallel_workload
from perfsuite.frameworks.ddp import DDP

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world_size=1, device=CPU, directory=Path())
TINY = Case(
    model="llama-tiny",
    framework=DDP(),
    sequence_length=8,
    micro_batch=1,
    topology=Topology(processes_per_node=1),
    hardware="cpu",
)


def workload(case: Case) -> Workload:
    return data_parallel_workload(case, ALONE, build_model(case, CPU), autocast=True)


def losses(case: Case, steps: int = 4) -> list[float]:
    return [float(loss) for loss in workload(case).run(steps)]


def test_losses_under_a_gradient_scaler_are_not_scaled() -> None:
    whole = losses(TINY)
    scaled = losses(TINY.replace(precision="fp16-mixed"))
    assert scaled == pytest.approx(whole, rel=1e-3)
    assert scaled != whole


def test_steps_that_a_gradient_scaler_skips_are_not_taken_for_steps() -> None:
    diverging = workload(TINY.replace(precision="fp16-mixed", learning_rate=1e9))
    with pytest.raises(MismatchError, match=r"^fp16-mixed: gradients were not finite .* skipped"):
        diverging.run(5)
