"""Write the page of a first night as Markdown."""

from collections import Counter
from collections.abc import Iterable, Sequence

from perfsuite.doctor.rows import Row
from perfsuite.features.first_night.cases import SIMULATED
from perfsuite.features.first_night.night import NOT_RUN
from perfsuite.features.first_night.record import FirstNight
from perfsuite.features.first_night.sessions import REACHED, marker_of
from perfsuite.features.first_night.steps import STEPS
from perfsuite.features.first_night.topology import NCCL_TESTS, TOPOLOGY
from perfsuite.report import markdown
from perfsuite.report.text import NONE, Table, plural

FILE = "first-night.md"
ONLY_SIMULATED = f"{SIMULATED[0].upper()}{SIMULATED[1:]}."
LINKS = (TOPOLOGY, "NVLink", "NVLink fabric", "PCIe")
RATES = ("matmul_tflops", "copy_gb_s", "all_reduce_gb_s", NCCL_TESTS)
NOISE = ("noise", "counts", "cores of the ranks", "one socket", "one thread")


def render(record: FirstNight) -> str:
    """Return the page: the answer, its reasons, and every row of every step."""
    rows = all_rows(record)
    sections = [
        ("Topology", _of_checks(rows, LINKS), "The links were not seen."),
        ("Spread of the GPUs", _compared(rows), _why_not_compared(record)),
        ("Noise, and the smallest change", _of_checks(rows, NOISE), "The noise was not measured."),
        ("Problems", [row for row in rows if row[1].status == "fail"], "No check has failed."),
        ("Refused or not run", [row for row in rows if is_not_run(row[1])], "Nothing was refused."),
        ("Baselines", _of_cases(record), "No case was measured twice, so no baseline is fit to accept."),
    ]
    machine = record.machine
    name = markdown.text(machine.device_name)
    is_cpu = machine.device == "cpu"
    devices = f"{name}, {plural(machine.devices, 'core')}" if is_cpu else f"{machine.devices} x {name}"
    lines = [
        "# First night",
        "",
        *([f"**{ONLY_SIMULATED}**", ""] if record.size == "simulated" else []),
        f"{devices} ({machine.hardware_class}), perfsuite {record.perfsuite}, begun at {record.started_at}",
        "",
        f"**{answer(record)}**",
        "",
        *(line for title, listed, nothing in sections for line in _section(title, listed, nothing)),
        "## All checks",
        "",
        *(line for step in STEPS for line in _step(record, step.name, step.question)),
    ]
    return "\n".join(lines)


def all_rows(record: FirstNight) -> list[tuple[str, Row]]:
    """Return the rows of all steps with the names of their steps, in the order of the steps."""
    results = [record.of(step.name) for step in STEPS]
    return [(result.step, row) for result in results if result is not None for row in result.rows]


def is_not_run(row: Row) -> bool:
    """Return whether a check did not run."""
    return row.status == "unknown" and row.found.startswith(NOT_RUN)


def answer(record: FirstNight) -> str:
    """Return the answer in one or two sentences: what passed, what is open, and which step comes next."""
    rows = [row for _, row in all_rows(record)]
    count = Counter("not run" if is_not_run(row) else row.status for row in rows)
    tally = f"{count['pass']} passed, {count['fail']} failed, {count['unknown']} unknown, "
    tally += f"{count['not run']} not run."
    done = [result.step for result in record.results if result.is_complete]
    left = [step.name for step in STEPS if step.name not in done]
    if left:
        return f"{tally} Not finished: {', '.join(left)}. Run the same command again to continue with them."
    if record.size == "simulated":
        return f"{tally} {ONLY_SIMULATED}"
    if count["fail"]:
        return f"{tally} Before accepting a baseline, repair what failed."
    fit = [row for _, row in _of_cases(record) if row.status == "pass"]
    if not fit:
        return f"{tally} No baseline is fit to accept yet."
    how = f"perfsuite baseline refresh --hardware {marker_of(record.machine)} --reason 'the first night'"
    return f"{tally} {plural(len(fit), 'baseline')} {'is' if len(fit) == 1 else 'are'} fit to accept: {how}"


def _of_checks(rows: Iterable[tuple[str, Row]], checks: Sequence[str]) -> list[tuple[str, Row]]:
    return [(step, row) for step, row in rows if row.check in checks]


def _compared(rows: Iterable[tuple[str, Row]]) -> list[tuple[str, Row]]:
    """Return the rows that compare GPUs. Checks that did not run are in a separate section."""
    return [(step, row) for step, row in _of_checks(rows, RATES) if not is_not_run(row)]


def _why_not_compared(record: FirstNight) -> str:
    if record.machine.device == "cpu":
        return "This machine has no GPU that could be compared."
    return "The GPUs were not compared."


def _of_cases(record: FirstNight) -> list[tuple[str, Row]]:
    result = record.of("cases")
    rows = () if result is None else result.rows
    return [("cases", row) for row in rows if not is_not_run(row) and row.check != REACHED]


def _section(title: str, rows: Sequence[tuple[str, Row]], nothing: str) -> list[str]:
    if not rows:
        return [f"## {title}", "", nothing, ""]
    cells = [(step, row.check, row.status, row.found, row.advice or NONE) for step, row in rows]
    table = Table(headers=("step", "check", "result", "found", "advice"), rows=cells, text_columns=5)
    return [f"## {title}", "", str(markdown.grid(table)), ""]


def _step(record: FirstNight, name: str, question: str) -> list[str]:
    result = record.of(name)
    if result is None:
        return [f"### {name}: {question}", "", "Not begun.", ""]
    cells = [(row.check, row.status, row.found, row.advice or NONE) for row in result.rows]
    table = Table(headers=("check", "result", "found", "advice"), rows=cells, text_columns=4)
    ended = "complete" if result.is_complete else "not complete"
    took = f"{result.seconds / 60:.1f} min, {ended}."
    return [f"### {name}: {question}", "", took, "", str(markdown.grid(table)), ""]
