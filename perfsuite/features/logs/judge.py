"""`perfsuite judge`: judge the step times of other tools in the same way as those of perfsuite's launches.

The input is a file of traces, in which each line is a JSON object with the fields of `Trace`. With
`--baseline`, the input consists of logs of launches (`event_files`). The page on existing jobs in the docs
explains these inputs.
"""

import codecs
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, BinaryIO

import typer
from pydantic import ConfigDict, FailFast, Field, ValidationError
from pydantic_core import from_json, to_json

from perfsuite import documents
from perfsuite.analysis.figures import find_window
from perfsuite.cli.shared import tolerance as share
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.documents import Data, explain
from perfsuite.errors import CaseError, FileError
from perfsuite.features.logs.event_files import LONGEST, MEGATRON_TAG, check_different, read_log
from perfsuite.inputs.files import LARGEST, open_file
from perfsuite.report.safe_text import printable, visible
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES, Decision, Noise, decide, pooled_noise

SHORT_SERIES = 15  # the end of warm-up is searched for only in launches with at least this many steps
MAX_WARMUP = 20  # maximum number of warm-up steps: 2/7 of the 70 steps of a real launch

FEWEST_BASELINE = 3  # minimum number of launches in a baseline to estimate the noise between launches
HEADINGS = f"{'outcome':<12}  {'change':>8}  {'99% interval':^20}  launches  tolerance  detects"

# The upper limit, 30 million years, keeps sums finite.
Seconds = Annotated[float, Field(gt=0, lt=LONGEST)]
Series = Annotated[list[Seconds], Field(min_length=1), FailFast()]
Launches = Annotated[list[Series], Field(min_length=1), FailFast()]


