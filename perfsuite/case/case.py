"""A case: the training to measure, as frozen plain data with a readable id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from perfsuite.case.catalog import find_model
from perfsuite.case.framework import FrameworkOptions, as_json, changed_fields, parse
from perfsuite.case.hardware import ACCELERATORS, hardware_error
from perfsuite.case.model import FrozenMapping, Model
from perfsuite.documents import Data, Document, digest, plain
from perfsuite.errors import CaseError

Precision = Literal["fp32", "bf16-mixed", "fp16-mixed", "bf16"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Quantization = Literal["none", "8bit", "4bit"]
# The unit in which a case counts its data. The names of measured values contain `tokens` even if the unit is
# samples.
Unit = Literal["tokens", "samples"]

# The upper limit of numbers, unless a field has a smaller one. Arithmetic with larger numbers can fail.
MOST = 100_000_000


class Topology(Data):
    """The number of machines, and the number of processes (one per device) on each machine."""

    nodes: int = Field(default=1, ge=1, le=100_000, strict=True)
    processes_per_node: int = Field(ge=1, le=1024, strict=True)

    @property
    def world_size(self) -> int:
        """The number of processes on all machines together."""
        return self.nodes * self.processes_per_node


_Pattern = FrozenMapping[Annotated[int, Field(ge=1, le=MOST, strict=True)]]


class LoRA(Data):
    """Low-rank adapters (Hu et al. 2021). Only the adapters are trained; the model itself is frozen.

    `targets`, `rank_pattern` and `alpha_pattern` match layers in the same way as in peft's `LoraConfig`.
    """

    rank: int = Field(ge=1, le=MOST, strict=True)
    alpha: int = Field(ge=1, le=MOST, strict=True)
    """The output of an adapter is multiplied by alpha / rank."""
    targets: tuple[str, ...] | str = ()
    """The layers that get an adapter. A tuple lists the last parts of their names, such as `"q_proj"`,
    `"attn.q_proj"` or `"to_out.0"`. A string is a regular expression that must match the whole name of a
    layer. The string `"all-linear"` selects all linear layers except the output layer. An empty tuple selects
    all linear layers in the blocks."""
    rank_pattern: _Pattern = Field(default={}, validate_default=True)
    """Regular expression -> the rank of all layers whose names end with a match. If several expressions match
    the same layer, the first in alphabetical order is used."""
    alpha_pattern: _Pattern = Field(default={}, validate_default=True)
    """Regular expression -> the value of alpha, in the same form as `rank_pattern`."""

    @field_validator("targets")
    @classmethod
    def _names_or_a_pattern(cls, targets: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if targets == "":
            raise ValueError('targets is "": leave it out for all linear layers of the blocks')
        if "" in targets and not isinstance(targets, str):
            raise ValueError(f"give the names of layers, such as 'q_proj', instead of '' in {targets!r}")
        if isinstance(targets, str):
            _check_pattern(targets)
        return targets

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _patterns(cls, pattern: Mapping[str, int]) -> Mapping[str, int]:
        for name in pattern:
            _check_pattern(name)
        # Files contain the keys in sorted order. Sort them here too, so that the order does not change when a
        # case is written to a file and read again.
        return MappingProxyType(dict(sorted(pattern.items())))

    def __hash__(self) -> int:
        return hash((self.rank, self.alpha, self.targets, *self.rank_pattern, *self.alpha_pattern))

    @model_serializer(mode="wrap")
    def _without_empty_patterns(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty patterns, because an arm can have an older perfsuite that lacks these fields."""
        fields = serialise(self)
        return {name: value for name, value in fields.items() if value or not name.endswith("_pattern")}

    def selects(self, name: str) -> bool:
        """Return whether the layer with this full name is a target.

        `targets` must not be empty or `"all-linear"`.
        """
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, name) is not None
        return any(f".{name}".endswith(f".{target}") for target in self.targets)

    def of(self, name: str) -> tuple[int, int]:
        """Return rank and alpha of the adapter on the layer with this full name."""
        rank = _by_pattern(self.rank_pattern, name, self.rank)
        return rank, _by_pattern(self.alpha_pattern, name, self.alpha)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None


def _by_pattern(pattern: Mapping[str, int], name: str, usual: int) -> int:
    matched = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name))
    return next(matched, usual)


class KnownIssue(Data):
    """A failure with a known cause outside this repository. Other failures of the case are not excused."""

    url: str = Field(pattern=r"^https?://\S+$")
    failure: Literal["crash", "timeout", "loss"]
    """How a launch fails. A hang is a `timeout`."""


def _find_by_name(model: Any) -> Any:
    return find_model(model) if isinstance(model, str) else model


def _as_tuple(hardware: Any) -> Any:
    return (hardware,) if isinstance(hardware, str) else hardware


