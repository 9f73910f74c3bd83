"""torchtitan's own Trainer for a case, on our tokens. On a CPU, import it after `compat.before_import`."""

# ruff: noqa: I001  configuration, which lets torchtitan be imported without Triton, comes first

import itertools
import math
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

PRETENDED: dict[type, str] = {}  # in a dry run: the note for a type of module
FORMULA = "torchtitan-0.3"
"""`get_nparams_and_flops` of torchtitan 0.3.0's models, per token: 6 N + 6 L H (Q + V) S for L layers with H
heads, whose queries have size Q and values V, and S tokens in a sequence. N: parameters without the
embedding, but with norms; of the experts, the share that a token passes through."""


class CaseTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer, which also keeps the losses and reports to the clock when it is done."""

    def __init__(self, case: Any, clock: StepClock) -> None:
        super().__init__(trainer_config(case))
        self.case = case
        self._clock = clock
        self._micro_losses = OwnList[Tensor]()
        self.last_metrics: dict[str, float] = {}
        self.metrics_processor.logger = SimpleNamespace(
            # Called at the first and the last step.
            log=lambda metrics, step: self.last_metrics.update(metrics),
            close=nothing,
        )
        compat.after_build(self)
        check_pretended(self.model)

    @property
    def model(self) -> Any:
        return self.model_parts[0] if len(self.model_parts) == 1 else torch.nn.ModuleList(self.model_parts)

    @property
    def data_parallel(self) -> int:
        """The number of ranks that see different data."""
        return int(self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        """Train one micro-batch, or those of a pipeline.

        Return the loss: this rank's sum, divided by all ranks' tokens; -1 without the last stage.
        """
        loss: Tensor = super().forward_backward_step(**batch)
        kept = loss.detach()
        if not getattr(self, "pp_has_last_stage", True):  # set for a pipeline
            kept = torch.zeros((), device=kept.device)
        if not self.config.training.disable_cuda_graphs:
            kept = kept.clone()  # the next replay writes into the same tensor
        self._micro_losses.append(kept.to_local() if isinstance(kept, DTensor) else kept)
        return loss

    def should_continue_training(self) -> bool:
        more: bool = self.step < self.case.total_steps
        if not more:
            self._clock.finish()  # `train` waits two seconds at its end
        return more

    def settings(self) -> dict[str, str]:
        """Return the settings as the model and the optimizer have them."""
        modules = list(self.model.modules())
        attention = {ATTENTION[kind] for kind in map(type, modules) if kind in ATTENTION}
        kinds = {(type(each).__name__, bool(each.param_groups[0].get("fused"))) for each in self.optimizers}
        experts = {_experts_here(each) for each in modules if isinstance(each, GroupedExperts)}
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
        """Return what is pretended in a dry run."""
        kinds = {kind for each in self.model.modules() for kind in type(each).__mro__}
        return tuple(why for kind, why in PRETENDED.items() if kind in kinds)

    def flops(self) -> Flops | None:
        """Return torchtitan's own FLOPs per token for a registered model; None for one of the options.

        Only the experts that a token passes through count.
        """
        if self.case.framework.config is None:
            return None
        model = self.model
        count = self.model_config.get_nparams_and_flops
        if self.parallel_dims.pp_enabled:  # a pipeline leaves this rank only its stages
            with torch.device("meta"):
                model = self.model_config.build()
        parameters, per_token = count(model, self.config.training.seq_len)
        matmul_parameters = round(count(model, 0)[1] / 6)  # there is no attention without tokens
        return Flops(
            formula=FORMULA,
            per_token=per_token,
            parameters=parameters,
            matmul_parameters=matmul_parameters,
            per_token_float8=flops_in_float8(model.modules()) or None,
        )

    def losses(self) -> list[Tensor]:
        """Return the loss of each step: the mean over this rank's tokens, or those of its last stage."""
        micro = torch.stack(self._micro_losses).view(-1, self.gradient_accumulation_steps)
        losses = micro.sum(dim=1) * self.data_parallel * self.parallel_dims.cp
        if self.parallel_dims.pp_enabled:
            dist.all_reduce(losses, group=self.parallel_dims.get_mesh("pp").get_group())
        return list(losses)


def check_pretended(model: Any) -> None:
    """Raise `DryRunError` for modules whose kernels a dry run does not know: torchao has some in Triton."""
    kinds = low_precision(model.modules())
    if PRETENDED and not re.fullmatch(r"none|\d+ Float8Linear", kinds):
        raise DryRunError(f"not by a dry run: {kinds}: only the kernels of Float8Linear are torch's own")


def _experts_here(experts: Any) -> int:
    """Return how many experts a rank computes: FSDP gathers its shards, expert parallelism does not."""
    weights = next(experts.parameters())
    mesh = weights.device_mesh
    return int(weights.shape[0]) // (mesh["ep"].size() if "ep" in mesh.mesh_dim_names else 1)


def trainer_config(case: Case) -> Trainer.Config:
    """Return torchtitan's configuration for a case, from options or its registry, with our replacements."""
    options: Any = case.framework
    config = llama.from_options(case) if options.config is None else configuration.read(case)
    watchdog_s = math.ceil(case.timeout_s) + NCCL_AFTER_S
    config.tokenizer = SimpleNamespace(build=nothing)  # there is no text
    batches = partial(synthetic_batches, case, device=torch.device("cpu"))
    config.dataloader = SyntheticData.Config(batches=batches, positions=options.config is not None)
    config.checkpoint = CheckpointManager.Config(enable=False, initial_load_model_only=False)
    config.validator = Validator.Config(enable=False)
    config.profiler = Profiler.Config()
    config.metrics = MetricsProcessor.Config(log_freq=case.total_steps)
    timeouts = dict.fromkeys(("init_timeout_seconds", "train_timeout_seconds"), watchdog_s)
    config.comm = CommConfig(**timeouts, trace_buf_size=0)  # a buffer would make it create a folder
    config.debug.enable_structured_logging = False
    config.parallelism.spmd_backend = "partial_dtensor"
    if torch.cuda.is_available():
        return config
    config.optimizer.implementation = "for-loop"
    for kind in (FlexAttention, VarlenAttention):
        for _, _, parent, name in list(config.model_spec.model.traverse(kind.Config)):
            setattr(parent, name, ScaledDotProductAttention.Config())
    return config


class SyntheticData(BaseDataLoader):  # type: ignore[misc]
    """The tokens of every framework, by data-parallel rank, in an endless cycle."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """`batches`: data-parallel rank -> its `perfsuite.frameworks.common.model.synthetic_batches`."""

        batches: Callable[[int], list[Tensor]]
        positions: bool  # mark each sequence as a document, as torchtitan's own data loader does

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **unused: Any) -> None:
        self._size = local_batch_size  # a micro-batch; part of one with a pipeline
        self._pairs = [(tokens, tokens.roll(-1, dims=1)) for tokens in config.batches(dp_rank)]
        for _, labels in self._pairs:  # the token after each one
            labels[:, -1] = IGNORE_INDEX  # the last token has no successor, as in transformers' own loss
        positions = torch.arange(labels.shape[1]).expand_as(labels).contiguous()
        self._more = {"positions": positions} if config.positions else {}

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for tokens, labels in itertools.cycle(self._pairs):
            whole = {"input": tokens, "labels": labels, **self._more}
            for parts in zip(*(each.split(self._size) for each in whole.values()), strict=True):
                # A new dictionary, because the Trainer changes it in place.
                part = dict(zip(whole, parts, strict=True))
                yield part, part.pop("labels")
