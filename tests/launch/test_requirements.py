import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfsuite import DDP, Case, Fake, LoRA, Model, Topology
from perfsuite.case.torch_build import MIN_TORCH
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.node.machine import detect
from tests.fake_torch import install_torch
from tests.packages import MINE, Packages
from tests.samples import make_case, make_gpu_machine, make_machine

SMALL = make_case(framework=DDP())
MISSING = "it needs the package {0}, which is not installed: pip install {0}"


@pytest.fixture
def mine(packages: Packages) -> Callable[[str], Case]:
    """Return a function that installs a framework whose class has this line, and returns a case of it."""

    def install(line: str) -> Case:
        packages.install("perf-mine", f"{MINE}    {line}\n", frameworks="mine = perf_mine:Mine")
        return SMALL.replace(framework="mine")

    return install


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that hides an installed package."""
    find = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))

    return hide


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"topology": Topology(nodes=2, processes_per_node=1)},
            "it needs 2 nodes (processes per node: 1), but this is one machine",
        ),
        ({"framework": DDP(static_graph=True), "gradient_accumulation": 2}, "set gradient_accumulation to 1"),
        ({"attention": "flash_attention_2"}, "flash_attention_2 runs on GPUs only"),
        (
            {"lora": LoRA(rank=4, alpha=8), "framework": Fake()},
            "fake does not support lora, but the case asks for",
        ),
        ({"lora": LoRA(rank=4, alpha=8), "quantization": "8bit"}, "quantization '8bit' runs on GPUs only"),
        ({"hardware": ("h100", "a100")}, "it is meant for h100, but this machine is cpu-"),
    ],
)
def test_finds_bad_combinations_beforehand(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(unsupported(SMALL.replace(**changes), detect()))


@pytest.mark.parametrize(("package", "field"), [("peft", "lora"), ("bitsandbytes", "quantization '4bit'")])
def test_an_extra_that_is_not_installed_is_named(
    without: Callable[[str], None], package: str, field: str
) -> None:
    without(package)
    case = SMALL.replace(hardware="gpu", lora=LoRA(rank=4, alpha=8), quantization="4bit")
    assert unsupported(case, make_gpu_machine()) == (
        f"for {field} it needs the package {package}, which is not installed: "
        f"pip install 'perfsuite[{package}]'"
    )


@pytest.mark.parametrize("installed", [False, True])
def test_a_mamba_on_a_gpu_needs_its_kernels(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    find = importlib.util.find_spec
    spec = find("torch") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "mamba_ssm" else find(name))
    mamba = SMALL.replace(model="mamba-tiny", hardware="gpu")
    missing = MISSING.format("mamba_ssm")
    reason = (
        f"for a Mamba on a GPU {missing}. transformers' own scan is slow: it takes one position at a time"
    )
    assert unsupported(mamba, make_gpu_machine()) == (None if installed else reason)
    assert unsupported(mamba.replace(hardware="cpu"), detect()) is None
    assert unsupported(mamba.replace(framework=Fake()), make_gpu_machine()) is None


NINE = "it needs 9 GPUs (one per process), but this machine has 8"
ELSEWHERE = "it is meant for t4, but this machine is {0}; it is meant for cpu, but this machine is {0}"
NAMED = {"model": Model.named("mine")}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"topology": Topology(processes_per_node=8)}, None),
        ({"topology": Topology(processes_per_node=9)}, NINE),
        ({"hardware": ("t4", "cpu")}, ELSEWHERE),
        ({"hardware": ("t4", "gpu")}, None),
        (NAMED, "ddp cannot build mine: this model has a name, but no configuration"),
        (
            {**NAMED, "framework": Fake()},
            "fake cannot build mine: this model has a name, but no configuration",
        ),
    ],
)
def test_each_requirement_has_its_reason(changes: dict[str, Any], reason: str | None) -> None:
    machine = make_gpu_machine(count=8)
    case = SMALL.replace(**{"hardware": "gpu", **changes})
    message = None if reason is None else reason.format(machine.hardware_class)
    assert unsupported(case, machine) == message


@pytest.mark.parametrize("package", ["flash_attn", "transformers_of_the_framework"])
def test_a_package_that_is_missing_is_named(
    mine: Callable[[str], Case], without: Callable[[str], None], package: str
) -> None:
    case = mine(f"packages: ClassVar = ({package!r},)").replace(hardware="gpu")
    without(package)
    missing = MISSING.format(package)
    assert unsupported(case, make_gpu_machine()) == missing
    if package == "flash_attn":
        asks = case.replace(attention="flash_attention_2")
        assert unsupported(asks, make_gpu_machine()) == f"for flash_attention_2 {missing}"


def test_other_reasons_precede_a_missing_package(mine: Callable[[str], Case]) -> None:
    """If a machine could never run the case, nothing needs to be installed."""
    case = mine("packages: ClassVar = ('not_there',)").replace(hardware="t4")
    assert str(unsupported(case, make_machine())).startswith("it is meant for t4")


def test_a_framework_has_the_last_word(mine: Callable[[str], Case]) -> None:
    case = mine("def unsupported(self, case, machine): return f'not on {machine.device}'")
    assert unsupported(case, make_machine()) == "not on cpu"


def test_torchs_build_matters_only_for_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = ".".join(map(str, MIN_TORCH))
    install_torch(tmp_path, monkeypatch, version=f"{version}.0")
    reason = str(wrong_torch(SMALL, make_gpu_machine()))
    assert reason.startswith(f"torch {version}.0 was built without CUDA")
    assert wrong_torch(SMALL, make_machine()) is None
    assert wrong_torch(SMALL.replace(framework=Fake()), make_gpu_machine()) is None
