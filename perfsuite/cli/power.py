"""`perfsuite power`: simulates what the gate can detect, with a given noise or that of a hardware class.

Imports neither torch nor pytest; `simulate` imports numpy when it runs.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.base import require
from perfsuite.launch.machine import detect
from perfsuite.report import paired_power as paired_report
from perfsuite.report import power as report
from perfsuite.report.paired_power import PairedGate
from perfsuite.report.power import Gate, Measured
from perfsuite.report.terminal import console
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.store import BASELINES, STORE, BaselineStore, Store
from perfsuite.verdict import paired_power
from perfsuite.verdict.noise import against, class_noise
from perfsuite.verdict.paired import MAX_PAIRS, MIN_CHANGED
from perfsuite.verdict.power import NoiseModel, PowerTable, simulate
from perfsuite.verdict.sequential import MAX_LAUNCHES

DROPS = (0.0, 0.01, 0.02, 0.03, 0.05)
"""True slowdowns that are simulated without --drop, besides the tolerance."""
DEGREES = 30
"""Degrees of freedom of the noise with --sigma and without --degrees."""
DRIFT = 0.015
"""Drift of the machine with --paired and without --drift: a moderate one."""


Sigma = Annotated[
    str | None, typer.Option(help="noise between launches: 1% or 0.01; without it, the class's own")
]
HardwareClass = Annotated[
    str | None, typer.Option(help="whose baselines tell the noise (default: this machine's class)")
]
Baselines = Annotated[Path, typer.Option(help="reviewed baselines")]
LocalStore = Annotated[Path, typer.Option(help="local store; its baselines/ come second")]
Tolerance = Annotated[
    str | None,
    typer.Option(
        help="slowdown that must not pass (default: the plugin's for tokens/s on this class; with --sigma 3%)"
    ),
]
BaselineLaunches = Annotated[
    int | None,
    typer.Option(
        min=2, max=1000, help="launches in the baseline (default: the class's median; with --sigma 10)"
    ),
]
MaxLaunches = Annotated[int, typer.Option(min=3, max=1000, help="launches at the most")]
Model = Annotated[NoiseModel, typer.Option(help="how launches scatter")]
Trials = Annotated[int, typer.Option(min=1, help="simulated sessions for each slowdown")]
Seed = Annotated[int, typer.Option(min=0, help="equal seeds give equal tables")]
Drops = Annotated[
    list[str] | None,
    typer.Option(
        help="true slowdown to simulate, may be repeated (default: 0, 1, 2, 3, 5 % and the tolerance)"
    ),
]
Degrees = Annotated[
    str | None,
    typer.Option(
        help="degrees of freedom from which the noise is known, or own: the baseline's launches alone "
        "(default: as many as the class has; with --sigma 30)"
    ),
]
Paired = Annotated[
    bool,
    typer.Option("--paired", help="simulate perfsuite compare, whose launches alternate between two arms"),
]
Drift = Annotated[
    str | None,
    typer.Option(
        help="with --paired: how far the machine wanders within 24 launches (default 1.5%; 0: none)"
    ),
]
MaxPairs = Annotated[
    int | None,
    typer.Option(
        min=MIN_CHANGED, max=MAX_PAIRS, help=f"with --paired: pairs at the most (default {MAX_PAIRS})"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="for machines: shares from 0 to 1")]


def power(
    sigma: Sigma = None,
    hardware_class: HardwareClass = None,
    baselines: Baselines = BASELINES,
    store: LocalStore = STORE,
    tolerance: Tolerance = None,
    baseline_launches: BaselineLaunches = None,
    max_launches: MaxLaunches = MAX_LAUNCHES,
    noise_model: Model = "normal",
    trials: Trials = 20_000,
    seed: Seed = 0,
    drop: Drops = None,
    degrees: Degrees = None,
    paired: Paired = False,
    drift: Drift = None,
    max_pairs: MaxPairs = None,
    json_output: AsJson = False,
) -> None:
    """What can this gate detect? Simulates the engine that judges real launches, beside fixed thresholds."""
    _check_together(
        paired,
        only_paired={"--drift": drift, "--max-pairs": max_pairs},
        only_unpaired={
            "--baseline-launches": baseline_launches,
            "--degrees": degrees,
            "--max-launches": None if max_launches == MAX_LAUNCHES else max_launches,
            "--noise-model": None if noise_model == "normal" else noise_model,
        },
    )
    measured = None
    if sigma is None:
        known = BaselineStore(baselines, Store(store).baselines)
        measured = measured_noise(known, hardware_class, corrected=not paired)
    elif hardware_class is not None:
        raise CaseError("--sigma and --hardware-class both give a noise: keep one of them")
    level = _tolerance(tolerance, measured)
    noise = measured.sigma if measured else fraction("--sigma", str(sigma))
    require("numpy", purpose="to simulate launches")
    if paired:
        paired_gate = PairedGate(
            sigma=noise,
            drift=_drift(drift),
            tolerance=level,
            max_pairs=max_pairs or MAX_PAIRS,
            changes=_drops(drop, level),
            trials=trials,
            seed=seed,
        )
        _show_paired(paired_gate, measured, json_output=json_output)
        return
    gate = Gate(
        sigma=noise,
        tolerance=level,
        baseline_launches=baseline_launches or (measured.baseline_launches if measured else 10),
        max_launches=max_launches,
        degrees=_degrees(degrees, measured),
        noise_model=noise_model,
        session_sigma=measured.session_sigma if measured else 0.0,
        drops=_drops(drop, level),
        trials=trials,
        seed=seed,
    )
    table = _simulate(gate)
    _tell_left_out(measured)
    if json_output:
        typer.echo(json.dumps(report.as_json(gate, measured, table), indent=1, allow_nan=False))
    else:
        console().print(report.render(gate, measured, table))


def _check_together(
    paired: bool, *, only_paired: Mapping[str, object], only_unpaired: Mapping[str, object]
) -> None:
    """Raise `CaseError` for an option that has no meaning with, or without, --paired."""
    refused = only_unpaired if paired else only_paired
    for option, value in refused.items():
        if value is not None:
            advice = "leave one of them out" if paired else "add --paired, or leave it out"
            raise CaseError(f"{option} {'with' if paired else 'without'} --paired has no meaning: {advice}")


def _show_paired(gate: PairedGate, measured: Measured | None, *, json_output: bool) -> None:
    """Simulate a paired comparison, and print what it can detect."""
    with _spinner(f"simulating {gate.trials:,} comparisons of {len(gate.changes)} changes"):
        table = paired_power.simulate(
            sigma=gate.sigma,
            drift=gate.drift,
            tolerance=gate.tolerance,
            changes=gate.changes,
            max_pairs=gate.max_pairs,
            trials=gate.trials,
            seed=gate.seed,
        )
    _tell_left_out(measured)
    if json_output:
        typer.echo(json.dumps(paired_report.as_json(gate, measured, table), indent=1, allow_nan=False))
    else:
        console().print(paired_report.render(gate, measured, table))


def _tell_left_out(measured: Measured | None) -> None:
    """Name the baselines that could not be read."""
    for file in measured.left_out if measured else ():
        typer.echo(f"perfsuite power: {file} cannot be read; its noise is left out", err=True)


def _spinner(doing: str) -> contextlib.AbstractContextManager[object]:
    """Show what takes so long, on a terminal."""
    err = console(stderr=True)
    return err.status(doing) if err.is_terminal else contextlib.nullcontext()


def measured_noise(store: BaselineStore, hardware_class: str | None, *, corrected: bool = True) -> Measured:
    """Return the noise of a hardware class from its baselines; None is this machine's class.

    `corrected`: by the probe, as a gate corrects it; a comparison of two arms estimates its own correction.
    Raises `CaseError` saying what to do if there are no baselines, or too few launches.
    """
    name = _known_class(store, hardware_class)
    baselines = store.of_class(name)
    case_files = {f"{baseline.case.id}.json" for baseline in baselines}
    left_out = [file for file in store.files(name) if file.name not in case_files]
    if not baselines:
        raise CaseError(_unreadable(name, left_out[0]))
    pooled = class_noise(baselines)
    noise = pooled.of(TOKENS_PER_S, corrected=corrected)
    counts = [len(baseline.values(TOKENS_PER_S.name)) for baseline in baselines]
    if noise is None:
        launches = ", ".join(map(str, counts)) or "no"
        raise CaseError(
            f"the baselines of {name} in {store} have {launches} launches: too few to tell a noise (two in "
            "one baseline, beyond its first). Record more launches, or give a noise: --sigma 1%"
        )
    sessions = [baseline.session_sizes(TOKENS_PER_S.name) for baseline in baselines]
    return Measured(
        hardware_class=name,
        baselines=len(baselines),
        launches=sum(counts),
        baseline_launches=int(median(counts)),
        sigma=noise.sigma,
        degrees_of_freedom=noise.degrees_of_freedom,
        session_sigma=median(against(noise, sizes).session_sigma for sizes in sessions if sizes),
        probe_exponent=pooled.probe_exponent if corrected else 0.0,
        left_out=tuple(map(str, left_out)),
    )


def _known_class(store: BaselineStore, hardware_class: str | None) -> str:
    """Return the hardware class, by default this machine's. Raises `CaseError` if it has no baselines."""
    name = hardware_class or detect().hardware_class
    classes = store.hardware_classes()
    if not classes:
        raise CaseError(
            f"no baselines in {store}: record some (run the cases with pytest), or give a noise: --sigma 1%"
        )
    if name not in classes:
        what = "hardware class" if hardware_class else "this machine's hardware class"
        raise CaseError(
            f"{what} {name!r} has no baselines in {store}; --hardware-class may be "
            f"{', '.join(classes)}. Or record some, or give a noise: --sigma 1%"
        )
    return name