class Strict(Data):
    """Data whose numbers must be finite numbers in JSON, and not text or booleans."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class KnownNoise(Strict):
    """The noise between launches, if it is known from elsewhere (`perfsuite.verdict.sequential.Noise`)."""

    sigma: float = Field(gt=0, lt=1)
    degrees_of_freedom: float = Field(gt=0, le=1e9)
    session_sigma: float = Field(default=0.0, ge=0, lt=1)


class Trace(Strict):
    """One line of input: a baseline, and the launches to judge. A launch is a list of seconds per step."""

    tolerance: float = Field(gt=0, lt=1)
    baseline: Launches
    launches: Launches
    noise: KnownNoise | None = None
    max_launches: int | None = Field(default=None, ge=FEWEST_LAUNCHES, le=1000)


RATE = re.compile(
    r"throughput|tflop|speed|bandwidth|utili[sz]ation"
    r"|((?<![a-z])per[-_ ]?|/|(tokens|samples|sequences|images|examples|frames)[-_ ])s(ec(ond)?s?)?(?![a-z])"
    r"|(?<![a-z])(mfu|hfu|tps|tgs|qps|fps)(?![a-z])",
    re.IGNORECASE,
)
"""Matches tags of rates. If rates were judged as times, every verdict would be the wrong way round."""


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """An input line that cannot be judged, and the reason."""

    error: str
    line: int
    field: str


def seconds_per_step(series: Sequence[float]) -> float:
    """Return the median of a launch's steps after warm-up, in seconds.

    The end of warm-up is found as in a real launch (`perfsuite.analysis.figures`). Warm-up is at most 20
    steps, and at most two sevenths of the steps. If there are fewer than 15 steps, the median of all steps is
    returned.
    """
    if len(series) < SHORT_SERIES:
        return median(series)
    window = find_window(series, min(MAX_WARMUP, 2 * len(series) // 7))
    return median(series[window.start :])


def judge_trace(trace: Trace) -> Decision:
    """Judge launch by launch, like a real session. Raises `CaseError` if the noise is unknown.

    If there is no decision after all launches, the outcome is "inconclusive". It is "passed" instead if the
    launches look faster and a slowdown beyond the tolerance is excluded. One or two launches can pass, but
    never regress.
    """
    baseline = [seconds_per_step(series) for series in trace.baseline]
    noise = _noise(trace, baseline)
    most = trace.max_launches or max(FEWEST_LAUNCHES, min(MAX_LAUNCHES, len(trace.launches)))
    launches: list[float] = []
    for series in trace.launches[:most]:
        launches.append(seconds_per_step(series))
        decision = decide(baseline, launches, tolerance=trace.tolerance, noise=noise, max_launches=most)
        if decision.outcome != "undecided":
            return decision
    return _after_the_last(decision, trace.tolerance)


def judge_at_once(baseline: Launches, launches: Launches, tolerance: float) -> Decision:
    """Judge all launches together, because they have already been made.

    Unlike in `judge_trace`, a good first launch does not end the test before the others are read.
    """
    before = [seconds_per_step(series) for series in baseline]
    now = [seconds_per_step(series) for series in launches]
    most = max(FEWEST_LAUNCHES, len(now))
    decision = decide(before, now, tolerance=tolerance, noise=pooled_noise([before]), max_launches=most)
    return _after_the_last(decision, tolerance) if decision.outcome == "undecided" else decision


def _after_the_last(decision: Decision, tolerance: float) -> Decision:
    faster = decision.estimate < 0 and decision.interval[1] < tolerance
    return replace(decision, outcome="passed" if faster else "inconclusive")


def _noise(trace: Trace, baseline: list[float]) -> Noise:
    if trace.noise is not None:
        return Noise(**trace.noise.model_dump())
    if len(baseline) < FEWEST_BASELINE:
        raise CaseError(
            f"missing, and it cannot be estimated from a baseline of {len(baseline)}. Give 3 or more "
            'launches in "baseline", or "noise": {"sigma": 0.01, "degrees_of_freedom": 30}'
        )
    return pooled_noise([baseline])


def answer(number: int, line: bytes) -> Decision | BadLine:
    """Judge one line. Line numbers start at 1."""
    text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    if not text.strip():
        return BadLine(error="blank; expected a trace, a JSON object", line=number, field="(whole)")
    try:
        trace = Trace.model_validate_json(text)
    except ValidationError as error:
        return _bad(number, error)
    try:
        documents.parse(text.decode())  # rejects duplicate fields; pydantic would use the last one
    except ValueError as error:
        return BadLine(error=_cut(f"not JSON: {error}", 500), line=number, field="(whole)")
    try:
        return judge_trace(trace)
    except CaseError as error:
        return BadLine(error=f"noise: {error}", line=number, field="noise")


def _bad(number: int, error: ValidationError) -> BadLine:
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = str(first["ctx"]["error"]).replace(" at line 1 column ", " at column ")
        return BadLine(error=f"not JSON: {reason}", line=number, field="(whole)")
    field = ".".join(str(part) for part in first["loc"]) or "(whole)"
    return BadLine(error=_cut(explain(error), 500), line=number, field=_cut(field, 100))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


@shares("as_json")
def judge(
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="A file of traces, with one JSON object per line, or - for standard input. With --baseline: "
            "logs of launches, in order.",
        ),
    ],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(help="TensorBoard log of a launch before the change. Give at least three logs."),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(help="Scalar to judge, which must be a time (default: Megatron's iteration-time)."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            parser=share, metavar="SHARE", help="Largest slowdown that passes, for logs (default: 3%)."
        ),
    ] = None,
    shared: Shared,
) -> None:
    """Judge step times that other tools measured: traces or, with --baseline, TensorBoard logs.

    With traces, the exit status is 1 if a trace could not be judged or if there is none. With logs, it is 1
    if the launches are slower, and 3 if they are inconclusive.
    """
    if baseline:
        _judge_logs(
            [Path(file) for file in files], baseline, tag, tolerance or 0.03, json_output=shared.as_json
        )
    elif len(files) > 1 or tag is not None or tolerance is not None:
        raise CaseError(
            "without --baseline, judge takes one file of traces, and --tag and --tolerance do not apply. "
            "To judge logs, give --baseline LOG three times or more"
        )
    else:
        _judge_lines(files[0], json_output=shared.as_json)


def _judge_logs(
    launches: Sequence[Path],
    baseline: Sequence[Path],
    tag: str | None,
    tolerance: float,
    *,
    json_output: bool,
) -> None:
    if len(baseline) < FEWEST_BASELINE:
        raise CaseError(
            f"--baseline is given {len(baseline)} times, which is too few to estimate the noise between "
            f"launches. Give {FEWEST_BASELINE} logs or more"
        )
    name = tag or MEGATRON_TAG
    if RATE.search(name):
        raise CaseError(
            f"--tag {name} is the name of a rate, of which more is better. Give the tag of a time, of which "
            "more is worse"
        )
    before, now = ([read_log(path, name) for path in paths] for paths in (baseline, launches))
    check_different([*before, *now])
    old, new = ([list(log.series) for log in logs] for logs in (before, now))
    decision = judge_at_once(old, new, tolerance)
    if json_output:
        typer.echo(as_json(decision))
    else:
        typer.echo(f"{'values':>6}  {'median':>10}  {name}")
        for side, logs in (("baseline", before), ("judged", now)):
            for log in logs:
                figure = seconds_per_step(log.series)
                typer.echo(f"{len(log.series):>6}  {figure:>10.4g}  {side}: {printable(str(log.path))}")
        typer.echo(f"\n{HEADINGS}\n{_as_row(decision)}")
    if decision.outcome in ("regressed", "inconclusive"):
        raise typer.Exit(1 if decision.outcome == "regressed" else 3)


def _judge_lines(file: str, *, json_output: bool) -> None:
    counts: Counter[str] = Counter()
    with _opened(file) as stream:
        if not json_output:
            typer.echo(f"{'line':>6}  {HEADINGS}")
        for number, line in enumerate(iter(lambda: stream.readline(LARGEST + 1), b""), start=1):
            if len(line) > LARGEST:
                raise FileError(
                    f"{file}: line {number} has more than {LARGEST:,} bytes, the limit for a trace"
                )
            decision = answer(number, line)
            counts["bad" if isinstance(decision, BadLine) else decision.outcome] += 1
            typer.echo(as_json(decision) if json_output else f"{number:>6}  {_as_row(decision)}")
    if not counts:
        typer.echo(f"perfsuite judge: {file!r} is empty, so nothing was judged", err=True)
    elif not json_output:
        typer.echo(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if counts["bad"] or not counts:
        raise typer.Exit(1)


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """Open a file of traces, or standard input.

    The caller reads line by line, so the file can be larger than memory.
    """
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = open_file(Path(file), sys.maxsize)
    except (OSError, ValueError) as error:  # ValueError: the name contains NUL
        raise FileError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    with stream:
        yield stream


def as_json(decision: Decision | BadLine) -> str:
    """Format a decision as one line of strict JSON. Infinite numbers become null."""
    if isinstance(decision, BadLine):
        return json.dumps(asdict(decision))
    content = from_json(to_json(decision, inf_nan_mode="null"))
    return json.dumps({**content, "blind": decision.blind})


def _as_row(decision: Decision | BadLine) -> str:
    if isinstance(decision, BadLine):
        error = "".join(char if char.isprintable() else "?" for char in visible(decision.error))
        return f"{'bad line':<12}  {error}"
    low, high = decision.interval
    blind = "  blind" if decision.blind else ""
    interval = f"{low:+.2%} to {high:+.2%}"
    return (
        f"{decision.outcome:<12}  {decision.estimate:>+8.2%}  {interval:^20}  "
        f"{decision.launches_used:>8}  {decision.tolerance:>9.2%}  "
        f"{decision.minimum_detectable_drop:>7.2%}{blind}"
    )