class Case(Data):
    """One benchmark case. `case.replace(micro_batch=8)` returns a variant.

    Lengths are in tokens, and batch sizes are in sequences. A step trains on
    `micro_batch * gradient_accumulation` sequences of `sequence_length` tokens per data-parallel rank. For
    training without tokens (images, tables), `sequence_length` is None and batch sizes are in samples.
    """

    model: Annotated[Model, BeforeValidator(_find_by_name)]
    framework: Annotated[FrameworkOptions, BeforeValidator(parse), PlainSerializer(as_json)]
    sequence_length: Annotated[int, Field(ge=2, le=MOST, strict=True)] | None
    """Tokens per sequence. None: samples are counted instead of tokens, and speeds are in samples/s. Only
    cases with a `Script` can have None."""
    micro_batch: int = Field(ge=1, le=MOST, strict=True)
    gradient_accumulation: int = Field(default=1, ge=1, le=MOST, strict=True)
    precision: Precision = "fp32"
    activation_checkpointing: str = "none"
    """The part that is recomputed in backward: `none`, `full` (every block), `every-N` (every N-th block) or
    `selective-op` (by operator)."""
    attention: Attention = "sdpa"
    compile: bool = Field(default=False, strict=True)
    lora: LoRA | None = None
    quantization: Quantization = "none"
    """Format of the blocks' frozen weights: `4bit` (NF4, as in QLoRA) or `8bit` (LLM.int8). Needs `lora`."""
    topology: Topology
    hardware: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
    """The hardware that the case is meant for: `"cpu"`, `"h100"`, `"a100-80gb"`, or several of these. The
    family of each becomes a pytest marker."""
    learning_rate: float = Field(default=1e-3, gt=0, le=1000, allow_inf_nan=False)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63, strict=True)
    max_warmup_steps: int = Field(default=20, ge=2, le=MOST, strict=True)
    """Maximum number of steps before the measured window. The beginning of the window is determined from the
    step times. The first two steps are never measured."""
    steps: int = Field(default=50, ge=10, le=MOST, strict=True)
    """Minimum number of measured steps."""
    counted_steps: int | None = Field(default=None, ge=1, le=MOST, strict=True)
    """Number of consecutive steps that are counted if nothing is timed, as in dry runs and comparisons of
    counts. None: the value of `--perf-counted-steps`."""
    timeout_s: float = Field(default=900, gt=0, le=MOST, allow_inf_nan=False)
    """Seconds after which a launch is killed."""
    known_issue: KnownIssue | None = None
    """A known reason why this case fails. The report says whether the case still fails."""
    may_run_out_of_memory: bool = Field(default=False, strict=True)
    """Whether running out of memory is a result instead of a failure, for example in a sweep of batch sizes.
    If a baseline shows that the case fits, running out of memory is a failure nevertheless."""

    @field_validator("activation_checkpointing")
    @classmethod
    def _known_checkpointing(cls, mode: str) -> str:
        if re.fullmatch(r"none|full|selective-op|every-[1-9]\d*", mode) is None:
            raise ValueError(
                f"expected 'none', 'full', 'selective-op' or 'every-N', such as 'every-2', got {mode!r}"
            )
        return mode

    @field_validator("hardware")
    @classmethod
    def _known_hardware(cls, hardware: tuple[str, ...]) -> tuple[str, ...]:
        for name in hardware:
            error = hardware_error(name)
            if error is not None:
                raise ValueError(
                    f"unknown hardware {name!r}: {error}. Give a family, optionally with memory and form "
                    "factor, such as 'h100', 'a100-80gb' or 'h100-80gb-sxm'; 'gpu' is any GPU"
                )
        if not hardware:
            raise ValueError("name at least one hardware, for example 'cpu'")
        return hardware

    @model_validator(mode="after")
    def _fits_together(self) -> Case:
        if self.quantization != "none" and self.lora is None:
            raise ValueError(
                f"quantization {self.quantization!r} needs lora, because quantised weights cannot be "
                "trained: give lora=LoRA(rank=16, alpha=32)"
            )
        if self.sequence_length is None:
            if self.framework.promises.builds_model:
                raise ValueError(
                    f"sequence_length None counts samples instead of tokens, which is possible only for a "
                    f"Script. {self.framework.name} trains a language model: give its sequence length"
                )
            return self
        longest = self.model.max_sequence_length
        if longest is not None and self.sequence_length > longest:
            raise ValueError(
                f"sequence_length {self.sequence_length} is longer than the {longest} positions "
                f"of {self.model.name}"
            )
        return self

    @cached_property
    def id(self) -> str:
        """The name of the case, made of its framework, its model and its changed fields.

        It is stable, unique and valid as a file name. If it would be longer than `MAX_ID`, the part before
        the topology is shortened. The shortened part ends with a digest of the full text of this part.
        """
        parts = self.parameters
        accumulation = parts["gradient_accumulation"]
        batch = f"b{parts['micro_batch']}" + (f"x{accumulation}" if accumulation != "1" else "")
        tokens = "" if self.sequence_length is None else f"s{parts['sequence_length']}"
        words = (parts["framework"], parts["model"], tokens, batch, parts["precision"], parts["options"])
        name = "-".join(filter(None, words))
        topology = f"-{parts['topology']}"
        most = MAX_ID - len(topology)
        if len(name) > most:
            end = f"-{digest(name, 12)}"
            name = name[: most - len(end)] + end
        return name + topology

    @cached_property
    def parameters(self) -> dict[str, str]:
        """The parts of the id, as text that is valid in a file name."""
        parts = {
            "framework": self.framework.slug(),
            "model": self.model.name,
            "sequence_length": NO_TOKENS if self.sequence_length is None else str(self.sequence_length),
            "micro_batch": str(self.micro_batch),
            "gradient_accumulation": str(self.gradient_accumulation),
            "precision": self.precision,
        }
        ac = self.activation_checkpointing
        options = [f"ac_{ac}"] if ac != "none" else []
        options += changed_fields(self, {*parts, "activation_checkpointing", "topology", *NOT_IN_ID})
        parts["options"] = "-".join(options)
        parts["topology"] = f"{self.topology.nodes}x{self.topology.processes_per_node}"
        return {name: re.sub(r"[^A-Za-z0-9._+-]", "_", part) for name, part in parts.items()}

    @property
    def unit(self) -> Unit:
        """The unit of the case's data: tokens or samples. Speeds are in this unit per second."""
        return "samples" if self.sequence_length is None else "tokens"

    @property
    def sample_length(self) -> int:
        """The number of units in a sample: its tokens, or 1 if the case counts samples."""
        return 1 if self.sequence_length is None else self.sequence_length

    @property
    def markers(self) -> list[str]:
        """The pytest markers that select this case. For `gpu`, these are the markers of all GPUs."""
        names = {name.split("-")[0] for name in self.hardware}
        return sorted(names | (set(ACCELERATORS) - {"cpu"} if "gpu" in names else set()))

    @property
    def total_steps(self) -> int:
        """The number of steps in a launch."""
        return self.max_warmup_steps + self.steps


