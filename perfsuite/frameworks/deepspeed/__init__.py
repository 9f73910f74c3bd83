"""DeepSpeed: ZeRO 0 to 3 and offload to the CPU, with DeepSpeed's own engine and JSON configuration."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError, model_validator

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises
from perfsuite.case.hardware import Machine
from perfsuite.documents import did_you_mean, digest, explain
from perfsuite.errors import CaseError, MismatchError
from perfsuite.frameworks.base import (
    DryPlan,
    Framework,
    LaunchPlan,
    Library,
    Ranks,
    StepClock,
    Workload,
)
from perfsuite.frameworks.common.config_file import ConfigFile
from perfsuite.frameworks.deepspeed.engine import LIBRARY, NOT_DRY

PRECISIONS = ("fp32", "bf16", "bf16-mixed")
"""Supported precisions of a case. `bf16` turns on DeepSpeed's section `bf16`, with fp32 copies of the
parameters in the optimizer. `bf16-mixed` turns on the section `torch_autocast`, with parameters in fp32."""
# Accepted keys. Other keys are refused: perfsuite supports only ZeRO, and DeepSpeed would ignore a misspelt
# key.
TAKEN = frozenset(
    "bf16 checkpoint communication_data_type data_types disable_allgather fp16 "  # noqa: SIM905
    "gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor log_level "
    "optimizer prescale_gradients scheduler steps_per_print torch_autocast train_batch_size "
    "train_micro_batch_size_per_gpu zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "zero_optimization".split()
)
SWITCHES = frozenset({"dump_state", "memory_breakdown", "wall_clock_breakdown"})  # keys that must be false
SECTIONS = ("bf16", "fp16", "optimizer", "optimizer.params", "torch_autocast", "zero_optimization")
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# The values that replace "auto" in keys that no field of the case determines. The other frameworks use the
# same values.
USUAL = {
    "gradient_clipping": 0.0,
    "optimizer.type": "AdamW",
    **{f"optimizer.params.{name}": value for name, value in ADAM.items()},
}
OWN_AUTO = ("bf16.", "fp16.", "zero_optimization.")  # sections where "auto" means DeepSpeed's own default
OFFLOADS = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
FLAT = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Attributes of the optimizer that hold a rank's shards of the trained parameters. ZeRO 3 has the first one,
ZeRO 1 and 2 have the second one, and ZeRO 1 with bf16 has the third one."""
FLAGS = {"optimizer": ("offload_optimizer", "cpu_offload"), "parameters": ("offload_param",)}
"""Attributes of the optimizer that are true if it offloads optimizer state or parameters."""


class ZeroConfig(ConfigFile):
    """A user's configuration of DeepSpeed."""

    kind: ClassVar[str] = "a JSON file for DeepSpeed"

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_mapping(cls, value: Any) -> Any:
        """Read a mapping as DeepSpeed's configuration.

        A mapping with the key `text` is returned unchanged. It is the content of a `ZeroConfig`, for example
        from one of perfsuite's own files.
        """
        if not isinstance(value, Mapping) or "text" in value:
            return value
        try:
            text = json.dumps(dict(value))
        except TypeError as error:
            raise ValueError(f"{error}: give only values that a JSON file can hold") from None
        stage = _flat(value).get("zero_optimization.stage", 0)
        return {"name": f"zero{stage}-{digest(json.loads(text), 6)}", "text": text}

    @classmethod
    def parse(cls, text: str) -> Any:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__} instead of sections")
        return content

    @cached_property
    def flat(self) -> dict[str, Any]:
        return _flat(self.content)

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        stage: int = self.flat.get("zero_optimization.stage", 0)
        return stage

    @property
    def offloaded(self) -> list[str]:
        """The keys of `OFFLOADS` whose data is kept in host memory."""
        devices = {what: f"zero_optimization.{section}.device" for what, section in OFFLOADS.items()}
        return [what for what, path in devices.items() if self.flat.get(path, "none") != "none"]

    @property
    def uses_cpu_adam(self) -> bool:
        """Whether DeepSpeed uses its own AdamW for the CPU if no optimizer is configured."""
        return "optimizer" in self.offloaded and bool(self.flat.get("zero_force_ds_cpu_optimizer", True))

    @property
    def own_optimizer(self) -> str | None:
        """The name of DeepSpeed's operator that updates the parameters. None if torch's optimizer does so."""
        if self.content.get("optimizer") is None:
            return "cpu_adam" if self.uses_cpu_adam else None
        is_adam = str(self.flat.get("optimizer.type", "")).lower() in ("adam", "adamw")
        if not is_adam or self.flat.get("optimizer.params.torch_adam", False):
            return None
        return "cpu_adam" if "optimizer" in self.offloaded else "fused_adam"


