"""Faults, as data, that can be injected into a launch to test the gate."""

import re
from typing import Literal, Self, get_args

from perfsuite.documents import Data, did_you_mean
from perfsuite.errors import CaseError

Plain = Literal["nan", "loss", "missing-metric", "missing-rank", "crash", "exit", "oom", "hang"]

# These faults change the work of a step, so that counts show them (`worker.faults.structural_faults`).
Structural = Literal[
    "reshard-toggled",
    "fp32-communication",
    "checkpointing-lost",
    "host-read",
    "small-buckets",
    "optimizer-foreach",
    "eager-attention",
    "weight-copy",
]
STRUCTURAL: tuple[Structural, ...] = get_args(Structural)

AT_STEP = 5  # the step, counted from 0, at which a fault makes training fail


class Fault(Data):
    """One fault to inject."""

    kind: Literal["slowdown", "leak", "stall"] | Plain | Structural
    size: float = 0
    """For `slowdown`, a share of the step time (0.3 for 30%). For `leak`, a share of the peak memory. For
    `stall`, the number of steps from one stalled step to the next. All other faults have the size 0."""

    @property
    def structural(self) -> Structural | None:
        """The kind of a fault that changes the work of a step. None for all other faults."""
        return next((kind for kind in STRUCTURAL if kind == self.kind), None)

    @classmethod
    def parse(cls, text: str, option: str = "--perf-inject") -> Self:
        """Parse the value of an option that takes a fault. Raises `CaseError` if the value is wrong."""
        match = re.fullmatch(r"(slowdown|leak)=(\d+(?:\.\d+)?)%", text)
        if match:
            if match[1] == "slowdown" and float(match[2]) >= 100:
                why = "the steps of ranks that wait for each other would become longer and longer"
                raise CaseError(f"{option} {text!r}: give less than 100%: {why}")
            return cls.model_validate({"kind": match[1], "size": float(match[2]) / 100})
        match = re.fullmatch(r"stall=([1-9]\d*)", text)
        if match:
            return cls(kind="stall", size=float(match[1]))
        plain = (*get_args(Plain), *STRUCTURAL)
        if text in plain:
            return cls.model_validate({"kind": text})
        name = text.partition("=")[0]
        kinds = ("slowdown", "leak", "stall", *plain)
        near = "" if name in kinds else did_you_mean(name, kinds, ". Did you mean {!r}?")
        raise CaseError(
            f"{option} {text!r}: give slowdown=P%, leak=P%, stall=N, or one of {', '.join(plain)}{near}"
        )
