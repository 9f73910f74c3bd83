from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite import FSDP2, Topology
from perfsuite.frameworks.fsdp2 import _no_sync
from perfsuite.worker.observe import wrapping
from perfsuite.worker.second_step import in_backward
from tests.fake_group import fake_group
from tests.frameworks.common.test_model import TINY

FOUR = Topology(processes_per_node=4)


@pytest.mark.parametrize("framework", [FSDP2(), FSDP2(shard_group=2)], ids=FSDP2.slug)
def test_what_is_built_is_what_is_expected(framework: FSDP2) -> None:
    case = TINY.replace(framework=framework, topology=FOUR)
    with fake_group(0, 4) as ranks:
        workload: Any = framework.build(case, ranks, None)  # type: ignore[arg-type]
        assert wrapping(workload.model).items() >= framework.expected(case).items()
        assert workload.data_parallel == 4


def test_gradients_are_not_reduced_inside_no_sync() -> None:
    syncs: list[bool] = []

    class Model:
        def set_requires_gradient_sync(self, is_reduced: bool) -> None:
            syncs.append(is_reduced)

    with _no_sync(Model()):
        assert syncs == [False]
    assert syncs == [False, True]


def test_every_block_and_the_root_are_units() -> None:
    framework = FSDP2()
    case = TINY.replace(framework=framework, topology=FOUR)
    with fake_group(0, 4) as ranks:
        workload: Any = framework.build(case, ranks, None)  # type: ignore[arg-type]
        assert sum(isinstance(module, FSDPModule) for module in workload.model.modules()) == 5


class _Gathers(TorchDispatchMode):
    """Counts all-gathers in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func.name():
            self.seen["backward" if in_backward() else "forward"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("framework", "gathered"),
    [
        (FSDP2(), {"forward": 5, "backward": 4}),  # four blocks and the root
        (FSDP2(reshard_root=True), {"forward": 5, "backward": 5}),
        (FSDP2(reshard_after_forward=False), {"forward": 5}),
    ],
    ids=lambda value: value.slug() if isinstance(value, FSDP2) else "",
)
def test_what_is_resharded_is_gathered_again(framework: FSDP2, gathered: dict[str, int]) -> None:
    case = TINY.replace(framework=framework, topology=FOUR)
    with fake_group(0, 4) as ranks, _Gathers() as gathers:
        workload: Any = framework.build(case, ranks, None)  # type: ignore[arg-type]
        workload.run(1)
    assert gathers.seen == gathered
