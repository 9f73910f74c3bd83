"""nanotron 0.4: data, tensor and pipeline parallelism, its own Llama, trainer and configuration file.

nanotron draws the initial weights itself, differently in each layout. It is fed our tokens, and its loss is
the mean over the same positions as everywhere. `perfsuite.frameworks.nanotron.compat` says what is changed
to run it.
"""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from perfsuite.case.framework import changed_fields
from perfsuite.documents import write_text
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import Framework, LaunchPlan, Ranks, StepClock, Workload
from perfsuite.frameworks.nanotron import config as nanotron_config
from perfsuite.frameworks.nanotron.config import VERSION

if TYPE_CHECKING:
    from torch import Tensor

    from perfsuite.case.case import Case
    from perfsuite.case.hardware import Machine

STEPS_BEFORE_RESUME = 2
"""Steps before the checkpoint that `resume` starts from."""
PARALLELISM = ("dp", "tp", "pp", "tp_mode", "tp_linear_async_communication", "pp_engine")
"""Options that stand in nanotron's section `parallelism`."""


class Nanotron(Framework):
    """Options of nanotron's configuration file by their names there; or such a file."""

    name: ClassVar[str] = "nanotron"
    packages: ClassVar[tuple[str, ...]] = ("nanotron",)

    dp: int = Field(default=1, ge=1, strict=True)
    tp: int = Field(default=1, ge=1, strict=True)
    pp: int = Field(default=1, ge=1, strict=True)
    """Data, tensor and pipeline parallel processes: dp x tp x pp is the world size."""
    tp_mode: Literal["ALL_REDUCE", "REDUCE_SCATTER"] = "ALL_REDUCE"
    """REDUCE_SCATTER splits the sequence between tensor parallel regions (sequence parallelism)."""
    tp_linear_async_communication: bool = False
    """Overlap tensor parallel communication with the matmuls."""
    pp_engine: Literal["1f1b", "afab"] = "1f1b"
    """Pipeline schedule: one forward, one backward; or all forward, all backward."""
    zero_stage: Literal[0, 1] = 0
    """1: each data parallel process keeps its share of the optimizer's state."""
    accumulate_grad_in_fp32: bool = False
    """Keep gradients and the optimizer's copy of the bf16 parameters in fp32."""
    log_interval: int | None = Field(default=None, ge=1, strict=True)
    """Steps between two lines that nanotron logs. Each line costs a barrier and a synchronisation.
    None: no line in the measured steps."""
    resume: bool = False
    """Train two steps, save, build everything anew from the checkpoint, and measure from there."""
    config: Annotated[
        nanotron_config.TrainingConfig | None,
        BeforeValidator(lambda value: _read(value) if isinstance(value, str | Path) else value),
    ] = None
    """Path of a configuration file, read when the case is made and taken as it is, instead of all other
    options. Training ends after the case's steps; `data` and `tokenizer` are not read."""

    @model_validator(mode="after")
    def _one_source(self) -> Nanotron:
        others = changed_fields(self, skip=frozenset({"config"}))
        if self.config is not None and others:
            raise ValueError(f"config {self.config.name} decides everything: leave out {', '.join(others)}")
        return self

    def slug(self) -> str:
        """Return the id's part: name and changed options, or the name of the file."""
        return f"{self.name}-{self.config.name}" if self.config is not None else super().slug()

    def plan(self, case: Case) -> LaunchPlan:
        """Ranks connect lazily, as in nanotron's own launch, because its pipeline sends without batching.

        Overlapped tensor parallelism counts on one queue of work to the device.
        """
        is_overlapped = self.tp_linear_async_communication
        if self.config is not None:
            is_overlapped = nanotron_config.get(
                self.config.fields, "parallelism.tp_linear_async_communication"
            )
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_overlapped else {}
        return LaunchPlan(environment=environment, process_group="lazy")

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Return what nanotron 0.4 does not have, of what the case needs."""
        if (version := importlib.metadata.version("nanotron")) != VERSION:
            return f"it needs nanotron {VERSION}, {version} is installed: pip install nanotron=={VERSION}"
        if case.precision not in nanotron_config.DTYPES:
            return (
                f"nanotron has no precision {case.precision}: choose fp32 or bf16 (with "
                "accumulate_grad_in_fp32, parameters are kept in fp32 as well)"
            )
        if case.activation_checkpointing != "none":
            return f"nanotron {VERSION} recomputes nothing: no activation_checkpointing"
        if case.attention == "eager":
            return "nanotron has flash_attention_2, and sdpa in its place: no attention 'eager'"
        if case.compile:
            return "nanotron is not compiled here: its blocks communicate"
        return nanotron_config.cannot_build(case.model)

    def check(self, case: Case) -> None:
        """Raise `CaseError` for sizes that do not fit, and for a file that contradicts the case."""
        if case.precision not in nanotron_config.DTYPES:
            return  # `unsupported` says so
        config = self.configuration(case)
        problems = nanotron_config.size_problems(config, case)
        if self.config is not None:
            problems += nanotron_config.conflicts(config, self.from_options(case), case)
        if problems:
            raise CaseError(f"{self.slug()}: {'; '.join(problems)}")

    def expected(self, case: Case) -> dict[str, str | None]:
        """Return the layout that process groups and modules must have."""
        config = self.configuration(case)
        get = nanotron_config.get
        dp, zero = get(config, "parallelism.dp"), get(config, "optimizer.zero_stage")
        in_fp32 = get(config, "optimizer.accumulate_grad_in_fp32")
        expected: dict[str, str | None] = {
            "parallelism": _layout(*(get(config, f"parallelism.{name}") for name in ("dp", "tp", "pp"))),
            "wrapper": "DistributedDataParallel" if dp > 1 and not (in_fp32 and zero) else "none",
            "sharding": "optimizer (ZeRO 1)" if zero else "none",
            "gradient_dtype": "float32" if in_fp32 else nanotron_config.DTYPES[case.precision],
            "tp_mode": str(get(config, "parallelism.tp_mode") or "ALL_REDUCE").upper(),
            "pp_engine": get(config, "parallelism.pp_engine") or "afab",
        }
        if zero or in_fp32:
            expected["optimizer_parameters"] = None  # slices or copies of the model's
        return expected

    def load(self, case: Case, device: Any) -> None:
        """Import nanotron, with the changes that `compat` makes."""
        _load(case, device)

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build nanotron's trainer from a file in the launch's directory: the options' or the user's."""
        patched = _load(case, ranks.device)  # imported already: this only returns what was changed
        on_gpu = ranks.device.type == "cuda"
        config = self.configuration(case, files=ranks.directory, fused_adam=on_gpu)
        if self.resume:
            trainer, batches = _resumed(case, config, ranks)
        else:
            text = _yaml(config) if self.config is None else self.config.text
            trainer = _trainer(_write(text, ranks, "nanotron.yaml"))
            batches = _micro_batches(case, trainer, ranks)
        begun_at = trainer.start_iteration_step
        trainer.config.tokens.train_steps = begun_at + case.total_steps

        def run(steps: int) -> list[Tensor]:
            trainer.train(batches)
            return _losses_on_every_rank(trainer, ranks)

        def own_tokens_per_s() -> float | None:
            first = begun_at + case.max_warmup_steps
            measured = [tokens_per_s for step, tokens_per_s in trainer.tokens_per_s if step > first]
            return median(measured) if measured else None

        settings = {**_settings(trainer), "patched": patched}
        if self.config is not None:
            settings["config_sha256"] = self.config.digest
        return Workload(
            run=run,
            data_parallel=trainer.parallel_context.dp_pg.size(),
            model=trainer.model,
            settings=settings,
            own_tokens_per_s=own_tokens_per_s,
        )

    def configuration(
        self, case: Case, *, files: Path = Path(), fused_adam: bool = False
    ) -> nanotron_config.Config:
        """Return the fields of the user's file, or of the configuration that the options make."""
        if self.config is not None:
            return self.config.fields
        return self.from_options(case, files=files, fused_adam=fused_adam)

    def from_options(
        self, case: Case, *, files: Path = Path(), fused_adam: bool = False
    ) -> nanotron_config.Config:
        """Return the configuration that the options make of `case`; `files`: directory of checkpoints."""
        return nanotron_config.from_case(
            case,
            {name: getattr(self, name) for name in PARALLELISM},
            zero_stage=self.zero_stage,
            accumulate_grad_in_fp32=self.accumulate_grad_in_fp32,
            log_interval=self.log_interval,
            files=files,
            fused_adam=fused_adam,
        )


