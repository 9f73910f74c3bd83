"""The record of a first night. After an interruption, the first night continues from this record."""

from pathlib import Path
from typing import Literal

from perfsuite import documents
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row
from perfsuite.documents import Data, Document
from perfsuite.errors import CaseError
from perfsuite.features.first_night.cases import Size

FILE = "first-night.json"  # in the directory of a first night


class StepResult(Data):
    """The result of one step."""

    step: str
    seconds: float
    is_complete: bool  # False: the step was cut short or did not run, and is repeated
    rows: tuple[Row, ...]


class FirstNight(Document):
    """`first-night.json`: the results of all steps so far."""

    schema_version: Literal[1] = 1
    perfsuite: str
    started_at: str
    machine: Machine
    size: Size
    results: tuple[StepResult, ...] = ()

    def of(self, step: str) -> StepResult | None:
        """Return the result of a step; None if it has none yet."""
        return next((result for result in self.results if result.step == step), None)

    def with_result(self, result: StepResult) -> "FirstNight":
        """Return the record with a result, which replaces an earlier result of the same step."""
        others = [earlier for earlier in self.results if earlier.step != result.step]
        return self.replace(results=(*others, result))


def resumed(out: Path, new: FirstNight) -> FirstNight:
    """Return the record of the first night in `out`, or `new` if there is none.

    Raises `CaseError` if the directory contains something else, or a first night on other hardware, with
    another size, or with another version of perfsuite.
    """
    file = out / FILE
    if not file.exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CaseError(f"--out {out}: it exists but contains no first night. Give a new directory")
        return new
    earlier = documents.read(file, FirstNight)
    for name, before, now in (
        ("hardware", hardware_text(earlier.machine), hardware_text(new.machine)),
        ("size", earlier.size, new.size),
        ("version of perfsuite", earlier.perfsuite, new.perfsuite),
    ):
        if before != now:
            raise CaseError(
                f"--out {out} holds a first night with another {name} ({before}, now {now}). Give a new "
                "directory"
            )
    return earlier


def hardware_text(machine: Machine) -> str:
    """Return the number of GPUs and the hardware class. A CPU's class already has the number of cores."""
    if machine.device == "cpu":
        return machine.hardware_class
    return f"{machine.devices} x {machine.hardware_class}"
