"""Check the setup of the GPUs with NVML. Compare their speed with each other and with the data sheet."""

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from perfsuite.analysis.health import NOTED_LAG, UNEQUAL_LAG
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, checked, failed, passed, unknown
from perfsuite.errors import MachineError
from perfsuite.node import nvml_process
from perfsuite.node.nvml import Gpus
from perfsuite.node.processes import JobProcesses
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import DeviceHealth

MIN_SHARE_OF_PEAK = 0.4  # share of the dense peak that healthy GPUs exceed in a 4096 x 4096 matmul
NOT_REPORTED = "NVML does not report it"
FABRIC_IS_UP = (3, 0)
"""State and status of a GPU whose NVLink fabric is set up: NVML_GPU_FABRIC_STATE_COMPLETED, NVML_SUCCESS."""


def gpu_rows(machine: Machine, *, ask: Callable[..., Any] = nvml_process.ask) -> list[Row]:
    """Check the setup of the GPUs and look for faulty cards.

    `ask` calls NVML in a process that has a deadline.
    """
    if machine.device == "cpu":
        return []
    try:
        rows = ask("perfsuite.doctor.gpus", machine.model_dump_json())
    except MachineError as error:
        return [failed("NVML", str(error))]
    return [Row.model_validate(row) for row in rows]


def gpu_rows_here(machine: Machine, nvml: Any) -> list[Row]:
    """Return the rows of `gpu_rows`, but call NVML (the module `pynvml`) in this process."""
    gpus = Gpus(nvml, machine.devices, JobProcesses(os.getpid()))  # no launch is running
    cards = gpus.cards(gpus.used_bytes())
    fabric = gpus.fabric_states()
    notes = [*gpus.finish(), *(f"{card.name}: {fault}" for card in cards for fault in card.memory_faults)]
    if len(cards) < machine.devices:
        return [unknown("NVML", "; ".join(notes), "run nvidia-smi to see why")]
    faults = "; ".join(notes) or "the GPU driver reports no fault"
    return [
        checked("GPU hardware", faults, ok=not notes, advice="fix or replace the card first"),
        _power_row(cards),
        _alike_row("clocks", [_mhz(card) for card in cards]),
        _alike_row("ECC", [_on(card.ecc) for card in cards]),
        _persistence_row([_on(card.persistence) for card in cards]),
        *_nvlink_rows(cards, fabric),
        *_pcie_rows(cards),
    ]


def _nvlink_rows(cards: Sequence[DeviceHealth], fabric: Sequence[tuple[int, int] | None]) -> list[Row]:
    links = [_nvlinks(card) for card in cards]
    rows = [_alike_row("NVLink", links)] if any(links) else []
    if any(fabric):
        wrong = [card.name for card, state in zip(cards, fabric, strict=True) if state != FABRIC_IS_UP]
        rows.append(_fabric_row(wrong, alone=len(cards) == 1))
    return rows


def _fabric_row(wrong: Sequence[str], *, alone: bool) -> Row:
    check = "NVLink fabric"
    if not wrong:
        return passed(check, "initialized")
    fabric_text = f"not initialized: {', '.join(wrong)}"
    advice = "start NVIDIA's Fabric Manager (systemctl status nvidia-fabricmanager), and check dmesg"
    if alone:
        # Without an NVSwitch, for example in a virtual machine, the fabric is never initialized.
        return unknown(
            check, fabric_text, f"CUDA can work without it on one GPU. If CUDA does not work, {advice}"
        )
    return failed(check, fabric_text, advice)


def _pcie_rows(cards: Sequence[DeviceHealth]) -> list[Row]:
    """Compare the width of each PCIe link with the maximum of the card and its slot.

    Returns an empty list if no width is known.
    """
    links = [(card, card.pcie_lanes, card.pcie_lanes_most) for card in cards]
    narrow = [
        f"{card.name} uses {lanes} of {most} lanes"
        for card, lanes, most in links
        if lanes is not None and most is not None and lanes < most
    ]
    if narrow:
        advice = "reseat the card, and check its riser and slot: copies and collectives over PCIe are slow"
        return [unknown("PCIe", "; ".join(narrow), advice)]
    widths = [None if lanes is None else f"{lanes} lanes" for _, lanes, _ in links]
    return [_alike_row("PCIe", widths)] if any(widths) else []


def _persistence_row(values: Sequence[str | None]) -> Row:
    row = _alike_row("persistence mode", values)
    if row.status == "pass" and "off" in values:
        advice = "turn it on (nvidia-smi -pm 1): without it, locked clocks are lost between launches"
        return unknown(row.check, row.found, advice)
    return row


