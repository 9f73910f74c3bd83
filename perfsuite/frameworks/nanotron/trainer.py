"""nanotron's own trainer for a case: its file, our tokens, its losses. Worker side; imports torch.

It imports nanotron when used, after `perfsuite.frameworks.nanotron.compat.load`.
"""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from perfsuite.case.case import Case
from perfsuite.documents import write_text
from perfsuite.frameworks.base import Ranks
from perfsuite.frameworks.common.model import synthetic_batches
from perfsuite.frameworks.nanotron.config import Config, layout_text

STEPS_BEFORE_RESUME = 2
"""Steps before the checkpoint that `resume` starts from."""


def started(case: Case, config: Config | str, ranks: Ranks) -> tuple[Any, Iterator[dict[str, Any]]]:
    """Return a trainer of a configuration, or of the text of one, and the data."""
    trainer = _new_trainer(config, ranks)
    return trainer, _micro_batches(case, trainer, ranks)


def resumed(case: Case, config: Config, ranks: Ranks) -> tuple[Any, Iterator[dict[str, Any]]]:
    """Train and save with one trainer; return a second one, made from that checkpoint, and the data left."""
    before, after = copy.deepcopy(config), copy.deepcopy(config)
    before["tokens"]["train_steps"] = before["checkpoints"]["checkpoint_interval"] = STEPS_BEFORE_RESUME
    after["tokens"]["train_steps"] += STEPS_BEFORE_RESUME
    after["checkpoints"]["resume_checkpoint_path"] = config["checkpoints"]["checkpoints_path"]
    trainer = _new_trainer(before, ranks, "nanotron-before.yaml")
    batches = _micro_batches(case, trainer, ranks)
    trainer.train(batches)
    del trainer  # before the next one takes as much memory
    trainer = _new_trainer(after, ranks)
    dist.barrier()  # all have loaded
    if ranks.rank == 0:
        shutil.rmtree(config["checkpoints"]["checkpoints_path"])
    return trainer, batches


def _new_trainer(config: Config | str, ranks: Ranks, name: str = "nanotron.yaml") -> Any:
    """Write a configuration into the launch's directory, by rank 0; return every rank's trainer of it."""
    from nanotron.trainer import DistributedTrainer

    class Trainer(DistributedTrainer):  # type: ignore[misc]
        """Keeps each step's loss, on the device, and the tokens/s that nanotron logs."""

        def setup_log_writers(self) -> Any:
            self.losses: list[Tensor | None] = []
            self.tokens_per_s: list[tuple[int, float]] = []
            return None if super().setup_log_writers() is None else self

        def add_scalars_from_list(self, items: list[Any], step: int) -> None:
            self.tokens_per_s += [(step, item.scalar_value) for item in items if item.tag == "tokens_per_sec"]

        def training_step(self, dataloader: Any) -> Any:
            outputs, loss = super().training_step(dataloader)
            self.losses.append(loss)
            return outputs, loss

    file = ranks.directory / name
    if _writes(ranks):
        write_text(file, config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
    dist.barrier()
    return Trainer(str(file))


def _writes(ranks: Ranks) -> bool:
    """Whether this rank writes what all read."""
    return ranks.rank == 0


def _micro_batches(case: Case, trainer: Any, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Yield our tokens on the pipeline stages that need them. A position's label is the token after it."""
    from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer

    context, model = trainer.parallel_context, trainer.unwrapped_model
    stage = dist.get_rank(context.pp_pg)
    elsewhere_first, elsewhere_last = TensorPointer(model.input_pp_rank), TensorPointer(model.output_pp_rank)
    made = []
    for tokens in synthetic_batches(case, dist.get_rank(context.dp_pg), ranks.device):
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        has_successor = everywhere.clone()
        has_successor[:, -1] = False
        is_first, is_last = stage == model.input_pp_rank, stage == model.output_pp_rank
        made.append(
            {
                "input_ids": tokens if is_first else elsewhere_first,
                "input_mask": everywhere if is_first else elsewhere_first,
                "label_ids": tokens.roll(-1, dims=1) if is_last else elsewhere_last,
                "label_mask": has_successor if is_last else elsewhere_last,
            }
        )
    return itertools.cycle(made)


def losses_on_every_rank(trainer: Any, ranks: Ranks) -> list[Tensor]:
    """Return the loss of each step on every rank. Only the last pipeline stage has it: the others add 0."""
    zero = torch.zeros((), device=ranks.device)
    losses = torch.stack([zero if loss is None else loss for loss in trainer.losses])
    dist.all_reduce(losses, group=trainer.parallel_context.pp_pg)
    return list(losses)


def settings_of(trainer: Any) -> dict[str, str]:
    """Return the settings as the process groups, modules and optimizer have them."""
    from nanotron.config.utils_config import cast_pipeline_engine_to_str
    from nanotron.models import llama
    from nanotron.optim.zero import ZeroDistributedOptimizer
    from nanotron.parallel.tensor_parallel.nn import TensorParallelColumnLinear

    context = trainer.parallel_context
    linear = next(m for m in trainer.model.modules() if isinstance(m, TensorParallelColumnLinear))
    is_real = llama.flash_attn_varlen_func.__module__.startswith("flash_attn")
    is_zero = isinstance(trainer.optimizer, ZeroDistributedOptimizer)
    accumulator = trainer.grad_accumulator
    gradients = linear.weight if accumulator is None else accumulator._contiguous_fp32_grad_buffer
    return {
        "parallelism": layout_text(context.dp_pg.size(), context.tp_pg.size(), context.pp_pg.size()),
        "sharding": "optimizer (ZeRO 1)" if is_zero else "none",
        "gradient_dtype": str(gradients.dtype).removeprefix("torch."),
        "tp_mode": linear.mode.name,
        "tp_linear_async_communication": str(linear.async_communication),
        "pp_engine": cast_pipeline_engine_to_str(trainer.config.parallelism.pp_engine),
        "attention": "flash_attention_2" if is_real else "sdpa",
        "rope": "theta 10000, unscaled",
    }
