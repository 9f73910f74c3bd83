"""Train a case with torchtitan's Trainer, on perfsuite's tokens. Import this after `compat.before_import`."""

# ruff: noqa: I001  configuration must come first: it makes torchtitan importable without Triton

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from perfsuite.frameworks.common.float8 import flops_in_float8, low_precision
from perfsuite.frameworks.torchtitan import compat, configuration, llama
from perfsuite.frameworks.torchtitan.configuration import ATTENTION, pipeline

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.validate import Validator
from torchtitan.config import CommConfig
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from perfsuite.case.case import Case
from perfsuite.errors import DryRunError
from perfsuite.frameworks.base import NCCL_AFTER_S, StepClock
from perfsuite.frameworks.common.model import synthetic_batches
from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.frameworks.common.patches import nothing
from perfsuite.results.rank_report import Flops
from perfsuite.results.run_dir import FLIGHT_RECORDER_FILE

RECORDED_CALLS = 2000  # torch's default for the number of calls that the flight recorder keeps
PRETENDED: dict[type, str] = {}  # in a dry run, type of a module -> note that explains its replacement
FORMULA = "torchtitan-0.3"
"""The name of the formula in `get_nparams_and_flops` of torchtitan 0.3.0's models.

FLOPs per token are 6 N + 6 L H (Q + V) S. N: number of parameters. It includes the norms, but not the
embedding. Of the experts, it includes only those that process a given token. L: layers. H: heads. Q and V:
sizes of a query and a value. S: tokens in a sequence.
"""


class CaseTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer, extended to keep the losses and to stop the clock at the end of the training."""

    def __init__(self, case: Any, clock: StepClock) -> None:
        super().__init__(trainer_config(case))
        self.case = case
        self._clock = clock
        self._micro_losses = OwnList[Tensor]()
        self.last_metrics: dict[str, float] = {}
        self.metrics_processor.logger = SimpleNamespace(
            # The Trainer calls this in the first and in the last step.
            log=lambda metrics, step: self.last_metrics.update(metrics),
            close=nothing,
        )
        compat.after_build(self)
        check_pretended(self.model, is_dry=bool(PRETENDED))

    @property
    def model(self) -> Any:
        return self.model_parts[0] if len(self.model_parts) == 1 else torch.nn.ModuleList(self.model_parts)

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different data."""
        return int(self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        """Train one micro-batch or, with a pipeline, all micro-batches of a step.

        Returns the sum of the losses of this rank's tokens, divided by the number of tokens on all ranks.
        With a pipeline, only ranks with the last stage have a loss. All other ranks return -1.
        """
        loss: Tensor = super().forward_backward_step(**batch)
        kept = loss.detach()
        if not getattr(self, "pp_has_last_stage", True):  # the attribute exists only with a pipeline
            kept = torch.zeros((), device=kept.device)
        if not self.config.training.disable_cuda_graphs:
            kept = kept.clone()  # the next replay of the CUDA graph overwrites this tensor
        self._micro_losses.append(kept.to_local() if isinstance(kept, DTensor) else kept)
        return loss

    def should_continue_training(self) -> bool:
        more: bool = self.step < self.case.total_steps
        if not more:
            self._clock.finish()  # after this, `train` waits for two seconds
        return more

    def settings(self) -> dict[str, str]:
        """Return the settings that can be seen in the model and the optimizer."""
        modules = list(self.model.modules())
        attention = {ATTENTION[kind] for kind in map(type, modules) if kind in ATTENTION}
        kinds = {
            (type(optimizer).__name__, bool(optimizer.param_groups[0].get("fused")))
            for optimizer in self.optimizers
        }
        experts = {_experts_here(module) for module in modules if isinstance(module, GroupedExperts)}
        context = self.parallel_dims.get_optional_mesh("cp")
        max_norm = self.config.training.max_norm
        replaced = compat.REPLACED + compat.REPLACED_ON_CPU * (self.device.type == "cpu")
        only = ": the norm is computed only" if math.isinf(max_norm) else ""
        return {
            "attention": " and ".join(sorted(attention)),
            "context_parallel": str(1 if context is None else context.size()),
            "experts_per_rank": " and ".join(map(str, sorted(experts))) or "none",
            "low_precision_modules": low_precision(modules),
            "pipeline": pipeline(self.parallel_dims.pp, getattr(self, "pp_schedule", None)),
            "optimizer": " and ".join(name + " fused" * fused for name, fused in sorted(kinds)),
            "spmd_backend": self.config.parallelism.spmd_backend,
            "cuda_graphs": "no" if self.config.training.disable_cuda_graphs else "yes",
            "loss_chunks": str(getattr(self.loss_fn, "num_chunks", 1)),
            "gradient_clipping": f"max_norm={max_norm}{only}",
            "patched": compat.patches(self.device.type),
            **({} if self.case.framework.config is None else {"replaced": replaced}),
        }

    def notes(self) -> tuple[str, ...]:
        """Return the notes about the modules that a dry run has replaced."""
        kinds = {kind for module in self.model.modules() for kind in type(module).__mro__}
        return tuple(why for kind, why in PRETENDED.items() if kind in kinds)

    def flops(self) -> Flops | None:
        """Return torchtitan's own FLOPs per token for a model in its registry.

        Of the experts, only those that process a given token are counted. Returns None if the case gives no
        configuration of the registry: its Llama was then built from the case's options.
        """
        if self.case.framework.config is None:
            return None
        model = self.model
        count = self.model_config.get_nparams_and_flops
        if self.parallel_dims.pp_enabled:  # build the full model, because this rank has only its own stages
            with torch.device("meta"):
                model = self.model_config.build()
        parameters, per_token = count(model, self.config.training.seq_len)
        matmul_parameters = round(count(model, 0)[1] / 6)  # with 0 tokens, attention has no FLOPs
        return Flops(
            formula=FORMULA,
            per_token=per_token,
            parameters=parameters,
            matmul_parameters=matmul_parameters,
            per_token_float8=flops_in_float8(model.modules()) or None,
        )

    def losses(self) -> list[Tensor]:
        """Return the mean loss of each step over this rank's tokens.

        In a pipeline, only the last stage computes the loss. All other stages receive it in an all-reduce.
        """
        micro = torch.stack(self._micro_losses).view(-1, self.gradient_accumulation_steps)
        losses = micro.sum(dim=1) * self.data_parallel * self.parallel_dims.cp
        if self.parallel_dims.pp_enabled:
            dist.all_reduce(losses, group=self.parallel_dims.get_mesh("pp").get_group())
        return list(losses)


def check_pretended(model: Any, *, is_dry: bool) -> None:
    """In a dry run, raise `DryRunError` for modules with Triton kernels of torchao."""
    kinds = low_precision(model.modules())
    if is_dry and not re.fullmatch(r"none|\d+ Float8Linear", kinds):
        raise DryRunError(
            f"a dry run cannot do this: {kinds} have their own kernels. Only Float8Linear uses "
            "torch's kernels"
        )


def _experts_here(experts: Any) -> int:
    """Return the number of experts that a rank computes.

    Expert parallelism splits the experts among ranks. FSDP splits them too, but gathers them to compute.
    """
    weights = next(experts.parameters())
    mesh = weights.device_mesh
    return int(weights.shape[0]) // (mesh["ep"].size() if "ep" in mesh.mesh_dim_names else 1)


def trainer_config(case: Case) -> Trainer.Config:
    """Return torchtitan's configuration for a case, from the case's options or from the registry.

    In both configurations, data, tokenizer, checkpoints, validation, profiler and logging are replaced.
    """
    options: Any = case.framework
    config = llama.from_options(case) if options.config is None else configuration.read(case)
    watchdog_s = math.ceil(case.timeout_s) + NCCL_AFTER_S
    config.tokenizer = SimpleNamespace(build=nothing)  # there is no text to tokenize
    batches = partial(synthetic_batches, case, device=torch.device("cpu"))
    config.dataloader = SyntheticData.Config(batches=batches, positions=options.config is not None)
    config.checkpoint = CheckpointManager.Config(enable=False, initial_load_model_only=False)
    config.validator = Validator.Config(enable=False)
    config.profiler = Profiler.Config()
    config.metrics = MetricsProcessor.Config(log_freq=case.total_steps)
    timeouts = dict.fromkeys(("init_timeout_seconds", "train_timeout_seconds"), watchdog_s)
    config.comm = CommConfig(**timeouts, **flight_recorder_fields())
    config.debug.enable_structured_logging = False
    config.parallelism.spmd_backend = "partial_dtensor"
    if torch.cuda.is_available():
        return config
    config.optimizer.implementation = "for-loop"
    for kind in (FlexAttention, VarlenAttention):
        for _, _, parent, name in list(config.model_spec.model.traverse(kind.Config)):
            setattr(parent, name, ScaledDotProductAttention.Config())
    return config


def flight_recorder_fields() -> dict[str, Any]:
    """Return the fields of `CommConfig` that keep torch's flight recorder enabled in a launch.

    By default, torchtitan creates a folder for the recorder's files in the current directory. These fields
    name the directory of the launch instead. A dry run has no such directory, and needs no recorder.
    """
    prefix = os.environ.get(FLIGHT_RECORDER_FILE)
    if prefix is None:
        return {"trace_buf_size": 0}
    folder, name = os.path.split(os.path.abspath(prefix))
    return {
        "trace_buf_size": RECORDED_CALLS,
        "save_traces_folder": folder,
        "save_traces_file_prefix": name,
    }


class SyntheticData(BaseDataLoader):  # type: ignore[misc]
    """A data loader that repeats the synthetic batches of a data-parallel rank endlessly."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The arguments of the data loader."""

        batches: Callable[[int], list[Tensor]]  # data-parallel rank -> its `synthetic_batches`
        positions: bool  # whether to mark each sequence as a document, as torchtitan's own data loader does

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **unused: Any) -> None:
        self._size = local_batch_size  # the micro-batch or, with a pipeline, a part of it
        self._pairs = [(tokens, tokens.roll(-1, dims=1)) for tokens in config.batches(dp_rank)]
        for _, labels in self._pairs:  # a label is the next token
            labels[:, -1] = IGNORE_INDEX  # the last token has no label, as in transformers' own loss
        positions = torch.arange(labels.shape[1]).expand_as(labels).contiguous()
        self._more = {"positions": positions} if config.positions else {}

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for tokens, labels in itertools.cycle(self._pairs):
            whole = {"input": tokens, "labels": labels, **self._more}
            for parts in zip(*(tensor.split(self._size) for tensor in whole.values()), strict=True):
                # Create a new dictionary each time, because the Trainer changes the dictionary in place.
                part = dict(zip(whole, parts, strict=True))
                yield part, part.pop("labels")
