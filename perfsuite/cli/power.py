"""`perfsuite power`: what can this gate detect? The options, the class's own noise, the table.

Imports neither torch nor pytest; `power.simulate` imports numpy when it runs.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, cast, get_args

import typer
from rich.table import Table
from rich.text import Text

from perfsuite import documents
from perfsuite.errors import CaseError, FileError
from perfsuite.launch.machine import detect
from perfsuite.report.terminal import console
from perfsuite.results.baseline import Baseline
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.store import BASELINES, STORE, BaselineStore, Store
from perfsuite.verdict.noise import against, class_noise
from perfsuite.verdict.power import NoiseModel, PowerRow, PowerTable, simulate
from perfsuite.verdict.sequential import MAX_LAUNCHES

DROPS = (0.0, 0.01, 0.02, 0.03, 0.05)
"""Simulated where none is asked for, and the tolerance with them."""
DEGREES = 30
"""With --sigma: how well the class's noise is known, unless --degrees says otherwise."""


FOUND = 0.95
"""The share of sessions that must find a drop for it to be called detectable."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A hardware class's own noise between launches of unchanged code, as the plugin knows it."""

    hardware_class: str
    baselines: int
    launches: int
    baseline_launches: int
    """The median over the baselines."""
    sigma: float
    degrees_of_freedom: float
    session_sigma: float
    """What a session shares against a baseline, the median over the baselines; 0 where unknown."""
    probe_exponent: float
    left_out: tuple[str, ...]
    """Baseline files that could not be read."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What is simulated. Fractions, not percent."""

    sigma: float
    tolerance: float
    baseline_launches: int
    max_launches: int
    degrees: int | None
    """None: the noise is known from the baseline's own launches alone."""
    noise_model: NoiseModel
    session_sigma: float = 0.0
    """What all launches of a session share against the baseline, as the gate knows."""
    drops: tuple[float, ...]
    trials: int
    seed: int


def power(
    sigma: Annotated[
        str | None, typer.Option(help="noise between launches: 1% or 0.01; without it, the class's own")
    ] = None,
    hardware_class: Annotated[
        str | None, typer.Option(help="whose baselines tell the noise (default: this machine's class)")
    ] = None,
    baselines: Annotated[Path, typer.Option(help="reviewed baselines")] = BASELINES,
    store: Annotated[Path, typer.Option(help="local store; its baselines/ come second")] = STORE,
    tolerance: Annotated[
        str | None,
        typer.Option(
            help="slowdown that must not pass (default: the plugin's for tokens/s on this class; "
            "with --sigma 3%)"
        ),
    ] = None,
    baseline_launches: Annotated[
        int | None,
        typer.Option(
            min=2, max=1000, help="launches in the baseline (default: the class's median; with --sigma 10)"
        ),
    ] = None,
    max_launches: Annotated[int, typer.Option(min=3, max=1000, help="launches at the most")] = MAX_LAUNCHES,
    noise_model: Annotated[
        str, typer.Option(help=f"how launches scatter: {', '.join(get_args(NoiseModel))}")
    ] = "normal",
    trials: Annotated[int, typer.Option(min=1, help="simulated sessions for each drop")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="equal seeds give equal tables")] = 0,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            help="true slowdown to simulate, may be repeated (default: 0, 1, 2, 3, 5 % and the tolerance)"
        ),
    ] = None,
    degrees: Annotated[
        str | None,
        typer.Option(
            help="degrees of freedom from which the noise is known, or own: the baseline's launches alone "
            "(default: as many as the class has; with --sigma 30)"
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="for machines: shares from 0 to 1")] = False,
) -> None:
    """What can this gate detect? Simulates the engine that judges real launches, beside fixed thresholds."""
    measured = None
    if sigma is None:
        measured = measured_noise(BaselineStore(baselines, Store(store).baselines), hardware_class)
    elif hardware_class is not None:
        raise CaseError("--sigma and --hardware-class both give a noise: keep one of them")
    level = _tolerance(tolerance, measured)
    gate = Gate(
        sigma=measured.sigma if measured else _fraction("--sigma", str(sigma)),
        tolerance=level,
        baseline_launches=baseline_launches or (measured.baseline_launches if measured else 10),
        max_launches=max_launches,
        degrees=_degrees(degrees, measured),
        noise_model=_noise_model(noise_model),
        session_sigma=measured.session_sigma if measured else 0.0,
        drops=_drops(drop, level),
        trials=trials,
        seed=seed,
    )
    table = _simulate(gate)
    for file in measured.left_out if measured else ():
        typer.echo(f"perfsuite power: {file} cannot be read; its noise is left out", err=True)
    if json_output:
        typer.echo(json.dumps(_as_json(gate, measured, table), indent=1, allow_nan=False))
    else:
        _show(gate, measured, table)


