from typing import Any

import pytest

from perfsuite.analysis.step_time.expected import expected, parallelism
from perfsuite.errors import PredictionError
from perfsuite.results.counts import Collective, Compiled, Counts, Phase
from perfsuite.results.device_log import Communicate, EndOfStep, Entry, Kernel
from tests.samples import make_case, make_gpu_machine

A100 = "NVIDIA A100-SXM4-80GB"
SIZES = (1, 8192, 8192, 8192, 0)
PRODUCT = Kernel(0, "forward", "aten.mm", 0, 0, 2, "bfloat16", 2 * 8192**3, SIZES, is_strided=False)
LOG: list[Entry] = [EndOfStep(3), *[PRODUCT] * 100, EndOfStep(4)]
COUNTS = Counts(flops={"forward": 200 * 8192**3})


def test_a_step_of_products_takes_flops_over_the_share() -> None:
    step = expected(LOG, COUNTS, make_case(), make_gpu_machine(A100), tokens=1000)
    least_s = 200 * 8192**3 / 312e12
    assert step.matmul_s == step.step_s
    assert least_s / 0.82 < step.step_s < 1.2 * least_s / 0.82
    assert step.tokens_per_s == pytest.approx(1000 / step.step_s)
    assert step.share(500 / step.step_s) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compiled": Compiled(graphs=1, recompilations=0, kernels=None, extern_calls=None)}, "is compiled"),
        (
            {
                "collectives": (
                    Collective(
                        kind="send", ranks=2, apart=1, dtype="bfloat16", phase="forward", count=1, bytes=8
                    ),
                )
            },
            "the ranks of a pipeline wait for each other",
        ),
        ({"ops": {"aten._grouped_mm": 2}}, "experts get equally many tokens"),
        ({"without_flops": {"mine.attention": 1}}, r"no formula gives the FLOPs of mine\.attention"),
    ],
)
def test_predicts_nothing_that_a_log_lacks(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PredictionError, match=why):
        expected(LOG, COUNTS.replace(**changes), make_case(), make_gpu_machine(A100), tokens=1000)


def test_emulated_bf16_gets_no_number() -> None:
    case = make_case(precision="bf16-mixed")
    with pytest.raises(PredictionError, match="the GPU emulates bf16"):
        expected(LOG, COUNTS, case, make_gpu_machine("Tesla V100-SXM2-16GB"), tokens=1000)


def test_the_network_must_be_known_between_machines() -> None:
    call = Communicate(1, 0, "forward", "all_gather", 64, 1, 2**30, is_async=False)
    log: list[Entry] = [EndOfStep(3), PRODUCT, call, EndOfStep(4)]
    machine = make_gpu_machine(A100)
    with pytest.raises(PredictionError, match="uses the network between machines, whose speed is unknown"):
        expected(log, COUNTS, make_case(), machine, tokens=1000)
    connected = machine.replace(interconnect="8xib200")
    assert expected(log, COUNTS, make_case(), connected, tokens=1000).exposed_s > 0


def call(kind: str, phase: Phase, size: int = 1000, ranks: int = 8) -> Communicate:
    return Communicate(1, 0, phase, kind, ranks, 1, size, is_async=False)


@pytest.mark.parametrize(
    ("calls", "name"),
    [
        ([], "none"),
        ([call("all_gather", "forward", ranks=1)], "none"),
        ([call("all_reduce", "backward"), call("all_reduce", "forward", size=4)], "replicated"),
        ([call("all_gather", "forward"), call("reduce_scatter", "backward")], "sharded"),
        ([call("all_gather", "forward"), call("all_reduce", "backward")], "sharded"),
        ([call("all_gather", "forward"), call("reduce_scatter", "forward")], "within layers"),
        ([call("all_reduce", "forward"), call("all_reduce", "backward")], "within layers"),
    ],
)
def test_collectives_show_the_parallelism(calls: list[Communicate], name: str) -> None:
    assert parallelism([PRODUCT, *calls]) == name
