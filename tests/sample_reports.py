"""Makes the samples of reports on the pages: `make samples`.

With a directory, it writes the live report there. The session is an example. Its launches are made up, with
speeds and counts close to those measured on two cores. Today's code judges and shows them, so no sample is
older than the code.
"""

import io
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.text import Text

from perfsuite import DDP, FSDP2, Case, Trainer, documents, extensions
from perfsuite.report import spans
from perfsuite.report.html.page import render
from perfsuite.report.terminal import explanation, spans_of, table
from perfsuite.results.baseline import from_runs
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.counts import Counts
from perfsuite.results.rank_report import START_UP, Memory, Observed, SpanTimes
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.verdict.judge import judge
from perfsuite.verdict.overall import with_counts
from perfsuite.verdict.policy import Policy
from tests.benchmarks.hindsight import gallery
from tests.samples import (
    NOISE,
    make_case,
    make_figures,
    make_machine,
    make_result,
    make_run,
    make_session_file,
)

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs"
WIDTH = 100
SAMPLE = re.compile(r"<!-- sample: (\w+) -->\n(?:\n```text\n.*?\n```\n)?", re.DOTALL)
MACHINE = make_machine(device_name="AMD EPYC", hardware_class="cpu-amd-epyc-2c")
SPEEDS: list[tuple[Any, int]] = [
    (DDP(), 12_408),
    (FSDP2(), 5_192),
    (Trainer(fsdp="full_shard auto_wrap"), 4_851),
    *(("torchtitan", 5_011) for name in extensions.own(extensions.FRAMEWORKS) if name == "torchtitan"),
]
"""Tokens/s that were measured on two cores."""
START_UP_S = {"imports": 37.0, "process_group": 0.20, "build": 0.88, "first_step": 1.3}
"""Seconds of a start-up on two cores with a load of 10 to 20: docs/evidence/statistics.md."""
VERSIONS = {"torch": "2.13.0"}
LATE = 70  # the step that is counted after the measured steps


def launch(case: Case, tokens_per_s: float, seed: int, **changes: Any) -> Run:
    """Return a launch at about this speed, with the counts of the case's reviewed baseline."""
    draw = Random(f"{case.id} {seed}")
    speed = tokens_per_s * (1 + draw.gauss(0, 0.01))
    step_s = 512 / speed
    steps = [step_s * (1.6 if number < 5 else 1) * (1 + draw.gauss(0, 0.02)) for number in range(70)]
    peak = 50 * 2**20 + int(2**19 * draw.random())
    figures = make_figures(
        tokens_per_s=speed,
        tokens_per_s_per_device=speed / 2,
        tokens_per_s_mean=speed * 0.98,
        step_s_p50=step_s,
        step_s_p95=step_s * 1.04,
        peak_memory_bytes=peak,
    )
    loss = tuple(0.7 + 5.6 * 0.9**number for number in range(len(steps)))
    start_up = times(sum(START_UP_S.values()), **START_UP_S)
    fields: dict[str, Any] = {
        "step_s": tuple(steps),
        "window": (10, LATE - 1),
        "loss": loss,
        "spans": start_up,
    }
    fields["counts"] = counted(case).counts
    fields["memory"] = tuple(Memory(peak=size, method="allocations") for size in (peak, peak - 2**18))
    fields["duration_s"] = sum(START_UP_S.values()) + sum(steps)
    fields["observed"] = Observed(settings={}, environment=VERSIONS)
    return make_run(case=case, machine=MACHINE, figures=figures, **{**fields, **changes})


def times(start_up_s: float, **parts_s: float) -> dict[str, SpanTimes]:
    """Return the seconds of a start-up and of its parts."""
    parts = {f"{START_UP}: {name.replace('_', ' ')}": seconds for name, seconds in parts_s.items()}
    return {name: SpanTimes(seconds=(seconds,)) for name, seconds in {START_UP: start_up_s, **parts}.items()}


def counted(case: Case) -> CountBaseline:
    """Return the reviewed counts of a case of `bench_cases`, without the loss, which is made up elsewhere."""
    file = ROOT / "baselines" / "counts" / "cpu" / f"{case.id}.json"
    baseline = documents.read(file, CountBaseline)
    (entry,) = baseline.counts
    step = entry.counts
    both = step.with_step(step.of_a_step_alone().replace(step=LATE, memory=None))
    return baseline.replace(versions=VERSIONS, computed=(), counts=(entry.replace(counts=both),))


