"""A package whose engine steps a torch optimizer several times in one step: `LaunchPlan.clock`."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite import Case, Topology
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect
from tests.dry.runs import passed
from tests.packages import Packages

PARTS = 3
ENGINE = f"""
import itertools
from typing import ClassVar
from perfsuite.frameworks import DryPlan, Framework, LaunchPlan, Workload
from perfsuite.frameworks.common.sharding import dry_plan


class Engine:
    \"\"\"As DeepSpeed's: its step makes one of a torch optimizer for each part of the parameters.\"\"\"

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        optimizer.param_groups[0].update(foreach=True, fused=False)  # an operator for all of a part
        whole = optimizer.param_groups[0]["params"]
        self.parts = [whole[index::{PARTS}] for index in range({PARTS})]

    def step(self):
        group = self.optimizer.param_groups[0]
        whole = group["params"]
        for part in self.parts:
            group["params"] = part
            self.optimizer.step()
        group["params"] = whole
        self.optimizer.zero_grad()


class ByEngine(Framework):
    name: ClassVar[str] = "engine"

    def plan(self, case):
        return LaunchPlan(clock="framework")

    def dry(self, case):
        return dry_plan()

    def expected(self, case):
        return {{"optimizer_parameters": None}}  # those of a part

    def build(self, case, ranks, clock):
        from torch.nn.parallel import DistributedDataParallel
        from perfsuite.frameworks.common.model import build_model, build_optimizer, synthetic_batches

        model = DistributedDataParallel(build_model(case, ranks.device))
        engine = Engine(model, build_optimizer(case, model))
        batches = itertools.cycle(synthetic_batches(case, ranks.rank, ranks.device))

        def step():
            tokens = next(batches)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            engine.step()
            clock.boundary()
            return loss.detach()

        return Workload(
            run=lambda steps: [step() for _ in range(steps)], data_parallel=ranks.world_size, model=model
        )
"""


@pytest.mark.launch
def test_the_steps_of_an_engine_are_counted_not_those_inside(packages: Packages, tmp_path: Path) -> None:
    packages.install("perf-engine", ENGINE, frameworks="engine = perf_engine:ByEngine")
    case = Case(
        model="llama-tiny",
        framework="engine",
        sequence_length=32,
        micro_batch=2,
        topology=Topology(processes_per_node=2),
        hardware="cpu",
        max_warmup_steps=5,
        steps=10,
    )
    run = launch_once(case, detect(), tmp_path / "launched")
    assert run.failure is None, run.failure
    assert len(run.step_s) == len(run.loss) == case.total_steps
    assert run.loss[-1] < run.loss[0]
    dry = passed(case, tmp_path / "dry")
    for (counts,) in ([each.counts for each in run.counts], [each.counts for each in dry.counts]):
        assert counts.ops["aten._foreach_lerp_"] == PARTS, "all that the engine does in one step"
