"""Test a package whose engine steps a torch optimizer several times in one step: `LaunchPlan.clock`."""

from pathlib import Path

import pytest

from tests.dry.runs import passed
from tests.frameworks.test_base import COUNTED, measured
from tests.packages import Packages

PARTS = 3
ENGINE = f"""
from contextlib import nullcontext
from typing import ClassVar
from perfsuite.frameworks import LaunchPlan
from perfsuite.frameworks.ddp import DDP


class ByEngine(DDP):
    \"\"\"As DeepSpeed: its step makes one of a torch optimizer for each part of the parameters.\"\"\"

    name: ClassVar[str] = "engine"

    def plan(self, case):
        return LaunchPlan(clock="framework")

    def expected(self, case):
        return {{"optimizer_parameters": None}}  # those of a part

    def build(self, case, ranks, clock):
        from torch.nn.parallel import DistributedDataParallel
        from perfsuite.frameworks.common.loop import training
        from perfsuite.frameworks.common.model import build_model, build_optimizer

        model = DistributedDataParallel(build_model(case, ranks.device))
        optimizer = build_optimizer(case, model)
        group = optimizer.param_groups[0]
        group.update(foreach=True, fused=False)  # an operator for all of a part
        whole = group["params"]

        def backward(loss):
            loss.backward()
            return loss

        def step():
            for index in range({PARTS}):
                group["params"] = whole[index::{PARTS}]
                optimizer.step()
            group["params"] = whole
            optimizer.zero_grad()
            clock.boundary()

        return training(case, ranks, model, backward=backward, sync=lambda is_last: nullcontext(), step=step)
"""


@pytest.mark.launch
def test_counts_the_engines_steps_not_inner_ones(packages: Packages, tmp_path: Path) -> None:
    packages.install("perf-engine", ENGINE, frameworks="engine = perf_engine:ByEngine")
    case = COUNTED.replace(framework="engine")
    run = measured(case, tmp_path / "launched")
    assert len(run.step_s) == len(run.loss) == case.total_steps
    assert run.loss[-1] < run.loss[0]
    dry = passed(case, tmp_path / "dry")
    for (counts,) in ([rank.counts for rank in run.counts], [rank.counts for rank in dry.counts]):
        assert counts.ops["aten._foreach_lerp_"] == PARTS, "a step has all optimizer steps of the engine"
