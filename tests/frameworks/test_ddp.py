from typing import Any

from torch.nn.parallel import DistributedDataParallel

from perfsuite.frameworks.base import LaunchPlan
from perfsuite.frameworks.ddp import DDP
from perfsuite.worker.observation.observe import wrapping
from tests.fake_group import fake_group
from tests.samples import make_case


def test_builds_what_the_case_expects() -> None:
    framework = DDP(bucket_cap_mb=1, gradient_as_bucket_view=True, static_graph=True)
    case = make_case(framework=framework, model="llama-tiny")
    assert framework.plan(case) == LaunchPlan(process_group="eager", needs_torch=True)
    with fake_group(0, 2) as ranks:
        workload: Any = framework.build(case, ranks, None)  # type: ignore[arg-type]
        assert isinstance(workload.model, DistributedDataParallel)
        assert wrapping(workload.model).items() >= framework.expected(case).items()
        assert workload.model.bucket_bytes_cap == 2**20
        assert workload.model.gradient_as_bucket_view
        assert workload.model.static_graph
        assert workload.data_parallel == 2
