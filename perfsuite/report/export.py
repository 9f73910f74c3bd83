"""Writes what a session measured as other programs read it: `FORMATS`. Pure: no torch, no pytest, no disk.

Each format holds the tokens/s and the peak memory of every case, and (but for Bencher's, which knows numbers
only) its outcome. What was not measured is left out and is never 0. So are the figures of a case that is no
evidence of its speed (`Measurement.no_evidence`): failed, unhealthy, or with an injected fault.

Of a case that a session measured more than once, the last result is written: readers take one value a name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from perfsuite.report import summary
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S, in_unit
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile

EXPORTED = (TOKENS_PER_S, PEAK_MEMORY)
HELP = {
    "tokens_per_s": "Tokens per second of the whole job, the median of its launches.",
    "samples_per_s": "Samples per second of the whole job, the median of its launches.",
    "peak_memory_bytes": "Peak memory of the rank that needed most, in bytes, the median of its launches.",
    "outcome": "1 for the outcome of each case, which the label names.",
}


def newest(session: SessionFile) -> list[Measurement]:
    """Return the last result of each case. Those of dry runs say nothing of any hardware."""
    launched = [result for result in session.results if not (session.dry or result.dry)]
    return list({result.case_id: result for result in launched}.values())


def figures(result: Measurement) -> dict[str, list[float]]:
    """Return what each launch that counts measured, by name (which has the unit); empty if none counts."""
    if result.no_evidence is not None:
        return {}
    found = {
        in_unit(metric.name, result.unit): [
            value
            for run in result.healthy_runs
            if (value := metric.of(run.figures)) is not None and math.isfinite(value)
        ]
        for metric in EXPORTED
    }
    return {name: values for name, values in found.items() if values}


def hud(session: SessionFile) -> str:
    """Return records of PyTorch's benchmark database, version 3: a JSON array, one record for each figure.

    The fields are those of the table `oss_ci_benchmark_v3` of pytorch/test-infra; what it knows of commit and
    workflow is added by whoever uploads. The outcome is a word, which the table has no number for: as in
    PyTorch's own accuracy benchmarks its record has no `benchmark_values`, and the word in `extra_info`.
    """
    records = []
    for result in newest(session):
        metrics: list[dict[str, Any]] = [
            {"name": name, "benchmark_values": values} for name, values in figures(result).items()
        ]
        metrics.append({"name": "outcome", "extra_info": {"outcome": summary.verdict(result)}})
        records += [{**_hud_case(session, result), "metric": metric} for metric in metrics]
    return json.dumps(records, indent=1, allow_nan=False) + "\n"


def _hud_case(session: SessionFile, result: Measurement) -> dict[str, Any]:
    """What the records of a case share. A case that was never launched is known by its id alone."""
    extra_info = {
        "perfsuite": session.perfsuite,
        "outcome": summary.verdict(result),
        "hardware_class": result.hardware_class or session.machine.hardware_class,
    }
    record: dict[str, Any] = {
        "benchmark": {"name": "perfsuite", "mode": "training", "extra_info": extra_info},
        "model": {"name": result.case_id, "backend": result.framework},
    }
    if not result.runs:
        return record
    run = result.runs[-1]
    record["benchmark"] |= {"dtype": run.case.precision, "extra_info": extra_info | run.case.parameters}
    record["model"]["type"] = run.case.model.name
    record["runners"] = [_hud_runner(run)] * run.case.topology.nodes
    if run.observed is not None and (torch := run.observed.environment.get("torch")) is not None:
        record["dependencies"] = {"torch": {"version": torch}}
    return record


def _hud_runner(run: Run) -> dict[str, Any]:
    """One machine of a launch; memory in GiB, of all its GPUs together, as the database has it."""
    machine = run.machine
    runner = {"name": machine.device_name, "type": machine.hardware_class}
    if machine.device == "cpu":
        gib = round(machine.memory_bytes / 2**30)
        return {
            **runner,
            "cpu_info": machine.device_name,
            "cpu_count": machine.devices,
            "avail_mem_in_gb": gib,
        }
    gib = round(machine.memory_bytes * machine.devices / 2**30)
    return {
        **runner,
        "gpu_info": machine.device_name,
        "gpu_count": machine.devices,
        "avail_gpu_mem_in_gb": gib,
    }


def openmetrics(session: SessionFile) -> str:
    """Return gauges as OpenMetrics 1.0 text.

    Only what the older Prometheus text format has, too, is used: gauges without time stamps. A node exporter
    reads its textfile directory as that older format.
    """
    samples: dict[str, list[str]] = {}
    for result in newest(session):
        labels = {
            "case": result.case_id,
            "framework": result.framework,
            "hardware_class": result.hardware_class or session.machine.hardware_class,
        }
        for name, values in figures(result).items():
            samples.setdefault(name, []).append(_sample(name, labels, median(values)))
        labels["outcome"] = summary.verdict(result)
        samples.setdefault("outcome", []).append(_sample("outcome", labels, 1))
    lines = []
    for name, of_name in samples.items():
        lines += [f"# TYPE perfsuite_{name} gauge", f"# HELP perfsuite_{name} {HELP[name]}", *of_name]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """Write a sample, its labels' values escaped as OpenMetrics asks."""
    escaped = {
        label: text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        for label, text in labels.items()
    }
    written = ",".join(f'{label}="{text}"' for label, text in escaped.items())
    return f"perfsuite_{name}{{{written}}} {value!r}"


def bencher(session: SessionFile) -> str:
    """Return Bencher Metric Format JSON: the median of the launches, with the lowest and the highest of them.

    The format holds numbers alone, so it names no outcome: a case without figures is left out.
    """
    cases = {result.case_id: figures(result) for result in newest(session)}
    content = {
        case_id: {name: _bencher_metric(values) for name, values in by_name.items()}
        for case_id, by_name in cases.items()
        if by_name
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _bencher_metric(values: Sequence[float]) -> dict[str, float]:
    """One launch has no bounds: they would say that it is exact."""
    bounds = {"lower_value": min(values), "upper_value": max(values)} if len(values) > 1 else {}
    return {"value": median(values), **bounds}


FORMATS: Mapping[str, Callable[[SessionFile], str]] = {
    "hud": hud,
    "openmetrics": openmetrics,
    "bencher": bencher,
}
"""What writes each format, by its name on the command line."""