class DeepSpeed(Framework):
    """DeepSpeed's engine, configured with a file or a mapping.

    Examples: `DeepSpeed(config="zero3.json")`, `DeepSpeed(config={"zero_optimization": {"stage": 3}})`.

    The case determines batch size, precision and learning rate. In the configuration, they must be missing,
    "auto" or the same as in the case. If the configuration has no section `optimizer`, the optimizer is
    torch's AdamW or, with `offload_optimizer`, DeepSpeed's own AdamW.
    """

    name: ClassVar[str] = "deepspeed"
    packages: ClassVar[tuple[str, ...]] = ("deepspeed",)
    promises: ClassVar[Promises] = Promises(takes={"precision": PRECISIONS, "compile": (False,)})
    library: ClassVar[Library] = LIBRARY

    config: ZeroConfig
    """A mapping, or the path of a JSON file. The file is read when the case is created."""

    def slug(self) -> str:
        return f"{self.name}-{self.config.name}"

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        operator = self.config.own_optimizer
        if machine.device == "cpu" or operator is None or _has_nvcc() or _is_built(operator):
            return None
        return (
            f"DeepSpeed compiles its optimizer ({operator}) in the first launch, which needs nvcc. Install "
            "the CUDA toolkit and set CUDA_HOME, or use torch's AdamW (set zero_force_ds_cpu_optimizer to "
            "false, or torch_adam to true)"
        )

    def plan(self, case: Case) -> LaunchPlan:
        return LaunchPlan(clock="framework")

    def check(self, case: Case) -> None:
        if case.precision in PRECISIONS:
            problems = [*_problems(self.config, case)]
            if problems:
                raise CaseError(f"{self.slug()}: {'; '.join(problems)}")

    def dry(self, case: Case) -> DryPlan:
        return DryPlan(impossible=NOT_DRY)

    def expected(self, case: Case) -> dict[str, str | None]:
        stage = self.config.stage
        ranks = case.topology.world_size
        return {
            "wrapper": "DeepSpeedEngine",
            "sharding": f"DeepSpeed ZeRO-{stage}" if stage else "none",
            "rank_holds": _shares(ranks if stage == 3 else 1, ranks if stage else 1),
            "offload": " and ".join(self.config.offloaded) or "none",
            "optimizer_parameters": None,  # cannot be checked, because the optimizer holds copies of a shard
        }

    def load(self, case: Case, device: Any) -> None:
        if device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # DeepSpeed would import this module only when it is given an optimizer. The module loads dynamo, so
        # import it now, before memory is measured.
        with suppress(ImportError):
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        # On a CPU, DeepSpeed would compile an operator for collectives. Compiling it takes minutes, and the
        # operator would bypass gloo.
        if device.type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build DeepSpeed's engine, and a loop that trains with it."""
        from perfsuite.frameworks.common.loop import training

        engine = self._engine(case, ranks)

        def backward(loss: Any) -> Any:
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # steps the optimizer only after the last micro-batch
            return loss.detach() / case.gradient_accumulation

        settings = {"config_sha256": self.config.digest, **_observed(engine)}
        if ranks.device.type == "cpu":
            settings["replaced"] = "deepspeed_shm_comm by gloo"
        return training(
            case,
            ranks,
            engine,
            backward=backward,
            sync=lambda is_last: nullcontext(),
            step=clock.boundary,
            settings=settings,
        )

    def _engine(self, case: Case, ranks: Ranks) -> Any:
        import deepspeed

        from perfsuite.frameworks.common.model import blocks, build_optimizer, model_without_weights
        from perfsuite.frameworks.common.weights import initialise

        deepspeed.init_distributed()
        config = _filled(self.config, case)
        self._check_taken(config)
        model: Any = model_without_weights(case, ranks.device)

        def units() -> Iterator[Any]:
            for block in blocks(model):
                yield block  # `initialise` creates the block's weights before it takes the next block
                if self.config.stage == 3:
                    deepspeed.zero.Init(module=block, config_dict_or_path=copy.deepcopy(config))

        initialise(model, units(), seed=case.seed, device=ranks.device)
        optimizer = None if "optimizer" in config else build_optimizer(case, model)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=parameters, config=config
        )
        return engine

    def _check_taken(self, config: dict[str, Any]) -> None:
        """Raise `MismatchError`, with DeepSpeed's own message, if DeepSpeed rejects the configuration."""
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        try:
            DeepSpeedConfig(copy.deepcopy(config))
        except Exception as error:
            said = str(error)
            if isinstance(error, ValidationError):
                said = f"{error.title}: {explain(error, [*DeepSpeedZeroConfig.model_fields])}"
            raise MismatchError(f"DeepSpeed rejects {self.slug()}: {said}") from error


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return all values that are not null, by their path, such as `optimizer.params.lr`."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values |= _flat(value, f"{above}{key}.")
        elif value is not None:
            values[above + key] = value
    return values