def measured_noise(store: BaselineStore, hardware_class: str | None) -> Measured:
    """The noise of one hardware class from its baseline files. Raises `CaseError` saying what to do."""
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
    found = store.of_class(name)
    names = {f"{each.case.id}.json" for each in found}
    left_out = [str(file) for file in store.files(name) if file.name not in names]
    if not found:
        try:
            documents.read(Path(left_out[0]), Baseline)
        except FileError as error:
            raise CaseError(
                f"none of the baselines of {name} can be read: {error} Or give a noise: --sigma 1%"
            ) from None
    pooled = class_noise(found)
    noise = pooled.of(TOKENS_PER_S)
    sessions = [each.session_sizes(TOKENS_PER_S.name) for each in found]
    counts = [len(each.values(TOKENS_PER_S.name)) for each in found]
    if noise is None:
        launches = ", ".join(map(str, counts)) or "no"
        raise CaseError(
            f"the baselines of {name} in {store} have {launches} launches: too few to tell a noise (two in "
            "one baseline, beyond its first). Record more launches, or give a noise: --sigma 1%"
        )
    return Measured(
        hardware_class=name,
        baselines=len(found),
        launches=sum(counts),
        baseline_launches=int(median(counts)),
        sigma=noise.sigma,
        degrees_of_freedom=noise.degrees_of_freedom,
        session_sigma=median(against(noise, sizes).session_sigma for sizes in sessions if sizes),
        probe_exponent=pooled.probe_exponent,
        left_out=tuple(left_out),
    )


def _fraction(option: str, text: str, *, lowest: float = 0.0, highest: float = 0.5) -> float:
    """`1%` or `0.01`, above `lowest` and up to `highest`."""
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
    if text is not None:
        return _fraction("--tolerance", text)
    if measured is None:
        return TOKENS_PER_S.tolerance("cuda")
    return TOKENS_PER_S.tolerance("cpu" if measured.hardware_class.startswith("cpu-") else "cuda")


def _degrees(text: str | None, measured: Measured | None) -> int | None:
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


def _noise_model(name: str) -> NoiseModel:
    if name not in get_args(NoiseModel):
        raise CaseError(f"--noise-model is {name!r}, expected one of {', '.join(get_args(NoiseModel))}")
    return cast(NoiseModel, name)


def _drops(texts: list[str] | None, tolerance: float) -> tuple[float, ...]:
    """In ascending order, each once. Negative ones are speed-ups."""
    if not texts:
        return tuple(sorted({*DROPS, tolerance}))
    return tuple(sorted({_fraction("--drop", text, lowest=-0.5, highest=1.0) for text in texts}))


def _simulate(gate: Gate) -> PowerTable:
    err = console(stderr=True)
    told = f"simulating {gate.trials:,} sessions of {len(gate.drops)} drops"
    with err.status(told) if err.is_terminal else contextlib.nullcontext():
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


def is_blind(gate: Gate, table: PowerTable) -> bool:
    """Whether it often misses its tolerance: it says so itself, and the simulation does not refute it."""
    found = [row.regressed for row in table.rows if row.drop == gate.tolerance]
    return table.minimum_detectable_drop > gate.tolerance and not (found and found[0] >= FOUND)


def sentence(gate: Gate, table: PowerTable) -> str:
    """What the gate can and cannot do, in one sentence."""
    smallest, level = table.minimum_detectable_drop, _percent(gate.tolerance)
    rows = {row.drop: row for row in table.rows}
    found = ""
    if (at := rows.get(gate.tolerance)) is not None:
        found = (
            f" (found in {_share(at.regressed, gate.trials)} of the sessions, "
            f"missed in {_share(at.passed + at.improved, gate.trials)}, "
            f"inconclusive in {_share(at.inconclusive, gate.trials)})"
        )
    alarms = ""
    if (unchanged := rows.get(0.0)) is not None:
        alarms = (
            f", and calls unchanged code regressed in {_share(unchanged.regressed, gate.trials)} "
            f"after {unchanged.mean_launches:.1f} launches on average"
        )
    if not is_blind(gate, table):
        just = (
            f"it could hold a tolerance down to {_percent(smallest)}"
            if smallest <= gate.tolerance
            else f"only just: {table.blind:.0%} of its verdicts call themselves blind"
        )
        return f"This gate finds drops as large as its tolerance of {level}{found}{alarms}; {just}."
    surely = f"only drops of {_percent(smallest)} and more" if math.isfinite(smallest) else "no drop at all"
    return (
        f"This gate is BLIND to drops as small as its tolerance of {level}{found}: about 95 times in 100 "
        f"it finds {surely}{alarms}; a steadier machine, more launches (in the baseline, or at the most "
        "today) or a wider tolerance would mend it."
    )


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _share(value: float, trials: int) -> str:
    """In percent; never 0 of what was merely not seen: 3/n bounds it 95 times in 100."""
    if value == 0:
        return f"under {300 / trials:.2g} %" if trials > 3 else "none"
    return f"{100 * value:.2f} %"