def _load(case: Case, device: Any) -> str:
    """Import nanotron once; return in a few words what was changed in it."""
    from perfsuite.frameworks.nanotron import compat

    return compat.load(cpu=device.type == "cpu", flash_attn=case.attention == "flash_attention_2")


def _resumed(
    case: Case, config: nanotron_config.Config, ranks: Ranks
) -> tuple[Any, Iterator[dict[str, Any]]]:
    """Train and save with one trainer; return a second one, made from that checkpoint, and the data left."""
    import torch.distributed as dist

    before, after = copy.deepcopy(config), copy.deepcopy(config)
    before["tokens"]["train_steps"] = before["checkpoints"]["checkpoint_interval"] = STEPS_BEFORE_RESUME
    after["tokens"]["train_steps"] += STEPS_BEFORE_RESUME
    after["checkpoints"]["resume_checkpoint_path"] = config["checkpoints"]["checkpoints_path"]
    trainer = _trainer(_write(_yaml(before), ranks, "nanotron-before.yaml"))
    batches = _micro_batches(case, trainer, ranks)
    trainer.train(batches)
    del trainer  # before the next one takes as much memory
    trainer = _trainer(_write(_yaml(after), ranks, "nanotron.yaml"))
    dist.barrier()  # all have loaded
    if ranks.rank == 0:
        shutil.rmtree(config["checkpoints"]["checkpoints_path"])
    return trainer, batches