def _has_nvcc() -> bool:
    """Return whether torch would find NVIDIA's compiler. This function looks where torch looks."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or Path(home, "bin", "nvcc").is_file()


def _is_built(operator: str) -> bool:
    """Return whether an operator was compiled when DeepSpeed was installed (see `DS_BUILD_OPS`)."""
    spec = importlib.util.find_spec("deepspeed")
    places = spec.submodule_search_locations if spec is not None else None
    for place in places or ():
        with suppress(OSError):
            return f"'{operator}': True" in Path(place, "git_version_info_installed.py").read_text()
    return False


def _decided(config: Mapping[str, Any], case: Case) -> dict[str, tuple[str, Any]]:
    """Return the values that the case determines: path -> the field of the case, and the required value."""
    batch = case.micro_batch * case.gradient_accumulation
    precision = f"precision {case.precision!r}"
    decided: dict[str, tuple[str, Any]] = {
        "train_micro_batch_size_per_gpu": ("micro_batch", case.micro_batch),
        "gradient_accumulation_steps": ("gradient_accumulation", case.gradient_accumulation),
        "train_batch_size": ("batch of all processes", batch * case.topology.world_size),
        "bf16.enabled": (precision, case.precision == "bf16"),
        "fp16.enabled": (precision, False),
        "torch_autocast.enabled": (precision, case.precision == "bf16-mixed"),
    }
    if case.precision == "bf16-mixed":
        decided["torch_autocast.dtype"] = precision, "bfloat16"
    if "optimizer" in config:
        decided["optimizer.params.lr"] = "learning_rate", case.learning_rate
    return decided


def _filled(config: ZeroConfig, case: Case) -> dict[str, Any]:
    """Return a copy of the configuration in which all values that the case determines are set."""
    result: dict[str, Any] = copy.deepcopy(config.content)
    result.setdefault("gradient_clipping", "auto")
    if config.uses_cpu_adam:
        result.setdefault("optimizer", {"type": "AdamW", "params": {**ADAM}})
    flat = _flat(result)
    values = {path: value for path, value in USUAL.items() if flat.get(path) == "auto"}
    values |= {path: value for path, (_, value) in _decided(result, case).items()}
    for path, value in values.items():
        *sections, key = path.split(".")
        section = result
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return result


def _problems(config: ZeroConfig, case: Case) -> Iterator[str]:
    """Yield a message for each part of a configuration that is unsupported or contradicts the case."""
    for key, value in config.content.items():
        is_off = value is False if key in SWITCHES else config.flat.get(f"{key}.enabled") is False
        if key not in TAKEN and not is_off:
            hint = did_you_mean(key, TAKEN, " (did you mean {}?)")
            yield (
                f"{key}: perfsuite supports only ZeRO{hint}. Remove this key, or measure your own script "
                "(Script)"
            )
    decided = _decided(config.content, case)
    for path, has in config.flat.items():
        field, needs = decided.get(path, ("", has))
        if path in SECTIONS:
            yield f"{path}: {has!r} is not a section: DeepSpeed expects {{...}} here"
        elif has == "auto":
            if path not in decided and path not in USUAL and not path.startswith(OWN_AUTO):
                yield f"{path}: 'auto', but no field of the case determines it. Give a value"
        elif has != needs:
            yield f"{path}: {has!r}, but the case's {field} needs {needs!r}"
        elif path.endswith(".device") and has not in ("none", "cpu"):
            yield f"{path}: {has!r}, but perfsuite supports offload only to 'cpu'"


def _observed(engine: Any) -> dict[str, str]:
    """Return the settings that show this rank's share of parameters and optimizer, and what is offloaded."""
    zero = engine.optimizer
    parameters = list(engine.module.parameters())
    optimized = next((getattr(zero, name) for name in FLAT if hasattr(zero, name)), None)
    if optimized is None:
        optimized = [parameter for group in zero.param_groups for parameter in group["params"]]
    held = {
        "optimizer": optimized,
        "parameters": [getattr(parameter, "ds_tensor", parameter) for parameter in parameters],
    }
    offloaded = [
        what
        for what, flags in FLAGS.items()
        if any(getattr(zero, flag, False) for flag in flags)
        and any(tensor.device.type == "cpu" for tensor in held[what])
    ]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    ranks = [
        round(
            sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in whole)
            / sum(p.numel() for p in part)
        )
        for whole, part in ((parameters, held["parameters"]), (trained, held["optimizer"]))
    ]
    return {
        "rank_holds": _shares(*ranks),
        "offload": " and ".join(offloaded) or "none",
        "gradient_clipping": str(engine.gradient_clipping()),
    }


def _shares(parameters: int, optimizer: int) -> str:
    return f"1/{parameters} of parameters, 1/{optimizer} of optimizer"