def script(*, extra_reads: int = 0) -> Run:
    """Return a launch of a script that saves checkpoints. Every 5th step can have extra host reads."""
    case = make_case(framework=FSDP2(), model="llama-tiny", micro_batch=4, max_warmup_steps=20, steps=50)
    run = launch(case, SPEEDS[1][1], extra_reads)
    (entry,) = documents.read(ROOT / "baselines" / "counts" / "cpu" / f"{case.id}.json", CountBaseline).counts
    done = reported = entry.counts
    for number in range(5, 16):
        reads = dict(reported.host_reads) if number % 5 else {"forward": 1 + extra_reads}
        done = done.with_step(reported.of_a_step_alone().replace(step=number, host_reads=reads))
    saved = Counts(bytes_written=5_300_000, collectives_begun=9)
    saves = SpanTimes(seconds=(0.21, 0.19, 0.24), steps=(20, 40, 60))
    return run.replace(
        counts=(entry.replace(counts=done.replace(spans={**done.spans, "save checkpoint": saved})),),
        spans={**run.spans, "save checkpoint": saves},
        data_wait_s=tuple(0.02 + 0.001 * (number % 3) for number in range(70)),
    )


def more_gathered(case: Case) -> dict[str, Any]:
    """Return the counts after a mistake: each all-gather of backward is made twice."""
    (entry,) = counted(case).counts
    collectives = tuple(
        call.replace(count=2 * call.count, bytes=2 * call.bytes)
        if (call.kind, call.phase) == ("all_gather", "backward")
        else call
        for call in entry.counts.collectives
    )
    return {"counts": (entry.replace(counts=entry.counts.replace(collectives=collectives)),)}


def result(case: Case, tokens_per_s: float) -> Measurement:
    """Return the result of a case in a night. FSDP2 gathers more in backward, and is slower."""
    is_slower = case.framework.name == "fsdp2"
    changes = more_gathered(case) if is_slower else {}
    speed = tokens_per_s * (0.8 if is_slower else 1.0)
    runs = [launch(case, speed, seed, **changes) for seed in range(3 if is_slower else 1)]
    before = from_runs([launch(case, tokens_per_s, seed) for seed in range(100, 110)])
    timed = judge(runs, before, NOISE, Policy())
    return make_result(
        *runs,
        nodeid=f"bench_cases/test_cpu.py::test_cpu[{case.id}]",
        verdict=with_counts(timed, runs, counted(case), f"baselines/counts/cpu/{case.id}.json"),
        baseline_file=f"baselines/{MACHINE.hardware_class}/{case.id}.json",
        directory=f".perfsuite/runs/20260102-030405-000000/{case.id}",
    )


@cache
def session() -> SessionFile:
    """Return a night of four cases."""
    tiny = {"model": "llama-tiny", "micro_batch": 4, "max_warmup_steps": 20, "steps": 50}
    results = [result(make_case(framework=framework, **tiny), speed) for framework, speed in SPEEDS]
    return make_session_file(*results, machine=MACHINE)


@cache
def texts() -> dict[str, str]:
    """Return all samples by name, each as a terminal of `WIDTH` columns shows it."""
    results = session().results
    (slower,) = [measured for measured in results if measured.verdict.outcome == "regressed"]
    short = explanation(slower, whole=False)
    (step,) = re.findall(r"^  step .*\n(?:    .*\n)+", explanation(slower), re.MULTILINE)
    both = spans_of(spans.table(spans.rows([script(extra_reads=2)], [script()])), indent="  ")
    whole = {"table": table(results, color=False, width=WIDTH), "regressed": short, "step": step}
    whole["spans"] = "\n".join(both)
    whole["cause"] = short[: short.index("\n  tokens/s with stalls")]
    return {name: text.strip("\n") for name, text in whole.items()}


def with_samples(page: str) -> str:
    """Return a page with its samples replaced by today's samples."""
    made = {name: f"<!-- sample: {name} -->\n\n```text\n{text}\n```\n" for name, text in texts().items()}
    return SAMPLE.sub(lambda match: made[match[1]], page)


def picture() -> str:
    """Return the table and the regression as an SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(table(session().results, color=True, width=WIDTH)), soft_wrap=True)
    console.print()
    console.print(Text(texts()["regressed"]))
    svg = console.export_svg(title="pytest bench_cases", unique_id="perfsuite")
    # Use the viewer's own monospace font instead of fonts from a content delivery network.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def write_pages() -> None:
    """Write the samples into the pages that name them, and also the gallery and the tables of options."""
    for page in (PAGES.parent / "README.md", *sorted(PAGES.rglob("*.md"))):
        page.write_text(with_samples(page.read_text(encoding="utf-8")), encoding="utf-8")
    gallery.write()
    for script in ("command_page.py", "option_table.py"):
        subprocess.run([sys.executable, str(PAGES / script)], check=True)


def write_live(site: Path) -> None:
    """Write the report of the session."""
    documents.write_text(site / "live" / "report.html", render([session()]))


if __name__ == "__main__":
    if sys.argv[1:]:
        write_live(Path(sys.argv[1]))
    else:
        write_pages()
