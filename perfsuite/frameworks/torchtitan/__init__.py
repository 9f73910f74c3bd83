"""torchtitan's own Trainer, for the case's Llama or for a configuration from torchtitan's registry."""

from __future__ import annotations

import importlib.util
import re
from typing import Any, ClassVar

from pydantic import Field, model_validator

from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.framework import Promises, changed_fields
from perfsuite.case.hardware import Machine
from perfsuite.errors import MismatchError
from perfsuite.frameworks import base
from perfsuite.frameworks.base import (
    DryPlan,
    Framework,
    LaunchPlan,
    Library,
    Ranks,
    StepClock,
    Workload,
)
from perfsuite.frameworks.common.llama import USUAL_SHAPE, cannot_build
from perfsuite.frameworks.common.sharding import expected_shards

MIN_TORCH = (2, 13)  # torchtitan 0.3 cannot be imported with torch 2.11, and its backward fails with 2.12
PRECISIONS = ("fp32", "bf16-mixed", "bf16")  # supported precisions. All of them reduce gradients in fp32
ROPES = ("default", "llama3")
OF_REGISTRY = frozenset({"module", "config", "overrides"})
SPLIT_CONTEXT = re.compile(r"--parallelism\.context[-_]parallel[-_]degree=(?!1$)\d+")
"""An override that turns on context parallelism: several ranks split each sequence. torchtitan's kernels for
context parallelism need a GPU. torchtitan accepts hyphens and underscores in the names of options."""
PIPELINE = re.compile("pipeline[-_]parallel[-_]degree")
"""The name of the option that splits the layers into stages, in any of its spellings."""


def why_torch_is_too_old() -> str | None:
    """Return why the installed torch is too old for torchtitan, or None. Does not import torch."""
    if torch_build.release() >= MIN_TORCH:
        return None
    needed = ".".join(map(str, MIN_TORCH))
    return f"torchtitan 0.3 needs torch {needed} or newer, but this is {torch_build.summary()}"


