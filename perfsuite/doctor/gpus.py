"""Check the setup of the GPUs with NVML. Compare their speed with each other and with the data sheet."""

import importlib
import os
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from perfsuite.analysis.health import laggard
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, checked, failed, passed, unknown
from perfsuite.node.nvml import Gpus
from perfsuite.node.processes import JobProcesses
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import DeviceHealth

MIN_SHARE_OF_PEAK = 0.4  # of the data sheet's dense peak in a 4096 x 4096 matmul; healthy GPUs exceed this
NOT_REPORTED = "NVML does not report it"
FABRIC_IS_UP = (3, 0)
"""State and status of a GPU whose NVLink fabric is set up: NVML_GPU_FABRIC_STATE_COMPLETED, NVML_SUCCESS."""


def gpu_rows(machine: Machine, nvml: Any | None = None) -> list[Row]:
    """Check the setup of the GPUs and look for faulty cards with NVML. `nvml` is `pynvml` by default."""
    if machine.device == "cpu":
        return []
    if nvml is None:
        nvml = importlib.import_module("pynvml")
    gpus = Gpus(nvml, machine.devices, JobProcesses(os.getpid()))  # no launch is running
    cards = gpus.cards(gpus.used_bytes())
    fabric = gpus.fabric_states()
    notes = [*gpus.finish(), *(f"{card.name}: {fault}" for card in cards for fault in card.memory_faults)]
    if len(cards) < machine.devices:
        return [unknown("NVML", "; ".join(notes), "run nvidia-smi to see why")]
    faults = "; ".join(notes) or "no fault is known to the driver"
    return [
        checked("GPU hardware", faults, ok=not notes, advice="fix or replace the card first"),
        _power_row(cards),
        _alike_row("clocks", [_mhz(card) for card in cards]),
        _alike_row("ECC", [_on(card.ecc) for card in cards]),
        _alike_row("persistence mode", [_on(card.persistence) for card in cards]),
        *_nvlink_rows(cards, fabric),
    ]


def _nvlink_rows(cards: Sequence[DeviceHealth], fabric: Sequence[tuple[int, int] | None]) -> list[Row]:
    links = [_nvlinks(card) for card in cards]
    rows = [_alike_row("NVLink", links)] if any(links) else []
    if any(fabric):
        wrong = [card.name for card, state in zip(cards, fabric, strict=True) if state != FABRIC_IS_UP]
        advice = "start NVIDIA's Fabric Manager (systemctl status nvidia-fabricmanager), and check dmesg"
        fabric_text = f"not initialized: {', '.join(wrong)}" if wrong else "initialized"
        rows.append(checked("NVLink fabric", fabric_text, ok=not wrong, advice=advice))
    return rows


def _nvlinks(card: DeviceHealth) -> str | None:
    down = f", {card.nvlinks_down} down" if card.nvlinks_down else ""
    return None if card.nvlinks is None else f"{card.nvlinks} up{down}"


def _power_row(cards: Sequence[DeviceHealth]) -> Row:
    power_limits = [(card, card.power_limit_w, card.power_limit_default_w) for card in cards]
    low = [
        f"{card.name} is limited to {limit:.0f} W, its default is {usual:.0f} W"
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
    """Compare the rates of the GPUs in the same work: the slowest with the fastest and the data sheet."""
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
    lag = laggard(rates)
    if lag is not None:
        rank, _, behind = lag
        advice = (
            f"GPU {rank} is {behind:.0%} slower than the fastest: check its clocks, its power limit, its "
            "link, and other processes that use it"
        )
        return failed(name, rates_text, advice)
    peak = machine.peak_flops("bf16") if name == "matmul_tflops" else None
    if peak is not None:
        share = lowest * 1e12 / peak
        rates_text += f", {share:.0%} of the data sheet's peak"
        if share < MIN_SHARE_OF_PEAK:
            advice = f"at least {MIN_SHARE_OF_PEAK:.0%} is usual: check clocks, power limit and temperature"
            return failed(name, rates_text, advice)
    elif len(rates) == 1:
        advice = "there is no other GPU here to compare it with: compare it with a machine of the same class"
        return unknown(name, rates_text, advice)
    return passed(name, rates_text)
