"""nanotron 0.4: data, tensor and pipeline parallelism, with its own Llama, trainer and configuration file.

nanotron creates the initial weights itself, and these weights depend on the degrees of parallelism. nanotron
0.4 does not run as released. `compat` lists the changes that it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises, changed_fields
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import (
    DryPlan,
    Framework,
    LaunchPlan,
    Library,
    Ranks,
    StepClock,
    Workload,
)
from perfsuite.frameworks.common.llama import cannot_build
from perfsuite.frameworks.nanotron.config import (
    DTYPES,
    Config,
    TrainingConfig,
    conflicts,
    from_case,
    get,
    layout_text,
    size_problems,
)

if TYPE_CHECKING:
    from torch import Tensor


class Nanotron(Framework):
    """Either the path of a configuration file of nanotron, or options with the names from such a file."""

    name: ClassVar[str] = "nanotron"
    packages: ClassVar[tuple[str, ...]] = ("nanotron",)
    promises: ClassVar[Promises] = Promises(
        takes={
            "precision": tuple(DTYPES),
            "activation_checkpointing": ("none",),
            "attention": ("sdpa", "flash_attention_2"),
            "compile": (False,),
        }
    )
    library: ClassVar[Library] = Library(
        events={
            "nanotron.serialize.main:save": "save checkpoint",
            "nanotron.serialize.main:load": "load checkpoint",
        },
        clips=("nanotron.trainer:clip_grad_norm",),
    )

    dp: int = Field(default=1, ge=1, strict=True)
    tp: int = Field(default=1, ge=1, strict=True)
    pp: int = Field(default=1, ge=1, strict=True)
    """Degrees of data, tensor and pipeline parallelism. Their product must be the world size."""
    tp_mode: Literal["ALL_REDUCE", "REDUCE_SCATTER"] = "ALL_REDUCE"
    """With REDUCE_SCATTER, ranks also split the sequence, in the parts of the model that are between the
    tensor-parallel layers (sequence parallelism)."""
    tp_linear_async_communication: bool = False
    """Overlap tensor-parallel communication with the matmuls."""
    pp_engine: Literal["1f1b", "afab"] = "1f1b"
    """Pipeline schedule. `1f1b`: one forward, one backward. `afab`: all forwards, then all backwards."""
    zero_stage: Literal[0, 1] = 0
    """With 1, each data-parallel process keeps only its share of the optimizer state."""
    accumulate_grad_in_fp32: bool = False
    """Keep gradients and the optimizer's copy of the bf16 parameters in fp32."""
    resume: bool = False
    """Train two steps, save a checkpoint, rebuild everything from the checkpoint, and only then measure."""
    config: TrainingConfig | None = None
    """Path of a configuration file, which is read when the case is created. It cannot be combined with any
    other option. The file is used unchanged, except that training ends after the case's steps, and that
    `data` and `tokenizer` are ignored."""

    @model_validator(mode="after")
    def _one_source(self) -> Nanotron:
        others = changed_fields(self, skip=frozenset({"config"}))
        if self.config is not None and others:
            raise ValueError(f"config {self.config.name} sets all options: remove {', '.join(others)}")
        return self

    def slug(self) -> str:
        return f"{self.name}-{self.config.name}" if self.config is not None else super().slug()

    def plan(self, case: Case) -> LaunchPlan:
        """Return the plan.

        Ranks connect lazily, as with nanotron's own launcher. nanotron does not batch its sends. If ranks
        connected eagerly, torch would serialise such sends with all other communication of the group.
        Overlapped tensor-parallel communication needs a single hardware queue to the GPU.
        """
        is_overlapped = self.tp_linear_async_communication
        if self.config is not None:
            is_overlapped = get(self.config.content, "parallelism.tp_linear_async_communication")
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_overlapped else {}
        return LaunchPlan(environment=environment, process_group="lazy")

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        return cannot_build("nanotron", case.model)

    def check(self, case: Case) -> None:
        if case.precision not in DTYPES:
            return  # `promises` excludes this precision, so the case is refused anyway
        config = self.configuration(case)
        problems = [*size_problems(config, case)]
        if self.config is not None:
            problems += conflicts(config, self.from_options(case), case)
        if problems:
            raise CaseError(f"{self.slug()}: {'; '.join(problems)}")

    def dry(self, case: Case) -> DryPlan:
        if self.resume:
            return DryPlan(impossible="resuming needs the values of a checkpoint, and fake tensors have none")
        config = self.configuration(case)
        if get(config, "optimizer.accumulate_grad_in_fp32"):
            return DryPlan(impossible="accumulate_grad_in_fp32 slices storages, which fake tensors lack")
        if get(config, "parallelism.pp") > 1:
            return DryPlan(impossible="pipeline stages exchange shapes, but a dry run has only one stage")
        # With ZeRO 1, each rank keeps its own share of the optimizer state.
        return DryPlan(pretend=_pretend, ranks_differ=bool(get(config, "optimizer.zero_stage")))

    def expected(self, case: Case) -> dict[str, str | None]:
        config = self.configuration(case)
        dp, tp, pp = (get(config, f"parallelism.{name}") for name in ("dp", "tp", "pp"))
        zero = get(config, "optimizer.zero_stage")
        in_fp32 = get(config, "optimizer.accumulate_grad_in_fp32")
        expected: dict[str, str | None] = {
            "parallelism": layout_text(dp, tp, pp),
            "wrapper": "DistributedDataParallel" if dp > 1 and not (in_fp32 and zero) else "none",
            "sharding": "optimizer (ZeRO 1)" if zero else "none",
            "gradient_dtype": "float32" if in_fp32 else DTYPES[case.precision],
            "tp_mode": str(get(config, "parallelism.tp_mode") or "ALL_REDUCE").upper(),
            "pp_engine": get(config, "parallelism.pp_engine") or "afab",
        }
        if zero or in_fp32:
            # This cannot be checked, because the optimizer holds slices or copies of the model's parameters.
            expected["optimizer_parameters"] = None
        return expected

    def load(self, case: Case, device: Any) -> None:
        _load(case, device)

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build nanotron's trainer from the options or from the user's file."""
        from perfsuite.frameworks.common.model import transformers_config
        from perfsuite.frameworks.nanotron import trainer as nanotron_trainer

        transformers_config(case.model)  # rejects keys that Llama does not have, which nanotron would ignore
        patched = _load(case, ranks.device)  # nanotron is already imported, so this only lists the changes
        if self.config is not None:
            trainer, batches = nanotron_trainer.started(case, self.config.text, ranks)
        else:
            config = self.from_options(case, ranks.directory, fused_adam=ranks.device.type == "cuda")
            start = nanotron_trainer.resumed if self.resume else nanotron_trainer.started
            trainer, batches = start(case, config, ranks)
        trainer.config.tokens.train_steps = trainer.start_iteration_step + case.total_steps

        def run(steps: int) -> list[Tensor]:
            trainer.train(batches)
            return nanotron_trainer.losses_on_every_rank(trainer, ranks)

        settings = {**nanotron_trainer.settings_of(trainer), "patched": patched}
        if self.config is not None:
            settings["config_sha256"] = self.config.digest
        return Workload(
            run=run,
            data_parallel=trainer.parallel_context.dp_pg.size(),
            model=trainer.model,
            settings=settings,
        )

    def configuration(self, case: Case) -> Config:
        """Return the content of the user's file or, if there is none, a configuration from the options."""
        return self.from_options(case) if self.config is None else self.config.content

    def from_options(self, case: Case, files: Path = Path(), *, fused_adam: bool = False) -> Config:
        """Return the configuration of `case` with these options. `files` is the directory of the launch."""
        return from_case(case, self.model_dump(exclude={"config"}), files=files, fused_adam=fused_adam)


def _load(case: Case, device: Any) -> str:
    """Import nanotron, unless it has been imported. Return a short list of the changes made to it."""
    from perfsuite.frameworks.nanotron import compat

    return compat.load(cpu=device.type == "cpu", flash_attn=case.attention == "flash_attention_2")


def _pretend() -> None:
    from perfsuite.frameworks.nanotron import trainer

    trainer.pretend()
