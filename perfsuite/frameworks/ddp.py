"""DistributedDataParallel: every rank holds the whole model. The shortest framework: read this one first."""

from typing import ClassVar

from pydantic import Field

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import DryPlan, Framework, Ranks, StepClock, Workload
from perfsuite.frameworks.common import float8
from perfsuite.frameworks.common.float8 import Recipe
from perfsuite.frameworks.common.sharding import dry_plan


class DDP(Framework):
    """Options of `torch.nn.parallel.DistributedDataParallel`, with its defaults.

    One thing differs from torch's defaults: the first bucket has the same size as the others, because
    perfsuite always passes the size. If no size is passed, torch makes the first bucket 1 MiB.
    """

    name: ClassVar[str] = "ddp"
    promises: ClassVar[Promises] = Promises(ignores=frozenset())

    bucket_cap_mb: float = Field(default=25, gt=0)
    """Size of a gradient bucket, in MiB."""
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    float8: Recipe | None = None
    """torchao's recipe for float8 matmuls in the linear layers of the blocks. On a CPU, float8 is
    emulated."""

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        if self.static_graph and case.gradient_accumulation > 1:
            return "static_graph must reduce gradients in the first backward: set gradient_accumulation to 1"
        return float8.unsupported(self.float8, case, machine)

    def dry(self, case: Case) -> DryPlan:
        return dry_plan(builds_whole=False)

    def expected(self, case: Case) -> dict[str, str]:
        return {"wrapper": "DistributedDataParallel", **float8.expected(self.float8, case)}

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Wrap the model in DDP. Ranks all-reduce gradients only on the last micro-batch."""
        from torch.nn.parallel import DistributedDataParallel

        from perfsuite.frameworks.common.loop import data_parallel_workload
        from perfsuite.frameworks.common.model import build_model

        whole = build_model(case, ranks.device)
        float8.convert(self.float8, whole, ranks.device)
        model = DistributedDataParallel(
            whole,
            device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        return data_parallel_workload(case, ranks, model, autocast=True, no_sync=model.no_sync)
