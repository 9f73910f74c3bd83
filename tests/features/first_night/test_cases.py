"""Tests of the cases that a first night launches."""

import re

import pytest
import torch

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.features.first_night.cases import framework_cases, spread_case, usual_size
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.requirements import unsupported
from tests.samples import known, make_gpu_machine, make_machine


@pytest.mark.parametrize(
    ("machine", "model", "precision", "ranks"),
    [
        (make_gpu_machine(), "llama-3.1-8b", "bf16-mixed", 8),
        (make_gpu_machine(count=4), "llama-3.1-8b", "bf16-mixed", 4),
        (make_gpu_machine(count=2), "llama-3.2-1b", "bf16-mixed", 2),
        (make_gpu_machine(count=1), "llama-3.2-1b", "bf16-mixed", 1),
        (make_gpu_machine("Tesla V100-SXM2-32GB"), "llama-3.1-8b", "fp16-mixed", 8),
        (make_gpu_machine("Tesla T4", count=1).replace(memory_bytes=15 * 2**30), "llama-tiny", "fp32", 1),
    ],
)
def test_the_largest_model_that_fits_is_trained(
    machine: Machine, model: str, precision: str, ranks: int
) -> None:
    case = spread_case(machine, "full")
    assert (case.model.name, case.precision, case.topology.world_size) == (model, precision, ranks)
    assert unsupported(case, machine) is None


def test_size_follows_the_machine() -> None:
    assert usual_size(make_gpu_machine()) == "full"
    assert usual_size(make_machine()) == "tiny"
    assert spread_case(make_machine(), "tiny").model.name == "llama-tiny"
    assert spread_case(make_machine(), "simulated").framework.name == "fake"


def test_cases_of_a_cpu_train_in_fp32() -> None:
    """Experts in bf16 take minutes on a CPU."""
    cases = [case for _, case, _ in framework_cases(make_machine(devices=4), "tiny") if case is not None]
    assert {case.precision for case in cases} == {"fp32"}


@pytest.mark.parametrize("is_gpu", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_every_case_is_valid_or_says_why_not(count: int, is_gpu: bool) -> None:
    machine = make_gpu_machine(count=count) if is_gpu else make_machine(devices=count)
    cases = framework_cases(machine, usual_size(machine))
    given = [case for _, case, _ in cases if case is not None]
    assert all((case is None) == bool(reason) for _, case, reason in cases)
    for case in given:
        framework_of(case).check(case)
    reasons = [unsupported(case, machine) for case in given]
    expected = "deepspeed|needs? a GPU|at least 2"
    assert [reason for reason in reasons if reason and not re.search(expected, reason)] == []
    assert len({case.id for case in given}) == len(given) >= 5, "one rank also has cases"


@pytest.fixture(scope="module")
def on_eight_gpus() -> dict[str, Case]:
    return {name: known(case) for name, case, _ in framework_cases(make_gpu_machine(), "full")}


def test_eight_gpus_have_a_case_of_each_framework(on_eight_gpus: dict[str, Case]) -> None:
    assert len(on_eight_gpus) == 14
    assert on_eight_gpus["DDP"].model.name == "llama-3.2-1b", "each GPU holds the whole model"


@pytest.mark.parametrize(
    "part",
    [
        *("shard_group4", "tp_size2", "cp_size2", "tp4-pp2", "tensor_parallel2", "zero3"),
        *("pipeline_parallel_degree_2", "expert_parallel_degree_2", "context_parallel_degree_2"),
    ],
)
def test_eight_gpus_try_every_kind_of_parallelism(on_eight_gpus: dict[str, Case], part: str) -> None:
    assert part in " ".join(case.id for case in on_eight_gpus.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of imported libraries
@pytest.mark.parametrize(
    "machine", [*[make_gpu_machine(count=count) for count in (2, 4, 8)], make_machine(devices=2)]
)
def test_configurations_of_a_registry_fit_their_cases(
    monkeypatch: pytest.MonkeyPatch, machine: Machine
) -> None:
    """Only the ranks read these configurations, because they import torch."""
    of_registry = []
    for _, case, _ in framework_cases(machine, usual_size(machine)):
        if case is not None and getattr(case.framework, "module", None) is not None:
            of_registry.append((case, framework_of(case)))
    gpu_machine = make_gpu_machine()  # without a GPU, some of the cases would be skipped
    for case, framework in of_registry:
        reason = framework.unsupported(case, gpu_machine)
        if reason is not None:
            pytest.skip(reason)
    for case, framework in of_registry[:1]:
        # Load the library as a rank does. It looks for a GPU when it is imported, so load it before one is
        # pretended.
        framework.load(case, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for case, framework in of_registry:
        assert framework.expected(case)["wrapper"] == "FSDPModule"


def test_a_missing_rank_is_named() -> None:
    gone = [reason for _, case, reason in framework_cases(make_machine(devices=1), "tiny") if case is None]
    assert "it needs a multiple of 2 ranks, and this machine has 1" in gone
