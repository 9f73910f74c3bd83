"""`perfsuite hardware`: says what machine this is, and which cases run here.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from perfsuite.case import torch_build
from perfsuite.case.hardware import ACCELERATORS, Machine, hardware_error
from perfsuite.errors import CaseError
from perfsuite.launch.machine import detect
from perfsuite.report.terminal import console


def hardware(
    expect: Annotated[
        str | None, typer.Option(help="A marker, such as h100: exit status 2 unless it selects cases here.")
    ] = None,
) -> None:
    """What machine this is, its hardware class, and which markers select cases here.

    Exit status 2 if the installed torch cannot use the machine's GPUs.
    """
    if expect is not None and (error := hardware_error(expect)) is not None:
        raise CaseError(f"--expect {expect}: {error}")
    machine = detect()
    out = console()
    for heading, value in _facts(machine):
        out.print(Text.assemble((f"{heading:<16}", "bold"), value))
    here = [name for name in ACCELERATORS if _why_not(machine, name) is None]
    others = len(ACCELERATORS) - len(here)
    out.print(Text.assemble(("cases run here  ", "bold"), ", ".join(f"-m {name}" for name in here)))
    out.print(f"{'':<16}{others} other markers select none here; why not: --expect MARKER")
    if expect is not None and (reason := _why_not(machine, expect)) is not None:
        note = f"; {machine.note}" if machine.note else ""
        raise CaseError(f"no {expect} here: {reason}{note}")
    if expect != "cpu" and (problem := torch_build.wrong_build(machine)) is not None:
        raise CaseError(problem)


def _why_not(machine: Machine, hardware: str) -> str | None:
    """Say why cases meant for that hardware do not run here, or None. CPU cases run on GPU machines, too."""
    return None if hardware == "cpu" else machine.why_not(hardware)


def _facts(machine: Machine) -> list[tuple[str, str]]:
    """Return name and value of what is known about a machine."""
    devices = f"{machine.devices} GPUs" if machine.device == "cuda" else f"{machine.devices} cores"
    peak = machine.peak_flops("bf16")
    if machine.device == "cpu":
        mfu = "not given on a CPU"
    elif peak is None or machine.product is None:
        mfu = "unknown peak, no MFU"
    else:
        mfu = f"{peak / 1e12:g} TFLOP/s dense at 16 bit ({machine.product.source})"
    return [
        ("machine", f"{devices}, {machine.device_name}, {machine.memory_bytes / 2**30:.0f} GiB"),
        ("hardware class", machine.hardware_class),
        ("driver", machine.driver or "none"),
        ("torch", torch_build.summary()),
        ("peak FLOP/s", mfu),
        ("note", machine.note or "none"),
    ]