def _source(gate: Gate, measured: Measured | None) -> str:
    if measured is None:
        return f"{_percent(gate.sigma)} between launches, as given"
    doubt = 1 / math.sqrt(2 * measured.degrees_of_freedom)
    corrected = (
        f", corrected by the probe (exponent {measured.probe_exponent:.2f})"
        if measured.probe_exponent
        else ""
    )
    return (
        f"{_percent(gate.sigma)} between launches, give or take {doubt:.0%} of it: {measured.baselines} "
        f"baselines ({measured.launches} launches) of {measured.hardware_class}{corrected}"
    )


def _sessions(measured: Measured | None) -> str:
    if measured is None:
        return "taken to be alike"
    if not measured.session_sigma:
        return "taken to be alike: no baseline has launches of two (perfsuite baseline accept --sessions 3)"
    return f"apart from the baseline by up to {_percent(measured.session_sigma)} (standard deviation)"


def _show(gate: Gate, measured: Measured | None, table: PowerTable) -> None:
    known = (
        "the baseline's own launches" if gate.degrees is None else f"{gate.degrees} pooled degrees of freedom"
    )
    facts = [
        ("noise", f"{_source(gate, measured)} ({gate.noise_model})"),
        ("sessions", _sessions(measured)),
        ("known from", known),
        (
            "gate",
            f"tolerance {_percent(gate.tolerance)}, {gate.baseline_launches} launches in the baseline, "
            f"at most {gate.max_launches} today",
        ),
        ("simulated", f"{gate.trials:,} sessions for each drop, seed {gate.seed}"),
    ]
    out = console()
    for heading, value in facts:
        out.print(Text.assemble((f"{heading:<12}", "bold"), value))
    grid = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    heads = ["true\ndrop", "\nfound", "false\nalarms", "incon-\nclusive", "\npassed", "im-\nproved"]
    heads += ["launches\nused", "fixed\n5 %", f"fixed\n{_percent(gate.tolerance)}"]
    for heading in heads:
        grid.add_column(heading, justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*_cells(row))
    out.print()
    out.print(grid)
    out.print("percent of the sessions; fixed: one sample against one, and a fixed threshold")
    out.print()
    out.print(sentence(gate, table))


def _cells(row: PowerRow) -> list[str]:
    """Percent. A regression where nothing got slower is a false alarm."""
    shares = [row.inconclusive, row.passed, row.improved]
    regressed = f"{100 * row.regressed:.2f}"
    return [
        f"{100 * row.drop:g} %",
        regressed if row.drop > 0 else "-",
        "-" if row.drop > 0 else regressed,
        *(f"{100 * share:.2f}" for share in shares),
        f"{row.mean_launches:.2f}",
        *(f"{100 * share:.2f}" for share in (row.fixed_5_percent, row.fixed_tolerance)),
    ]


def _as_json(gate: Gate, measured: Measured | None, table: PowerTable) -> dict[str, Any]:
    """Everything that was asked, assumed and found. Shares and drops are fractions."""
    smallest = table.minimum_detectable_drop
    rows = {row.drop: row for row in table.rows}
    unchanged, at = rows.get(0.0), rows.get(gate.tolerance)
    return {
        "schema_version": 1,
        **asdict(gate),
        "measured": asdict(measured) if measured else None,
        "minimum_detectable_drop": smallest if math.isfinite(smallest) else None,
        "blind": is_blind(gate, table),
        "blind_share": table.blind,
        "false_alarm_rate": unchanged.regressed if unchanged else None,
        "detection_rate_at_tolerance": at.regressed if at else None,
        "rows": [asdict(row) for row in table.rows],
        "sentence": sentence(gate, table),
    }
