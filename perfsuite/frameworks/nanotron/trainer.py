"""Train a case with nanotron's own trainer, on perfsuite's tokens. Import this after `compat.load`."""

import copy
import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from perfsuite.case.case import Case
from perfsuite.documents import write_text
from perfsuite.frameworks.base import Ranks
from perfsuite.frameworks.common import pretend as wrappers
from perfsuite.frameworks.common.model import synthetic_batches
from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.frameworks.common.patches import module, replace
from perfsuite.frameworks.common.private import FakeTensor
from perfsuite.frameworks.nanotron.config import Config, layout_text

STEPS_BEFORE_RESUME = 2


def started(case: Case, config: Config | str, ranks: Ranks) -> tuple[Any, Iterator[dict[str, Any]]]:
    """Return a trainer and its data. `config` is a configuration or the text of a configuration file."""
    trainer = _new_trainer(config, ranks)
    return trainer, _micro_batches(case, trainer, ranks)


def resumed(case: Case, config: Config, ranks: Ranks) -> tuple[Any, Iterator[dict[str, Any]]]:
    """Train with one trainer and save a checkpoint. Return a new trainer that resumes from this checkpoint.

    Also return the data for this trainer. The data continue where the first trainer stopped.
    """
    before = copy.deepcopy(config)
    after = copy.deepcopy(config)
    before["tokens"]["train_steps"] = before["checkpoints"]["checkpoint_interval"] = STEPS_BEFORE_RESUME
    after["tokens"]["train_steps"] += STEPS_BEFORE_RESUME
    after["checkpoints"]["resume_checkpoint_path"] = config["checkpoints"]["checkpoints_path"]
    trainer = _new_trainer(before, ranks, "nanotron-before.yaml")
    batches = _micro_batches(case, trainer, ranks)
    trainer.train(batches)
    del trainer  # free its memory: the next trainer needs the same amount
    trainer = _new_trainer(after, ranks)
    dist.barrier()  # wait until all ranks have loaded the checkpoint
    if ranks.rank == 0:
        shutil.rmtree(config["checkpoints"]["checkpoints_path"])
    return trainer, batches


def _new_trainer(config: Config | str, ranks: Ranks, name: str = "nanotron.yaml") -> Any:
    """Write a configuration to the directory of the launch, and return a trainer with this configuration.

    All ranks write the same file.
    """
    from nanotron.trainer import DistributedTrainer

    class Trainer(DistributedTrainer):  # type: ignore[misc]
        """nanotron's trainer, changed so that it keeps the loss of each step on the device."""

        def __init__(self, file: str) -> None:
            super().__init__(file)
            self.losses = OwnList[Tensor | None]()

        def training_step(self, dataloader: Any) -> Any:
            outputs, loss = super().training_step(dataloader)
            self.losses.append(loss)
            return outputs, loss

    file = ranks.directory / name
    write_text(file, config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
    return Trainer(str(file))


def _micro_batches(case: Case, trainer: Any, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Yield perfsuite's tokens on the pipeline stages that need them. A token's label is the next token."""
    from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer

    context = trainer.parallel_context
    model = trainer.unwrapped_model
    stage = dist.get_rank(context.pp_pg)
    elsewhere_first = TensorPointer(model.input_pp_rank)
    elsewhere_last = TensorPointer(model.output_pp_rank)
    made = []
    for tokens in synthetic_batches(case, dist.get_rank(context.dp_pg), ranks.device):
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        has_successor = everywhere.clone()
        has_successor[:, -1] = False
        is_first = stage == model.input_pp_rank
        is_last = stage == model.output_pp_rank
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
    """Return the loss of each step, on every rank.

    Only the last pipeline stage has losses. The other stages add 0 in an all-reduce.
    """
    zero = torch.zeros((), device=ranks.device)
    losses = torch.stack([zero if loss is None else loss for loss in trainer.losses])
    dist.all_reduce(losses, group=trainer.parallel_context.pp_pg)
    return list(losses)


def settings_of(trainer: Any) -> dict[str, str]:
    """Return the settings that the process groups, the modules and the optimizer show."""
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


# Functions for a dry run.


def pretend() -> None:
    """Make nanotron train with fake tensors for the rest of this process. Import nanotron before this."""
    wrappers.ddp()
    _keep_parameters()
    replace(module("nanotron.models.base"), "init_on_device_and_dtype", _on_device)
    replace(module("nanotron.helpers"), "get_synced_random_state", lambda random_state, pg: random_state)


def _keep_parameters() -> None:
    """Make `NanotronParameter(fake_tensor)` return a fake tensor that is also a `NanotronParameter`."""
    real = module("nanotron.parallel.parameters").NanotronParameter
    own = ("__new__", "__dict__", "__weakref__")
    kept = {name: value for name, value in vars(real).items() if name not in own}
    fake = type("FakeNanotronParameter", (FakeTensor,), kept)
    metadata = real.NANOTRON_PARAMETER_METADATA_ATTRIBUTE_NAME
    make = real.__new__
    is_instance: Any = type(real).__instancecheck__

    def new(cls: Any, tensor: Any, requires_grad: bool = True) -> Any:
        if not isinstance(tensor, FakeTensor):
            return make(cls, tensor, requires_grad)
        parameter: Any = nn.Parameter(tensor.data.detach(), requires_grad=requires_grad)
        parameter.__class__ = fake
        setattr(parameter, metadata, dict(getattr(tensor, metadata, {})))
        return parameter

    def check(kind: Any, instance: Any) -> bool:
        return is_instance(kind, instance) or (kind is real and isinstance(instance, fake))

    replace(real, "__new__", new)
    replace(type(real), "__instancecheck__", check)


@contextmanager
def _on_device(device: Any = None, dtype: torch.dtype = torch.float) -> Iterator[None]:
    """Do the same as nanotron's function, but do not replace `torch.empty`, which fake tensors need."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        yield
    torch.set_default_dtype(before)
