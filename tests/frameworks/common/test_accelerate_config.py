import os
from types import SimpleNamespace
from typing import Any

import pytest

from perfsuite.frameworks.common.accelerate_config import clear_environment, force_fsdp, launcher_environment
from tests.frameworks.test_accelerate import FSDP1, FSDP2

ON_CPU = "FSDP on a CPU, where accelerate turns it into DDP"


@pytest.mark.parametrize(
    ("version", "precision", "forced"),
    [(2, "no", ON_CPU), (1, "bf16", f"{ON_CPU}; without sync_module_states, which broadcasts from a GPU")],
)
def test_forces_fsdp_on_a_cpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch, version: int, precision: str, forced: str
) -> None:
    partial = SimpleNamespace()
    monkeypatch.setattr("accelerate.state.PartialState", lambda: partial)
    precisions: list[str] = []
    plugin: Any = SimpleNamespace(fsdp_version=version, set_mixed_precision=precisions.append)
    accelerator: Any = SimpleNamespace(state=SimpleNamespace(), mixed_precision=precision)
    assert force_fsdp(accelerator, plugin) == forced
    assert accelerator.state.fsdp_plugin is plugin
    states = (partial, accelerator.state)
    assert [(state.distributed_type, state.device.type) for state in states] == [("FSDP", "cpu")] * 2
    assert precisions == ([] if precision == "no" else [precision])


def test_clears_only_variables_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_MIXED_PRECISION", "FSDP_VERSION", "TORCH_FSDP"):
        monkeypatch.setenv(name, "mine")
    clear_environment()
    assert not [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]
    assert os.environ["TORCH_FSDP"] == "mine"


def test_turns_a_file_for_fsdp1_into_environment() -> None:
    fsdp1 = launcher_environment(FSDP1)
    variables = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "1"}
    variables |= {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_USE_ORIG_PARAMS": "false"}
    assert fsdp1.items() >= variables.items()
    assert {key.split("_")[0] for key in fsdp1} == {"ACCELERATE", "FSDP"}


def test_turns_a_file_for_fsdp2_into_environment() -> None:
    fsdp2 = launcher_environment(FSDP2)
    assert (fsdp2["FSDP_VERSION"], fsdp2["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", "true")


def test_turns_a_file_for_ddp_into_environment() -> None:
    ddp = launcher_environment("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    assert ddp["ACCELERATE_USE_CPU"] == "True"
    assert "ACCELERATE_USE_FSDP" not in ddp
