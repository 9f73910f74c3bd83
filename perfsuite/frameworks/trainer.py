"""The unmodified Hugging Face Trainer, with DDP or with FSDP (its argument `fsdp`)."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import DryPlan, Ranks, StepClock, Workload
from perfsuite.frameworks.common import float8, sharding
from perfsuite.frameworks.common.accelerate_config import clear_environment, force_fsdp
from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.frameworks.common.parallelism import ByAccelerate, Size

SHARDINGS = {  # the Trainer's word -> torch's FSDP1 strategy; FSDP2 supports only the first two
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
}


class Trainer(ByAccelerate):
    """The Hugging Face Trainer.

    The options come from `TrainingArguments`: `fsdp`, the `version` in `fsdp_config`, and the sizes in
    `parallelism_config`.
    """

    name: ClassVar[str] = "trainer"

    fsdp: str = ""
    """A sharding strategy and, optionally, `offload` and `auto_wrap`, separated by spaces. Empty: DDP."""
    fsdp_version: Literal[1, 2] = 2
    dp_replicate_size: Size = 1
    dp_shard_size: Size = 1
    cp_size: Size = 1
    tp_size: Size = 1
    float8: Literal["tensorwise"] | None = None
    """Train in float8 with accelerate's `mixed_precision="fp8"` and torchao. The Trainer has no other recipe
    than `tensorwise`."""

    @field_validator("fsdp")
    @classmethod
    def _known_words(cls, fsdp: str) -> str:
        words = fsdp.split()
        unknown = [word for word in words if word not in {*SHARDINGS, "offload", "auto_wrap"}]
        if unknown:
            raise ValueError(f"unknown word {unknown[0]!r}; use {', '.join(SHARDINGS)}, offload, auto_wrap")
        if words and sum(word in SHARDINGS for word in words) != 1:
            raise ValueError(f"give one sharding strategy of {', '.join(SHARDINGS)}, or nothing for DDP")
        return " ".join(words)

    @model_validator(mode="after")
    def _version_knows_it(self) -> Trainer:
        if self.fsdp_version == 2 and self._sharding not in (None, "full_shard", "shard_grad_op"):
            raise ValueError(
                f"{self._sharding} needs fsdp_version=1; FSDP2 has only full_shard and shard_grad_op"
            )
        if self.fsdp_version == 1 and not self.fsdp:
            raise ValueError("fsdp_version=1 needs fsdp; give a strategy, for example fsdp='full_shard'")
        if self._degrees.given and (self.fsdp_version == 1 or not self.fsdp):
            raise ValueError(
                f"{self._degrees}: sizes above 1 need FSDP2. Give fsdp_version=2 and a strategy, for example "
                "fsdp='full_shard'"
            )
        self._degrees.refuse_without_shards()
        if self.float8 is not None and self.fsdp_version == 1:
            raise ValueError(f"float8={self.float8!r} works with DDP and FSDP2, not with fsdp_version=1")
        return self

    @property
    def _sharding(self) -> str | None:
        return next((word for word in self.fsdp.split() if word in SHARDINGS), None)

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        reason = float8.unsupported(self.float8, case, machine, by_accelerate=True)
        if reason:
            return reason
        if case.activation_checkpointing == "selective-op":
            return (
                "the Trainer recomputes whole blocks only: give 'none', 'full' or 'every-N', "
                "not 'selective-op'"
            )
        if case.topology.world_size < 2:
            return "the Trainer does not wrap the model on 1 process: give at least 2"
        if "offload" in self.fsdp.split():
            reason = sharding.offload_unsupported("offload", machine)
            if reason is not None:
                return reason
            if self.fsdp_version == 2:
                return (
                    "with FSDP2, the gradient norm of offloaded shards needs gloo in addition to NCCL: give "
                    "fsdp_version=1"
                )
        if self._sharding is not None and self._sharding.startswith("hybrid_shard"):
            return sharding.hybrid_within_nodes_unsupported(self._sharding, case, machine)
        return self._degrees.unsupported(case, machine)

    def check(self, case: Case) -> None:
        self._degrees.check(case)

    def dry(self, case: Case) -> DryPlan:
        offloads = "offload" in self.fsdp.split()
        return self._degrees.dry_plan(ranks_differ=self.fsdp_version == 1, offloads=offloads)

    def expected(self, case: Case) -> dict[str, str]:
        low = float8.expected(self.float8, case, kept=1, gathered=self.fsdp != "")
        if self._sharding is None:
            return {"wrapper": "DistributedDataParallel", **low}
        if self.fsdp_version == 2:
            return {"wrapper": "FSDPModule", **self._degrees.expected(), **low}
        return {"wrapper": "FullyShardedDataParallel", "sharding": SHARDINGS[self._sharding]}

    def load(self, case: Case, device: Any) -> None:
        import transformers.trainer  # noqa: F401

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build a Trainer on synthetic data. Its `train` wraps the model and creates the optimizer."""
        import torch
        import transformers
        from accelerate import FullyShardedDataParallelPlugin

        from perfsuite.frameworks.common.model import build_optimizer, synthetic_batches

        on_cpu = ranks.device.type == "cpu"
        clear_environment()
        if self.float8 is not None:
            os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"  # TrainingArguments has no field for fp8
        directory = tempfile.TemporaryDirectory()
        degrees = self._degrees
        parallelism = self._degrees.config()
        given = {} if on_cpu or parallelism is None else {"parallelism_config": parallelism}
        arguments = transformers.TrainingArguments(
            directory.name, **self._arguments(case, on_cpu=on_cpu), **given
        )
        # The Trainer itself applies activation checkpointing, and moves batches to the device.
        plain = case.replace(activation_checkpointing="none")
        model: Any = degrees.model(plain, parallelism, ranks.device)
        data_rank = ranks.rank // degrees.alike
        data_parallel = ranks.world_size // degrees.alike
        data = _Data(synthetic_batches(case, data_rank, torch.device("cpu")), case, data_rank, data_parallel)
        micro_losses = _keep_losses(model)
        # Do not use the Trainer's own AdamW. Unlike AdamW in the other frameworks, it does not apply weight
        # decay to norms and biases.
        optimizer: Any = lambda: partial(build_optimizer, case)  # noqa: E731
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, optimizer_cls_and_kwargs=(optimizer, {})
        )
        settings = {"gradient_norm": "computed in each step, not clipped", **degrees.patch()}
        settings |= degrees.observed(trainer.accelerator)
        # Set the float8 recipe here. The Trainer would create the same recipe, but would not emulate float8
        # on a CPU. With DDP, it would leave the gathering of weights in float8 turned on.
        if self.float8 is not None:
            recipe = float8.accelerate_recipe(self.float8, ranks.device, gathered=self.fsdp != "")
            trainer.accelerator.ao_recipe_handler = recipe
        if on_cpu and self.fsdp:
            plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)
            settings["forced"] = force_fsdp(trainer.accelerator, plugin, parallelism)
            trainer.is_fsdp_enabled = True
        own: dict[str, float] = {}

        def run(steps: int) -> list[Any]:
            with directory:
                own.update(trainer.train().metrics)
            return list(torch.stack(micro_losses).reshape(steps, case.gradient_accumulation).mean(1))

        return Workload(
            run=run,
            data_parallel=data_parallel,
            settings=settings,
            own_tokens_per_s=lambda: own["train_samples_per_second"] * case.sample_length,
        )

    def _arguments(self, case: Case, *, on_cpu: bool) -> dict[str, Any]:
        mode = case.activation_checkpointing
        interval = {"every_n_layers": int(mode.removeprefix("every-"))} if mode.startswith("every-") else {}
        arguments: dict[str, Any] = {
            "max_steps": case.total_steps,
            "per_device_train_batch_size": case.micro_batch,
            "gradient_accumulation_steps": case.gradient_accumulation,
            "gradient_checkpointing": mode != "none",
            "gradient_checkpointing_kwargs": {"use_reentrant": False, **interval},
            "bf16": case.precision == "bf16-mixed" and self.float8 is None,
            "use_cpu": on_cpu,
            "seed": case.seed,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "train_sampling_strategy": "sequential",
            # Before the end, the Trainer must not log or save anything, and must not read from the device.
            "logging_strategy": "no",
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        if self.fsdp:
            config: dict[str, Any] = {"version": self.fsdp_version}
            if on_cpu and self.fsdp_version == 1:
                config["sync_module_states"] = False
            arguments |= {"fsdp": self.fsdp, "fsdp_config": config}
        return arguments


class _Data:
    """The samples of all ranks, in the Trainer's order. The Trainer reads only the samples of this rank."""

    def __init__(self, batches: list[Any], case: Case, rank: int, ranks: int) -> None:
        self._batches = batches
        self._case = case
        self._rank = rank
        self._ranks = ranks

    def __len__(self) -> int:
        case = self._case
        return case.total_steps * case.gradient_accumulation * case.micro_batch * self._ranks

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch, row = divmod(index, self._case.micro_batch)
        turn, rank = divmod(batch, self._ranks)
        assert rank == self._rank, "the Trainer distributes samples in a different order"
        tokens = self._batches[turn % len(self._batches)][row]
        return {"input_ids": tokens, "labels": tokens}


def _keep_losses(model: Any) -> list[Any]:
    """Make the model append the loss of each micro-batch to a list, and return this list.

    Each loss is a tensor on the device: the mean over the tokens of the micro-batch.
    """
    losses = OwnList[Any]()

    def keep(module: Any, args: Any, inputs: dict[str, Any], output: Any) -> None:
        loss = output.loss.detach()
        items = inputs.get("num_items_in_batch")
        # The Trainer makes the model divide the loss by the number of tokens in all micro-batches of all
        # ranks.
        if items is not None:
            loss = loss * (items / inputs.get("shift_labels", inputs["labels"][:, 1:]).numel())
        losses.append(loss)

    model.register_forward_hook(keep, with_kwargs=True)
    return losses