def _nvlinks(card: DeviceHealth) -> str | None:
    down = f", {card.nvlinks_down} down" if card.nvlinks_down else ""
    return None if card.nvlinks is None else f"{card.nvlinks} up{down}"


def _power_row(cards: Sequence[DeviceHealth]) -> Row:
    power_limits = [(card, card.power_limit_w, card.power_limit_default_w) for card in cards]
    low = [
        f"{card.name} is limited to {limit:.0f} W, but its default is {usual:.0f} W"
        for card, limit, usual in power_limits
        if limit is not None and usual is not None and limit < usual
    ]
    if low:
        advice = "raise it (nvidia-smi -pl) before recording baselines: it limits the speed of these GPUs"
        return unknown("power limit", "; ".join(low), advice)
    limits = sorted({f"{limit:.0f} W" for _, limit, _ in power_limits if limit is not None})
    return passed("power limit", ", ".join(limits)) if limits else unknown("power limit", NOT_REPORTED)


def _alike_row(check: str, values: Sequence[str | None]) -> Row:
    distinct = {value for value in values if value is not None}
    if not distinct:
        return unknown(check, NOT_REPORTED)
    if len(distinct) == 1:
        return passed(check, distinct.pop())
    per_gpu = ", ".join(f"GPU {index}: {value or 'unknown'}" for index, value in enumerate(values))
    return failed(check, per_gpu, "configure all GPUs alike: the slowest GPU sets the pace of a step")


def _mhz(card: DeviceHealth) -> str | None:
    if card.sm_clock_limit_mhz is None:
        return None
    locked = "" if card.sm_clock_set_mhz is None else f", application clock {card.sm_clock_set_mhz:.0f} MHz"
    return f"SM up to {card.sm_clock_limit_mhz:.0f} MHz{locked}"


def _on(flag: bool | None) -> str | None:
    return None if flag is None else "on" if flag else "off"


def device_rows(reports: Sequence[RankReport], machine: Machine) -> list[Row]:
    """Compare the rate of the slowest GPU with that of the fastest GPU, and with the data sheet."""
    if machine.device == "cpu":  # the ranks share the cores
        return []
    rates = defaultdict[str, dict[int, list[float]]](lambda: defaultdict(list))
    for report in reports:
        for name, rate in report.device_probe.items():
            rates[name][report.rank].append(rate)
    return [
        _device_row(name, {rank: median(values) for rank, values in by_rank.items()}, machine)
        for name, by_rank in sorted(rates.items())
    ]


def _device_row(name: str, rates: dict[int, float], machine: Machine) -> Row:
    lowest = min(rates.values())
    highest = max(rates.values())
    rates_text = (
        f"{lowest:.4g} to {highest:.4g} over {len(rates)} GPUs" if len(rates) > 1 else f"{lowest:.4g}"
    )
    slowest = min(rates, key=rates.__getitem__)
    lag = 1 - lowest / highest if highest > 0 else 0.0
    unequal = (
        f"GPU {slowest} is {lag:.0%} slower than the fastest: check its clocks, its power limit, its link, "
        "and other processes that use it"
    )
    if lag > UNEQUAL_LAG:
        return failed(name, rates_text, unequal)
    # The probe multiplies in bf16, or in fp16 on GPUs that emulate bf16.
    peak = machine.peak_flops("fp16-mixed") if name == "matmul_tflops" else None
    if peak is not None:
        share = lowest * 1e12 / peak
        rates_text += f", {share:.0%} of the data sheet's peak"
        if share < MIN_SHARE_OF_PEAK:
            advice = f"at least {MIN_SHARE_OF_PEAK:.0%} is usual: check clocks, power limit and temperature"
            return failed(name, rates_text, advice)
    if lag > NOTED_LAG:
        return unknown(
            name, rates_text, f"{unequal}. In launches, this lag is compared with the lag in the baseline"
        )
    if peak is None and len(rates) == 1:
        advice = "there is no other GPU here to compare it with: compare it with a machine of the same class"
        return unknown(name, rates_text, advice)
    return passed(name, rates_text)


def main(described: str) -> None:
    """Print the rows for a machine. `described` is the machine as JSON. `gpu_rows` starts this process."""
    machine = Machine.model_validate_json(described)
    nvml = importlib.import_module("pynvml")
    nvml_process.answer(lambda: [row.model_dump() for row in gpu_rows_here(machine, nvml)])


if __name__ == "__main__":
    main(sys.argv[1])
