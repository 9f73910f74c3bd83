"""Export a session in the `FORMATS` of other programs. Values that were not measured are left out."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from perfsuite.frameworks.base import require
from perfsuite.report import summary
from perfsuite.results.metric import PEAK_MEMORY, TOKENS_PER_S, Metric, in_unit
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile

EXPORTED = (TOKENS_PER_S, PEAK_MEMORY)
HELP = {
    "tokens_per_s": "Tokens per second over all ranks, as the median over launches.",
    "samples_per_s": "Samples per second over all ranks, as the median over launches.",
    "peak_memory_bytes": "Highest peak memory of a rank, in bytes, as the median over launches.",
    "outcome": "Always 1. The labels are the outcome of the case and the outcome of its counts.",
}


def newest(session: SessionFile) -> list[Measurement]:
    """Return the last result of each case, because each metric of a case can have only one value.

    Dry runs are left out.
    """
    launched = [result for result in session.results if not (session.dry or result.dry)]
    return list({result.case_id: result for result in launched}.values())


def figures(result: Measurement) -> dict[str, list[float]]:
    """Return the values of each metric in the healthy launches. Without evidence, the result is empty."""
    if result.no_evidence is not None:
        return {}
    by_name = {in_unit(metric.name, result.unit): _finite(metric, result.healthy_runs) for metric in EXPORTED}
    return {name: values for name, values in by_name.items() if values}


def _finite(metric: Metric, runs: Sequence[Run]) -> list[float]:
    values = (metric.of(run.figures) for run in runs)
    return [value for value in values if value is not None and math.isfinite(value)]


def outcomes(result: Measurement) -> dict[str, str]:
    """Return the outcome of a case, and the outcome of its counts (`not counted` if they were not judged)."""
    counts = result.verdict.counts
    counted = "not counted" if counts is None else counts.outcome
    return {"outcome": summary.verdict(result), "counts": counted}


def hud(session: SessionFile) -> str:
    """Return records for PyTorch's benchmark database, version 3: a JSON array with one record per metric.

    The fields are the columns of the table `oss_ci_benchmark_v3` in pytorch/test-infra. The uploader adds
    commit and workflow. An outcome is not a number: as in PyTorch's own accuracy benchmarks, its record has
    no `benchmark_values`, and the outcome is in `extra_info`.
    """
    records = []
    for result in newest(session):
        metrics: list[dict[str, Any]] = [
            {"name": name, "benchmark_values": values} for name, values in figures(result).items()
        ]
        metrics.append({"name": "outcome", "extra_info": outcomes(result)})
        records += [{**_hud_case(session, result), "metric": metric} for metric in metrics]
    return json.dumps(records, indent=1, allow_nan=False) + "\n"


def _hud_case(session: SessionFile, result: Measurement) -> dict[str, Any]:
    """Return the fields that all records of a case share.

    The memory of a machine, in GiB, is the total of its GPUs or, on a machine without GPUs, of the host.
    """
    labels = {"hardware_class": result.hardware_class or session.machine.hardware_class, **outcomes(result)}
    extra_info = {"perfsuite": session.perfsuite, **labels}
    benchmark = {"name": "perfsuite", "mode": "training", "extra_info": extra_info}
    model = {"name": result.case_id, "backend": result.framework}
    record: dict[str, Any] = {"benchmark": benchmark, "model": model}
    if not result.runs:
        return record
    run = result.runs[-1]
    machine = result.runs[-1].machine
    kind = "cpu"
    memory = "avail_mem_in_gb"
    devices = 1
    if machine.device != "cpu":
        kind = "gpu"
        memory = "avail_gpu_mem_in_gb"
        devices = machine.devices
    runner = {
        "name": machine.device_name,
        "type": machine.hardware_class,
        f"{kind}_info": machine.device_name,
        f"{kind}_count": machine.devices,
        memory: round(machine.memory_bytes * devices / 2**30),
    }
    extra_info |= run.case.parameters
    benchmark |= {"dtype": run.case.precision}
    model |= {"type": run.case.model.name}
    record["runners"] = [runner] * run.case.topology.nodes
    if run.observed is not None:
        torch = run.observed.environment.get("torch")
        if torch is not None:
            record["dependencies"] = {"torch": {"version": torch}}
    return record


def openmetrics(session: SessionFile) -> str:
    """Return gauges as OpenMetrics 1.0 text, written by `prometheus_client`.

    The text contains only gauges without time stamps, which are also valid in the older Prometheus format. A
    node exporter expects the older format in its textfile directory. Raises `PackageError` if
    `prometheus_client` is not installed.
    """
    require("prometheus_client", purpose="to write OpenMetrics")
    from prometheus_client import CollectorRegistry, Gauge
    from prometheus_client.openmetrics.exposition import generate_latest

    registry = CollectorRegistry()
    gauges = dict[str, Gauge]()

    def add(name: str, labels: dict[str, str], value: float) -> None:
        if name not in gauges:
            gauges[name] = Gauge(f"perfsuite_{name}", HELP[name], list(labels), registry=registry)
        gauges[name].labels(**labels).set(value)

    for result in newest(session):
        labels = {"case": result.case_id, "framework": result.framework}
        labels["hardware_class"] = result.hardware_class or session.machine.hardware_class
        for name, values in figures(result).items():
            add(name, labels, median(values))
        add("outcome", labels | outcomes(result), 1)
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()


FORMATS: Mapping[str, Callable[[SessionFile], str]] = {"hud": hud, "openmetrics": openmetrics}
"""Name of a format on the command line -> the function that writes it."""
