"""nanotron 0.4: data, tensor and pipeline parallelism, its own Llama, trainer and configuration file.

It draws initial weights itself, another set in each layout. `compat` says what is changed to run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import DryPlan, Framework, LaunchPlan, Ranks, StepClock, Workload
from perfsuite.frameworks.common.llama import cannot_build
from perfsuite.frameworks.nanotron.config import DTYPES, from_case, layout_text, size_problems

if TYPE_CHECKING:
    from torch import Tensor


class Nanotron(Framework):
    """Options of nanotron's configuration file, by their names there."""

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
    resume: bool = False
    """Train two steps, save, build everything anew from the checkpoint, and measure from there."""

    def plan(self, case: Case) -> LaunchPlan:
        """Ranks connect lazily, as in nanotron's own launch, because its pipeline sends without batching.

        Overlapped tensor parallelism counts on one queue of work to the device.
        """
        is_overlapped = self.tp_linear_async_communication
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_overlapped else {}
        return LaunchPlan(environment=environment, process_group="lazy")

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        return cannot_build("nanotron", case.model)

    def check(self, case: Case) -> None:
        if problems := [*size_problems(case, self.model_dump())]:
            raise CaseError(f"{self.slug()}: {'; '.join(problems)}")

    def dry(self, case: Case) -> DryPlan:
        if self.resume:
            return DryPlan(impossible="a checkpoint holds values, and there are none")
        if self.accumulate_grad_in_fp32:
            return DryPlan(impossible="accumulate_grad_in_fp32 cuts a storage, which fake tensors lack")
        if self.pp > 1:
            return DryPlan(impossible="the stages of a pipeline tell each other shapes, and here is only one")
        # ZeRO 1: each rank keeps its own share of the optimizer's state.
        return DryPlan(pretend=_pretend, ranks_differ=bool(self.zero_stage))

    def expected(self, case: Case) -> dict[str, str | None]:
        zero, in_fp32 = self.zero_stage, self.accumulate_grad_in_fp32
        expected: dict[str, str | None] = {
            "parallelism": layout_text(self.dp, self.tp, self.pp),
            "wrapper": "DistributedDataParallel" if self.dp > 1 and not (in_fp32 and zero) else "none",
            "sharding": "optimizer (ZeRO 1)" if zero else "none",
            "gradient_dtype": "float32" if in_fp32 else DTYPES[case.precision],
            "tp_mode": self.tp_mode,
            "pp_engine": self.pp_engine,
        }
        if zero or in_fp32:
            expected["optimizer_parameters"] = None  # slices or copies of the model's
        return expected

    def load(self, case: Case, device: Any) -> None:
        _load(case, device)

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build nanotron's trainer from a configuration file in the launch's directory."""
        from perfsuite.frameworks.common.model import transformers_config
        from perfsuite.frameworks.nanotron import trainer as own

        transformers_config(case.model)  # refuses what no Llama has, which would be left out
        patched = _load(case, ranks.device)  # imported already: this only returns what was changed
        on_gpu = ranks.device.type == "cuda"
        config = from_case(case, self.model_dump(), files=ranks.directory, fused_adam=on_gpu)
        trainer, batches = (own.resumed if self.resume else own.started)(case, config, ranks)
        trainer.config.tokens.train_steps = trainer.start_iteration_step + case.total_steps

        def run(steps: int) -> list[Tensor]:
            trainer.train(batches)
            return own.losses_on_every_rank(trainer, ranks)

        return Workload(
            run=run,
            data_parallel=trainer.parallel_context.dp_pg.size(),
            model=trainer.model,
            settings={**own.settings_of(trainer), "patched": patched},
        )


def _load(case: Case, device: Any) -> str:
    """Import nanotron once; return in a few words what was changed in it."""
    from perfsuite.frameworks.nanotron import compat

    return compat.load(cpu=device.type == "cpu", flash_attn=case.attention == "flash_attention_2")


def _pretend() -> None:
    from perfsuite.frameworks.nanotron import trainer

    trainer.pretend()
