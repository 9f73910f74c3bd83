import importlib
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from perfsuite.errors import PrivateNameError
from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.private import NAMES, Name
from tests.fake_group import fake_group


def sharded() -> Any:
    """Return a module under FSDP2 as one of two ranks."""
    with fake_group(0, 2):
        return fully_shard(nn.Linear(4, 4))


def a_group_of_parameters() -> Any:
    """Return the parameter group of such a module, after FSDP2 has set its dtypes."""
    with fake_group(0, 2):
        group = private.fsdp_group(private.fsdp_state(fully_shard(nn.Linear(4, 4)))())
        group.lazy_init()
        return group


def of_fsdp1() -> Any:
    with fake_group(0, 2):
        return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


def a_dtensor() -> DTensor:
    with fake_group(0, 2):
        return DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)))


def a_fake_parameter() -> Any:
    with private.FakeTensorMode():
        return nn.Parameter(torch.ones(2))


def a_llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def a_checkpointed_block() -> Any:
    model = a_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 also has another name for it
        model.gradient_checkpointing_enable()
    return model.model.layers[0]


def a_parallelism() -> Any:
    return importlib.import_module("accelerate.parallelism_config").ParallelismConfig()


OWNERS: dict[str, Callable[[], Any]] = {
    "attn_implementation": transformers.LlamaConfig,
    "check_reducer_finalized": lambda: vars(torch.distributed)["Reducer"],
    "checkpointed_module": lambda: checkpoint_wrapper(nn.Linear(1, 1)),
    "checkpointing_func": a_checkpointed_block,
    "compiled_module": lambda: torch.compile(nn.Linear(1, 1), backend="eager"),
    "fsdp_group": lambda: private.fsdp_state(sharded())(),
    "fsdp_module": of_fsdp1,
    "fsdp_policy": lambda: private.fsdp_state(sharded())(),
    "fsdp_state": sharded,
    "init_weights": a_llama,
    "is_param": a_fake_parameter,
    "loader_dataset": lambda: iter(DataLoader([1])),  # type: ignore[arg-type]
    "local_tensor": a_dtensor,
    "loss_scale": lambda: torch.amp.GradScaler("cpu"),
    "no_split_modules": a_llama,
    "own_parameters": lambda: nn.Linear(1, 1),
    "reduce_dtype": a_group_of_parameters,
    "resolve_parallel_plans": a_llama,
    "scaled_optimizers": lambda: torch.amp.GradScaler("cpu"),
    "step_microbatches": lambda: PipelineScheduleSingle,
    "validate_accelerator": a_parallelism,
}
"""For each private attribute, an object that has it."""

SET_IN: dict[str, Callable[..., Any]] = {
    "inference_mode": PipelineStage.__init__,
    "loader_workers": _MultiProcessingDataLoaderIter.__init__,
    "schedule_stage": PipelineScheduleSingle.__init__,
    "schedule_stages": PipelineScheduleMulti.__init__,
    "stage_meta": _PipelineStageBase.__init__,
}
"""For each other private attribute, the function that sets it.

Creating an object that has the attribute would need several processes.
"""


def names(*kinds: str) -> list[str]:
    return [name for name, entry in NAMES.items() if entry.kind in kinds]


# Inductor imports a module that uses `torch.jit`.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", names("object", "reader"))
def test_the_package_still_has_the_name(name: str) -> None:
    if "CUDA" in NAMES[name].seen and torch.version.cuda is None:
        pytest.skip("this torch is not built for CUDA")
    NAMES[name].look_up()


@pytest.mark.parametrize("name", OWNERS)
def test_objects_still_have_the_attribute(name: str) -> None:
    getattr(private, name)(OWNERS[name]())


def test_every_attribute_has_a_canary() -> None:
    assert set(names("attribute")) == OWNERS.keys() | SET_IN.keys()


@pytest.mark.parametrize("name", SET_IN)
def test_functions_still_set_the_attribute(name: str) -> None:
    assert getattr(private, name).name in SET_IN[name].__code__.co_names


@pytest.mark.parametrize("name", NAMES)
def test_every_name_says_what_is_lost_and_its_versions(name: str) -> None:
    said = str(NAMES[name].missing())
    assert NAMES[name].package in NAMES[name].seen
    assert f"{NAMES[name].full}, a private name (seen in {NAMES[name].seen})" in said
    assert f"Without it, {NAMES[name].without}. Install" in said


def test_a_missing_name_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr("importlib.metadata.version", lambda package: f"9.9 of {package}")
    monkeypatch.delattr("torch._guards.active_fake_mode")
    with pytest.raises(PrivateNameError) as caught:
        from perfsuite.frameworks.common.private import active_fake_mode  # noqa: F401
    assert str(caught.value) == (
        "torch 9.9 of torch has no torch._guards.active_fake_mode, a private name (seen in torch 2.11 to "
        "2.13). Without it, the work of a step is not counted. Install a version that has it, or a newer "
        "perfsuite"
    )


def a_name(module: str, path: str = "x") -> Name:
    return Name(module, path, "object", "torch 2.13", "nothing works")


@pytest.mark.parametrize(
    ("entry", "full"),
    [
        (a_name("torch._renamed"), "torch._renamed.x"),
        (a_name("torch._renamed.again", ""), "torch._renamed.again"),
        (a_name("torch", "Renamed.x"), "torch.Renamed.x"),
    ],
)
def test_a_missing_module_or_class_is_the_same_error(entry: Name, full: str) -> None:
    with pytest.raises(PrivateNameError, match=f"^torch [^ ]+ has no {full}, a private name"):
        entry.look_up()


def test_a_package_that_is_not_installed_keeps_its_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'nosuch_package'"):
        a_name("nosuch_package.inner").look_up()


def test_an_unknown_name_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match=r"private' has no attribute 'nosuch_name'"):
        private.nosuch_name  # noqa: B018


def test_an_object_without_the_attribute_is_an_error() -> None:
    with pytest.raises(PrivateNameError, match=r"has no torch\.amp\.GradScaler\._scale, a private name"):
        private.loss_scale(object())


def test_or_none_is_none_for_a_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private.or_none("tree_leaves") is torch.utils._pytree.tree_leaves
    monkeypatch.delattr("torch.utils._pytree.tree_leaves")
    assert private.or_none("tree_leaves") is None


def test_loads_no_module_to_look_up_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert private.if_loaded("dynamo_counters") is None
    assert "torch._dynamo.utils" not in sys.modules


def test_a_loaded_module_without_the_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace())
    with pytest.raises(PrivateNameError, match=r"the kernels of torch\.compile are unknown"):
        private.if_loaded("dynamo_counters")


def test_a_place_is_an_owner_and_a_name() -> None:
    assert private.place("cuda_lazy_init") == (torch.cuda, "_lazy_init")


def test_a_plain_tensor_is_its_own_shard() -> None:
    tensor = torch.ones(1)
    assert private.shard_of(tensor) is tensor


def test_a_dtensor_without_the_name_is_not_taken_for_whole() -> None:
    with pytest.raises(PrivateNameError, match="training with DTensors"):
        private.shard_of(SimpleNamespace(placements=()))