# Maximum length of an id. The name of a file is an id with a suffix, and can have 255 characters.
MAX_ID = 200
NO_TOKENS = "none"  # in `Case.parameters`, the sequence length of a case that counts samples
NOT_IN_ID = frozenset({"hardware", "counted_steps", "timeout_s", "known_issue", "may_run_out_of_memory"})
"""Fields that do not change the work of a case. They say where the case runs, how many steps are counted, how
long a launch can take, and how the case can fail."""


def check_same(first: Case, case: Case) -> None:
    """Raise `CaseError` if two different cases have the same id, because they would share a baseline."""
    if first != case:
        names = [name for name in Case.model_fields if getattr(first, name) != getattr(case, name)]
        raise CaseError(
            f"two different cases have the id {case.id}: they differ in {', '.join(names)}, "
            "which the id does not show. Make these fields equal, or give the models different names"
        )


class CollectedTest(Data):
    """A test that pytest collected, with its case. The test is not necessarily selected."""

    nodeid: str
    case: Case
    marks: tuple[str, ...] = ()  # names of its marks that `-m` can select, sorted
    # Why pytest would not run this test: `deselected`, or `skipped` with the reason. None if it would run.
    left_out: str | None = None


class CaseList(Document):
    """The cases of tests, in the file that `--perf-cases` writes."""

    schema_version: Literal[1] = 1
    cases: tuple[Case, ...]  # cases of the selected tests
    tests: tuple[CollectedTest, ...]  # all collected tests
    unmatched: tuple[str, ...] = ()  # names in `-k` that match no collected test


class CaseFile(Document):
    """`case.json`: the case of a launch, which the agent and every rank read."""

    schema_version: Literal[1] = 1
    case: Case
    device: Literal["cpu", "cuda"]
    peak_flops: float | None = None  # peak FLOP/s of one device at the case's precision; None: unknown
    inject: str | None = None  # a fault to inject, for testing the gate (see `perfsuite.case.fault`)
    counts: bool = True  # whether every rank counts the work of a step (`perfsuite.results.counts`)
    # Number of consecutive steps to count if nothing is timed. None: count before and after the timed steps.
    counted_steps: int | None = Field(default=None, ge=1)
    preflight: bool = False  # whether ranks only probe their nodes. They use only the topology of the case
    profile: bool = False  # whether ranks only profile a few steps after warm-up. Nothing is then judged
    metrics: tuple[str, ...] = ()  # names of metrics from other packages, which every rank records

    @property
    def times_nothing(self) -> bool:
        """Whether the launch only counts the work of steps."""
        return self.counted_steps is not None

    def as_json(self) -> str:
        """Return the JSON without fields that have their default values.

        An arm can have an older perfsuite that does not know some of the fields. The older perfsuite can
        read the file if these fields are left out.
        """
        fields = type(self).model_fields.items()
        usual = {name for name, field in fields if getattr(self, name) == field.default} - {"schema_version"}
        chosen = {name: value for name, value in plain(self).items() if name not in usual}
        return json.dumps(chosen, sort_keys=True, indent=1) + "\n"