def _unreadable(hardware_class: str, file: Path) -> str:
    """Say why a baseline cannot be read, where none of its class can."""
    try:
        documents.read(file, Baseline)
    except FileError as error:
        return f"none of the baselines of {hardware_class} can be read: {error} Or give a noise: --sigma 1%"
    raise AssertionError(f"{file} was unreadable a moment ago")


def fraction(option: str, text: str, *, lowest: float = 0.0, highest: float = 0.5) -> float:
    """Read `1%` or `0.01`, above `lowest` and up to `highest`. Raises `CaseError` naming the option."""
    number = text.strip()
    percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not lowest < value <= highest:
        raise CaseError(
            f"{option} is {text!r}, expected above {lowest:.0%} and up to {highest:.0%}, "
            "in percent or as a fraction: 1% or 0.01"
        )
    return value


def _tolerance(text: str | None, measured: Measured | None) -> float:
    """Return the tolerance: as given, or the plugin's for tokens/s on the class; that of GPUs without one."""
    if text is not None:
        return fraction("--tolerance", text)
    if measured is None:
        return TOKENS_PER_S.tolerance("cuda")
    return TOKENS_PER_S.tolerance("cpu" if measured.hardware_class.startswith("cpu-") else "cuda")


def _degrees(text: str | None, measured: Measured | None) -> int | None:
    """Return the degrees of freedom of the noise; None: only the baseline's own launches tell it."""
    if text is None:
        return max(2, round(measured.degrees_of_freedom)) if measured else DEGREES
    if text == "own":
        return None
    if not text.isascii() or not text.isdigit() or not 2 <= int(text[:9]) <= 1000:
        raise CaseError(
            f"--degrees is {text!r}, expected a whole number from 2 to 1000 (degrees of freedom from which "
            "the noise is known), or own (the baseline's own launches alone)"
        )
    return int(text)


def _drift(text: str | None) -> float:
    """Return the machine's drift; that of a machine that does not drift is 0."""
    if text is None:
        return DRIFT
    return 0.0 if text.strip() in ("0", "0%") else fraction("--drift", text, highest=0.2)


def _drops(texts: list[str] | None, tolerance: float) -> tuple[float, ...]:
    """Return the slowdowns to simulate, ascending, each once. Negative ones are speed-ups."""
    if not texts:
        return tuple(sorted({*DROPS, tolerance}))
    return tuple(sorted({fraction("--drop", text, lowest=-0.5, highest=1.0) for text in texts}))


def _simulate(gate: Gate) -> PowerTable:
    """Simulate the gate, with a spinner on a terminal."""
    with _spinner(f"simulating {gate.trials:,} sessions of {len(gate.drops)} slowdowns"):
        return simulate(
            sigma=gate.sigma,
            tolerance=gate.tolerance,
            baseline_launches=gate.baseline_launches,
            pooled_degrees=gate.degrees,
            drops=gate.drops,
            max_launches=gate.max_launches,
            model=gate.noise_model,
            session_sigma=gate.session_sigma,
            known_session_sigma=gate.session_sigma,
            trials=gate.trials,
            seed=gate.seed,
        )