def _read(path: str | Path) -> nanotron_config.TrainingConfig:
    return nanotron_config.TrainingConfig.read(Path(path))


def _yaml(config: nanotron_config.Config) -> str:
    import yaml

    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


def _write(text: str, ranks: Ranks, name: str) -> Path:
    """Write a file into the launch's directory, by rank 0, for every rank to read."""
    import torch.distributed as dist

    file = ranks.directory / name
    if ranks.rank == 0:
        write_text(file, text)
    dist.barrier()
    return file


def _trainer(file: Path) -> Any:
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

    return Trainer(str(file))


def _micro_batches(case: Case, trainer: Any, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """Yield our tokens on the pipeline stages that need them. A position's label is the token after it."""
    import torch
    import torch.distributed as dist
    from nanotron.parallel.pipeline_parallel.tensor_pointer import TensorPointer

    from perfsuite.frameworks.common.model import synthetic_batches

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


def _losses_on_every_rank(trainer: Any, ranks: Ranks) -> list[Tensor]:
    """Return the loss of each step on every rank. Only the last pipeline stage has it: the others add 0."""
    import torch
    import torch.distributed as dist

    zero = torch.zeros((), device=ranks.device)
    losses = torch.stack([zero if loss is None else loss for loss in trainer.losses])
    dist.all_reduce(losses, group=trainer.parallel_context.pp_pg)
    return list(losses)


def _settings(trainer: Any) -> dict[str, str]:
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
        "parallelism": _layout(context.dp_pg.size(), context.tp_pg.size(), context.pp_pg.size()),
        "sharding": "optimizer (ZeRO 1)" if is_zero else "none",
        "gradient_dtype": str(gradients.dtype).removeprefix("torch."),
        "tp_mode": linear.mode.name,
        "tp_linear_async_communication": str(linear.async_communication),
        "pp_engine": cast_pipeline_engine_to_str(trainer.config.parallelism.pp_engine),
        "attention": "flash_attention_2" if is_real else "sdpa",
        "rope": "theta 10000, unscaled",
    }


def _layout(dp: int, tp: int, pp: int) -> str:
    return f"dp {dp} x tp {tp} x pp {pp}"
