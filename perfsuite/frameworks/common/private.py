"""The private names of torch, accelerate and transformers that perfsuite uses, with versions that have them.

Any release of a package can drop a private name. This module therefore lists all private names of these
packages that perfsuite uses. It is in the lowest layer of perfsuite that needs any of the names. Frameworks,
ranks and dry runs import a name like this:

    from perfsuite.frameworks.common.private import active_fake_mode

Each name is looked up when it is imported. Nothing is loaded earlier, and the importer gets torch's own
object, so calls have no overhead. If the installed version does not have the name, the import raises
`PrivateNameError`, which says what perfsuite cannot do without it. pytest's private names are in
`perfsuite.plugin.private`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from perfsuite.errors import PrivateNameError

if TYPE_CHECKING:  # classes that other modules use as base classes or annotations
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

    SingleProcessDataLoaderIter = _SingleProcessDataLoaderIter

Kind = Literal["object", "reader", "attribute"]
"""What an importer gets.

`object`: the object itself. `reader`: a fast function that reads the attribute from any object that has it.
In `Name.path`, the object or class before the attribute is only an example, on which perfsuite checks that
the attribute exists. `attribute`: an `Attribute`, which looks up the attribute only when it is called with an
object. This kind also works for attributes that the class itself does not have, because its `__init__` sets
them on each instance.
"""


class Name(NamedTuple):
    """One private name."""

    module: str
    path: str  # the path in the module; empty for the module itself
    kind: Kind
    seen: str  # the versions of the package that have the name
    without: str  # what perfsuite cannot do without the name

    @property
    def package(self) -> str:
        """The package that the name belongs to."""
        return self.module.partition(".")[0]

    @property
    def full(self) -> str:
        """The name with its module."""
        return f"{self.module}.{self.path}".rstrip(".")

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.path.rpartition(".")[2]

    def owner(self) -> Any:
        """Return the module, class or object that has the name.

        Raises `PrivateNameError` if there is no such owner any more.
        """
        try:
            owner: Any = sys.modules.get(self.module) or importlib.import_module(self.module)
            for part in self.path.split(".")[:-1]:
                owner = getattr(owner, part)
        except ModuleNotFoundError as error:
            of_the_package = (error.name or "").startswith(f"{self.package}.")
            if not of_the_package:  # the package is not installed, or another package is missing
                raise
            raise self.missing() from None
        except AttributeError:
            raise self.missing() from None
        return owner

    def look_up(self) -> Any:
        """Return what an importer gets (see `Kind`). Raises `PrivateNameError` if the name is gone."""
        if self.kind == "attribute":
            return Attribute(self)
        owner = self.owner()
        try:
            value = getattr(owner, self.last) if self.path else owner
        except AttributeError:
            raise self.missing() from None
        return attrgetter(self.last) if self.kind == "reader" else value

    def missing(self) -> PrivateNameError:
        """Return the error to raise if the installed version does not have the name."""
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            version = getattr(sys.modules.get(self.package), "__version__", "of an unknown version")
        return PrivateNameError(
            f"{self.package} {version} has no {self.full}, a private name (seen in {self.seen}). Without it, "
            f"{self.without}. Install a version that has it, or a newer perfsuite"
        )


class Attribute:
    """Reader of a private attribute of an object. Pass its `name` to functions such as `hasattr`."""

    def __init__(self, entry: Name) -> None:
        self.name = entry.last
        self._entry = entry

    def __call__(self, owner: Any) -> Any:
        """Return the attribute of `owner`. Raises `PrivateNameError` if it does not exist."""
        try:
            return getattr(owner, self.name)
        except AttributeError:
            raise self._entry.missing() from None


_TORCH = "torch 2.11 to 2.13"
_CUDA = f"builds of {_TORCH} for CUDA"
_TORCH_OF_TITAN = "torch 2.13"
_ACCELERATE = "accelerate 1.15"
_TRANSFORMERS = "transformers 5.23"


def _table(kind: Kind, seen: str, without: str, paths: Mapping[str, str]) -> dict[str, Name]:
    """Return the entries of `NAMES` that share `kind`, `seen` and `without`."""
    pairs = {name: path.split(":") for name, path in paths.items()}
    return {name: Name(module, path, kind, seen, without) for name, (module, path) in pairs.items()}


_UNCOUNTED = "the work of a step is not counted"
_NO_RUN = "no training can be measured"
_NO_DRY_RUN = "no case can be run dry (launch cases for real)"
_NO_TITAN = "torchtitan cannot train"
_NO_PIPELINE = "torchtitan's pipelines cannot be run dry (launch them for real)"
_NO_FAULT = "selftest cannot inject this fault"

NAMES: Mapping[str, Name] = {
    # Counting the work of a step. If one of these names is missing, `perfsuite.worker.rank` turns the error
    # into a note.
    **_table(
        "object",
        _TORCH,
        _UNCOUNTED,
        {
            "BaseDataLoaderIter": "torch.utils.data.dataloader:_BaseDataLoaderIter",
            "HigherOrderOperator": "torch._ops:HigherOrderOperator",
            "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
            "active_fake_mode": "torch._guards:active_fake_mode",
            "current_dispatch_mode": "torch.utils._python_dispatch:_get_current_dispatch_mode",
            "current_dispatch_mode_stack": "torch.utils._python_dispatch:_get_current_dispatch_mode_stack",
            "exclude_key": "torch._C:_SetExcludeDispatchKeyGuard",
            "fake_tensor": "torch._subclasses.fake_tensor:",
            "compile_callback": "torch._C._dynamo.eval_frame:get_eval_frame_callback",
            "has_kernel": "torch._C:_dispatch_has_kernel_for_dispatch_key",
            "is_wrapper_subclass_type": "torch.utils._python_dispatch:is_traceable_wrapper_subclass_type",
            "len_dispatch_stack": "torch._C:_len_torch_dispatch_stack",
            "pop_mode": "torch.utils._python_dispatch:_pop_mode",
            "push_mode": "torch.utils._python_dispatch:_push_mode",
            "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
            "script_type": "torch:ScriptObject._type",
            "skip_code": "torch._dynamo.eval_frame:skip_code",
            "set_compilations_limit": "torch._dynamo.utils:set_compilation_metrics_limit",
            "skip_package": "torch._dynamo.trace_rules:add",
            "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
        },
    ),
    **_table(
        "object",
        "torch 2.11 to 2.15",
        f"forward and backward cannot be distinguished, so {_UNCOUNTED}",
        {"current_graph_task": "torch._C:_current_graph_task_id"},
    ),
    **_table(
        "reader",
        _TORCH,
        _UNCOUNTED,
        {
            "call_kernel": "torch:ops.aten.add.Tensor._op_dk",
            "cdata": "torch:UntypedStorage._cdata",
            "overloadpacket": "torch:ops.aten.add.Tensor._overloadpacket",
            "schema": "torch:ops.aten.add.Tensor._schema",
        },
    ),
    **_table(
        "object",
        _TORCH,
        "the autograd graphs that steps keep are not counted",
        {"without_torch_function": "torch._C:DisableTorchFunctionSubclass"},
    ),
    **_table(
        "reader",
        _TORCH,
        "the autograd graphs that steps keep are not counted",
        {"base_of_view": "torch:Tensor._base"},
    ),
    **_table(
        "object",
        _TORCH,
        f"the kernels of torch.compile are unknown, and {_UNCOUNTED}",
        {
            "compilation_metrics": "torch._dynamo.utils:get_compilation_metrics",
            "dynamo_counters": "torch._dynamo.utils:counters",
            "inductor_kernels": "torch._inductor.metrics:generated_kernel_count",
        },
    ),
    **_table(
        "object",
        _TORCH,
        "batches of loader workers are not counted",
        {
            "IterableDatasetFetcher": "torch.utils.data._utils.fetch:_IterableDatasetFetcher",
            "MapDatasetFetcher": "torch.utils.data._utils.fetch:_MapDatasetFetcher",
        },
    ),
    **_table(
        "attribute",
        _TORCH,
        "batches of loader workers are not counted",
        {
            "loader_dataset": "torch.utils.data.dataloader:_BaseDataLoaderIter._dataset",
            "loader_workers": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._workers",
        },
    ),
    **_table(
        "attribute",
        _TORCH,
        "the norm of fp16 gradients is unknown",
        {
            "loss_scale": "torch.amp:GradScaler._scale",
            "scaled_optimizers": "torch.amp:GradScaler._per_optimizer_states",
        },
    ),
    # Names that every measurement needs.
    **_table(
        "object",
        _TORCH,
        _NO_RUN,
        {
            "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
            "is_wrapper_subclass": "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
            "tree_leaves": "torch.utils._pytree:tree_leaves",
            "tree_map": "torch.utils._pytree:tree_map",
        },
    ),
    **_table(
        "attribute",
        _TORCH,
        "training with DTensors, such as with FSDP2, cannot be measured",
        {"local_tensor": "torch.distributed.tensor:DTensor._local_tensor"},
    ),
    **_table(
        "object",
        _TORCH,
        "collectives in other threads and in perfsuite's events, such as checkpoints, are unknown",
        {
            "process_groups": "torch.distributed.distributed_c10d:_world",
            "sequence_number": "torch.distributed:ProcessGroup._get_sequence_number_for_group",
        },
    ),
    **_table(
        "object",
        _TORCH,
        "a hang in a collective is not explained",
        {"dump_flight_recorder": "torch._C._distributed_c10d:_dump_fr_trace"},
    ),
    **_table(
        "object",
        _CUDA,
        "a hang in a collective of NCCL is not explained",
        {"dump_nccl_flight_recorder": "torch._C._distributed_c10d:_dump_nccl_trace"},
    ),
    **_table(
        "object",
        _TORCH,
        "the size of a sharded checkpoint is unknown",
        {"write_data": "torch.distributed.checkpoint.filesystem:_FileSystemWriter._write_data"},
    ),
    **_table(
        "object",
        _TORCH,
        "a GPU cannot be slowed down on purpose (--perf-inject)",
        {"cuda_sleep": "torch.cuda:_sleep"},
    ),
    **_table(
        "object",
        _CUDA,
        "the memory that cuBLAS allocates while a GPU is probed is not freed",
        {"clear_cublas_workspaces": "torch._C:_cuda_clearCublasWorkspaces"},
    ),
    # Attributes of wrapper modules, and of FSDP2.
    **_table(
        "attribute",
        _TORCH,
        "adapters in wrapped layers are not recognised",
        {
            "checkpointed_module": (
                "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:"
                "CheckpointWrapper._checkpoint_wrapped_module"
            ),
            "compiled_module": "torch._dynamo.eval_frame:OptimizedModule._orig_mod",
            "fsdp_module": "torch.distributed.fsdp:FullyShardedDataParallel._fsdp_wrapped_module",
        },
    ),
    **_table(
        "attribute",
        _TORCH,
        "the dtype in which FSDP2 reduces gradients cannot be checked",
        {
            "fsdp_policy": "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._mp_policy",
            "fsdp_state": "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
        },
    ),
    **_table(
        "attribute",
        _TORCH,
        "weights can be neither initialised shard by shard nor cast",
        {"own_parameters": "torch.nn:Module._parameters"},
    ),
    # Faults that `perfsuite selftest` injects.
    **_table(
        "object",
        _TORCH,
        _NO_FAULT,
        {
            "CheckpointWrapper": (
                "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper"
            ),
        },
    ),
    **_table(
        "attribute",
        _TORCH,
        _NO_FAULT,
        {
            "fsdp_group": "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._fsdp_param_group",
            "reduce_dtype": (
                "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._reduce_dtype"
            ),
        },
    ),
    # Dry runs.
    **_table(
        "attribute",
        _TORCH,
        "no training with DDP can be run dry (launch it for real)",
        {"check_reducer_finalized": "torch.distributed:Reducer._check_reducer_finalized"},
    ),
    **_table(
        "object",
        _TORCH,
        _NO_DRY_RUN,
        {
            "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
            "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
            "FakeWork": "torch._C._distributed_c10d:FakeWork",
            "MultiProcessingDataLoaderIter": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
            "SingleProcessDataLoaderIter": "torch.utils.data.dataloader:_SingleProcessDataLoaderIter",
            "bucket_assignment": "torch.distributed:_compute_bucket_assignment_by_size",
            "cuda_lazy_init": "torch.cuda:_lazy_init",
            "data_ptr_allocated": "torch.distributed.fsdp._flat_param:_data_ptr_allocated",
            "detect_fake_mode": "torch.distributed.tensor._sharding_prop:detect_fake_mode",
            "fake_collectives": "torch.distributed._tools.fake_collectives:",
            "first_bucket_bytes": "torch.distributed:_DEFAULT_FIRST_BUCKET_BYTES",
            "init_gpu_context": "torch._subclasses.fake_tensor:init_gpu_context",
            "is_in_bad_fork": "torch.cuda:_is_in_bad_fork",
            "mesh_concatenate": "torch.distributed.device_mesh:DeviceMesh._concatenate",
            "mesh_flatten": "torch.distributed.device_mesh:DeviceMesh._flatten",
            "mesh_unflatten": "torch.distributed.device_mesh:DeviceMesh._unflatten",
            "next_data": "torch.utils.data.dataloader:_SingleProcessDataLoaderIter._next_data",
            "parse_to": "torch._C._nn:_parse_to",
            "reset_loader": "torch.utils.data.dataloader:_SingleProcessDataLoaderIter._reset",
            "same_storage": "torch.distributed.fsdp._flat_param:_same_storage",
            "swap_tensor_impl": "torch._C:_swap_tensor_impl",
            "verify_shapes": "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
        },
    ),
    **_table(
        "object",
        "torch 2.13",
        "no compiled case can be run dry (launch it for real, or leave out compile)",
        {
            "boxed_nop": "torch._dynamo.backends.debugging:boxed_nop",
            "compile_fx": "torch._inductor.compile_fx:compile_fx",
            "dynamo_errors": "torch._dynamo.exc:",
            "dynamo_compile": "torch._dynamo.convert_frame:_compile",
            "functorch_config": "torch._functorch.config:",
            "inductor_config": "torch._inductor.config:",
        },
    ),
    **_table(
        "object",
        _CUDA,
        "a script cannot read the raw stream of its GPU in a dry run",
        {"raw_stream": "torch._C:_cuda_getCurrentRawStream"},
    ),
    # torchtitan and its pipelines.
    **_table(
        "object",
        _TORCH_OF_TITAN,
        _NO_TITAN,
        {"set_pg_timeout": "torch.distributed.distributed_c10d:_set_pg_timeout"},
    ),
    **_table(
        "attribute",
        _TORCH_OF_TITAN,
        _NO_TITAN,
        {
            "schedule_stage": "torch.distributed.pipelining.schedules:PipelineScheduleSingle._stage",
            "schedule_stages": "torch.distributed.pipelining.schedules:PipelineScheduleMulti._stages",
            "step_microbatches": (
                "torch.distributed.pipelining.schedules:PipelineScheduleSingle._step_microbatches"
            ),
        },
    ),
    **_table(
        "object",
        _TORCH_OF_TITAN,
        _NO_PIPELINE,
        {
            "InferenceMode": "torch.distributed.pipelining._utils:InferenceMode",
            "StageBackwardMeta": "torch.distributed.pipelining._utils:_StageBackwardMeta",
            "StageForwardMeta": "torch.distributed.pipelining._utils:_StageForwardMeta",
            "metadata_inference": (
                "torch.distributed.pipelining.stage:PipelineStage._forward_metadata_inference"
            ),
            "recv_meta": "torch.distributed.pipelining.stage:PipelineStage._recv_meta",
            "send_meta": "torch.distributed.pipelining.stage:PipelineStage._send_meta",
            "warmup_p2p": "torch.distributed.pipelining.schedules:_PipelineSchedule._warmup_p2p",
        },
    ),
    **_table(
        "attribute",
        _TORCH_OF_TITAN,
        _NO_PIPELINE,
        {
            "inference_mode": "torch.distributed.pipelining.stage:PipelineStage._inference_mode",
            "stage_meta": "torch.distributed.pipelining.stage:PipelineStage._stage_meta",
        },
    ),
    **_table("attribute", _TORCH, _NO_DRY_RUN, {"is_param": "torch.nn:Parameter._is_param"}),
    **_table("reader", _TORCH, _NO_DRY_RUN, {"changes_in_place": "torch:Tensor._version"}),
    # transformers and accelerate.
    **_table(
        "attribute",
        _TRANSFORMERS,
        "the attention implementation in use is unknown",
        {"attn_implementation": "transformers:PreTrainedConfig._attn_implementation"},
    ),
    **_table(
        "attribute",
        _TRANSFORMERS,
        "no case can build its model",
        {
            "init_weights": "transformers:PreTrainedModel._init_weights",
            "no_split_modules": "transformers:PreTrainedModel._no_split_modules",
        },
    ),
    **_table(
        "attribute",
        _TRANSFORMERS,
        "accelerate and the Trainer cannot train with tensor parallelism",
        {"resolve_parallel_plans": "transformers:PreTrainedModel._resolve_parallel_plans"},
    ),
    **_table(
        "attribute",
        _TRANSFORMERS,
        _NO_FAULT,
        {"checkpointing_func": "transformers:GradientCheckpointingLayer._gradient_checkpointing_func"},
    ),
    **_table(
        "object",
        _ACCELERATE,
        "a case cannot use a configuration file of accelerate",
        {"validate_launch_command": "accelerate.commands.launch:_validate_launch_command"},
    ),
    **_table(
        "attribute",
        _ACCELERATE,
        "a case with accelerate's degrees of parallelism cannot train on a CPU",
        {"validate_accelerator": "accelerate.parallelism_config:ParallelismConfig._validate_accelerator"},
    ),
}
"""perfsuite's own name -> the private name. `tests/frameworks/common/test_private.py` checks that all of them
exist."""


def __getattr__(name: str) -> Any:
    """Return the object behind a private name. Raises `PrivateNameError` if the package does not have it."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return NAMES[name].look_up()


def or_none(name: str) -> Any:
    """Return the object behind a private name, or None if the package does not have the name."""
    try:
        return NAMES[name].look_up()
    except PrivateNameError:
        return None


def if_loaded(name: str) -> Any:
    """Return the object behind a private name, or None if its module has not been imported."""
    return NAMES[name].look_up() if NAMES[name].module in sys.modules else None


def place(name: str) -> tuple[Any, str]:
    """Return the owner and the name of a private attribute, for `perfsuite.frameworks.common.patches`."""
    return NAMES[name].owner(), NAMES[name].last


def shard_of(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor. Any other tensor is returned unchanged."""
    return _LOCAL_TENSOR(tensor) if hasattr(tensor, "placements") else tensor


_LOCAL_TENSOR = Attribute(NAMES["local_tensor"])