class TorchTitan(Framework):
    """torchtitan's Trainer, with the degrees of parallelism as options.

    FSDP2 shards each replica. The number of its shards is the number of ranks divided by the product of
    `tensor_parallel` and `data_parallel_replicate`.

    Instead of degrees, a case can name a configuration in torchtitan's registry. This configuration then
    determines everything except data, tokenizer, checkpoints and logging.
    """

    name: ClassVar[str] = "torchtitan"
    packages: ClassVar[tuple[str, ...]] = ("torchtitan",)
    library: ClassVar[Library] = Library(
        events={"torchtitan.components.validate:Validator.validate": "evaluate"}
    )
    loss_chunks: ClassVar[int] = 8
    """Number of chunks into which a sequence is split to compute the loss, which saves memory for logits. 8
    is torchtitan's default."""

    tensor_parallel: int = Field(default=1, ge=1, strict=True)
    """Number of ranks that split each layer, with sequence parallelism between the matmuls."""
    data_parallel_replicate: int = Field(default=1, ge=1, strict=True)
    """Number of groups of ranks. The ranks of each group shard one replica of the model (HSDP)."""
    disable_cuda_graphs: bool = True
    """False: forward and backward are captured in a CUDA graph in the second step, and replayed in later
    steps. False is torchtitan's own default. The work of a replay cannot be counted."""
    module: str | None = Field(default=None, pattern=r"^[A-Za-z_][\w.]*$")
    config: str | None = Field(default=None, pattern=r"^[A-Za-z_]\w*$")
    """`--module` and `--config` of torchtitan's command line, such as `"deepseek_v3"` and
    `"deepseek_v3_16b"`."""
    overrides: tuple[str, ...] = ()
    """Further arguments of torchtitan's command line, such as `"--parallelism.expert_parallel_degree=8"`."""

    @model_validator(mode="after")
    def _one_source(self) -> TorchTitan:
        if (self.module is None) != (self.config is None) or (self.overrides and self.config is None):
            raise ValueError("give module and config together; overrides also need them")
        others = changed_fields(self, skip=frozenset({*OF_REGISTRY, "disable_cuda_graphs"}))
        if self.config is not None and others:
            raise ValueError(f"config {self.config} sets all options: remove {', '.join(others)}")
        return self

    @property
    def promises(self) -> Promises:
        if self.config is not None:
            return Promises(builds_model=False)
        return Promises(takes={"precision": PRECISIONS, "attention": ("sdpa",)})

    def slug(self) -> str:
        if self.config is None or self.module is None:
            return super().slug()
        module = [] if self.config.startswith(self.module) else [self.module]
        words = [self.config, *(word.lstrip("-") for word in self.overrides)]
        return "-".join([self.name, *module, *words, *changed_fields(self, skip=OF_REGISTRY)])

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        too_old = why_torch_is_too_old()
        if too_old is not None:
            return too_old
        if not self.disable_cuda_graphs and machine.device == "cpu":
            return "disable_cuda_graphs=False uses CUDA graphs, which need a GPU"
        if machine.device == "cpu" and any(map(SPLIT_CONTEXT.fullmatch, self.overrides)):
            return "torchtitan's context parallelism needs a GPU. Run the case dry, with a simulated GPU"
        if self.config is not None:
            # The ranks check everything else, because these checks import torchtitan and therefore torch,
            # which the driver must not import. torchtitan itself reports a missing torchao, but not a version
            # that is too old.
            has_torchao = importlib.util.find_spec("torchao") is not None
            return base.missing_package("torchao") if has_torchao else None
        ranks = case.topology.world_size
        if ranks % (self.tensor_parallel * self.data_parallel_replicate):
            return (
                f"tensor_parallel={self.tensor_parallel} times data_parallel_replicate="
                f"{self.data_parallel_replicate} must divide the number of processes, {ranks}"
            )
        for name, parts in (("loss in chunks", self.loss_chunks), ("tensor_parallel", self.tensor_parallel)):
            if case.sample_length % parts:
                return (
                    f"torchtitan's {name} splits a sequence into {parts} equal parts, but "
                    f"sequence_length={case.sequence_length} cannot be split like this"
                )
        config: Any = case.model.config
        reason = cannot_build("torchtitan's llama3", case.model)
        if reason is not None:
            return reason
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPES:
            rope_types = " and ".join(ROPES)
            return f"torchtitan's llama3 supports rope_type {rope_types}, but {case.model.name} has {kind!r}"
        heads = config.get("num_attention_heads", USUAL_SHAPE["num_attention_heads"])
        for key in ("num_attention_heads", "num_key_value_heads"):
            count = config.get(key) or heads
            if count % self.tensor_parallel:
                return f"tensor_parallel={self.tensor_parallel} must divide {key}, {count}"
        return None

    def plan(self, case: Case) -> LaunchPlan:
        return LaunchPlan(process_group="library")

    def dry(self, case: Case) -> DryPlan:
        if self.disable_cuda_graphs:
            pretend = f"{__name__}.pretend"
            return DryPlan(
                pretend=lambda: importlib.import_module(pretend).pretend(self.expected(case)),
                ranks_differ=any(map(PIPELINE.search, self.overrides)),
            )
        return DryPlan(impossible="CUDA graphs cannot be captured: remove disable_cuda_graphs=False")

    def expected(self, case: Case) -> dict[str, str]:
        if self.config is not None:
            from perfsuite.frameworks.torchtitan import configuration

            return configuration.expected(case)
        replicate = self.data_parallel_replicate
        tensor = self.tensor_parallel
        shard = case.topology.world_size // (replicate * tensor)
        return {
            "wrapper": "FSDPModule",
            **expected_shards("fsdp", replicate=replicate, shard=shard, tensor=tensor),
            "cuda_graphs": "no" if self.disable_cuda_graphs else "yes",
        }

    def load(self, case: Case, device: Any) -> None:
        from perfsuite.frameworks.torchtitan import compat

        # In a comparison of two environments, an environment can have a different version of torch from the
        # one that `unsupported` has checked.
        too_old = why_torch_is_too_old()
        if too_old is not None:
            raise MismatchError(too_old)

        compat.before_import(device.type)
        import perfsuite.frameworks.torchtitan.trainer  # noqa: F401

        if self.config is not None:
            self.expected(case)  # imports the model of the configuration

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build torchtitan's Trainer for the case. The Trainer creates the process group."""
        from perfsuite.frameworks.torchtitan.trainer import CaseTrainer

        trainer = CaseTrainer(case, clock)

        def run(steps: int) -> list[Any]:
            try:
                trainer.train()  # raises `ProfileTaken` when all steps of a profile have been recorded
                return trainer.losses()
            finally:
                # Close the trainer, to release its CUDA graphs. Destroying the process group would otherwise
                # wait for those graphs that contain NCCL's collectives.
                trainer.close()

        return Workload(
            run=run,
            data_parallel=trainer.data_parallel,
            model=trainer.model,
            settings=trainer.settings(),
            flops=trainer.flops(),
            notes=trainer.notes(),
            own_tokens_per_s=lambda: trainer.last_metrics["throughput(tps)"] * ranks.world_size,
        )
