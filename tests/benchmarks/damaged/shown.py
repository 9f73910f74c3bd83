"""Decides whether a better verdict on a damaged file is excused. There are only two valid reasons.

`equal`: the damaged file is parsed to the same document as the original. `shown`: the damaged file is another
complete and valid document of a kind that people write, and the output names each difference from the
original. This output compares the file with the base of the branch, or is a table with the judged values. A
file that only perfsuite writes is never excused with `shown`.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from perfsuite import documents
from perfsuite.errors import PerfsuiteError
from perfsuite.inputs import ini
from perfsuite.results import waivers
from perfsuite.results.baseline import Baseline
from perfsuite.results.waivers import Waiver

Kind = Literal["baseline", "accepting", "waivers", "settings", "traces", "log", "sealed"]
"""The kind of a file. `accepting`: a baseline whose acceptance makes `history trend` report a regression as
accepted. `sealed`: only perfsuite writes it."""

OF_BASELINES: Sequence[tuple[str, str]] = (
    (r"launches\.\d+\.figures\.tokens_per_s_mean", "with stalls|scatter"),
    (r"launches\.\d+\.figures\.tokens_per_s", "faster|slower|scatter"),
    (r"launches\.\d+\.figures\.peak_memory_bytes", "peak memory"),
    (r"launches\.\d+\.loss", "loss"),
    (r"launches\.\d+\.figures\.gradient_norm", "gradients"),
    (r"launches\.\d+$", "launches"),
    (r"observed", "settings or versions"),
    (r"dtypes", "dtypes"),
    (r"flops", "FLOPs"),
    (r"case\.", "different case"),
    (r"accepted", "accepted"),
)
"""Pattern of paths in a baseline -> pattern of the sentence that reports a change of such a value."""


def excuse(
    kind: Kind, name: str, before: bytes, damage: bytes | str, output: str, usual: str
) -> Literal["equal", "shown"] | None:
    """Return why a better verdict is excused, or None if it is not.

    `output` is the command's output on the damaged file called `name`. `usual` is its output on the original
    file.
    """
    if isinstance(damage, str):
        return None
    with contextlib.suppress(KeyError, ValueError, RecursionError, PerfsuiteError, ValidationError):
        if kind != "log" and _meaning(kind, name, before) == _meaning(kind, name, damage):
            return "equal"
        if _is_shown(kind, name, before, damage, output, usual):
            return "shown"
    return None


def _meaning(kind: Kind, name: str, content: bytes) -> object:
    """Return the parsed content of a file. Raises the errors of its parser."""
    text = content.decode()
    if kind == "waivers":
        return waivers.parsed(name, text)
    if kind == "settings":
        return _flat(ini.parsed(name, text))
    parts = text.splitlines() if kind == "traces" else [text]
    # 1 differs from 1.0 and from true.
    return [json.dumps(documents.parse(part), sort_keys=True) for part in parts]


def _flat(settings: Mapping[str, Any] | None) -> dict[str, str]:
    return {key: str(value) for key, value in (settings or {}).items()}


def _is_shown(kind: Kind, name: str, before: bytes, damage: bytes, output: str, usual: str) -> bool:
    lines = judge_changes(output)
    if kind == "settings":
        then, now = (_flat(ini.parsed(name, content.decode())) for content in (before, damage))
        changed = {key for key in {*then, *now} if then.get(key) != now.get(key)}
        return all(any(key.removeprefix("perf_") in line for line in lines) for key in changed)
    if kind == "waivers":
        both = [waivers.parsed(name, content.decode()) for content in (before, damage)]
        return all(any(word in line for line in lines) for word in _of_waivers(*both))
    if kind in ("baseline", "accepting"):
        both_json = [documents.parse(content.decode()) for content in (before, damage)]
        Baseline.model_validate(both_json[1], context=documents.FROM_FILE)
        if kind == "accepting":  # the report must show that a known regression is accepted
            return '"accepted": true' in output or "worse, accepted" in output
        return _are_told(list(_paths(*both_json)), lines)
    if kind == "traces":
        return _has_all_traces(before, damage, output, usual)
    if kind == "log":  # if the log was cut between two records, the table shows how many values are left
        return "values" in output and output.splitlines()[1:7] != usual.splitlines()[1:7]
    return False


def judge_changes(output: str) -> list[str]:
    """Return what a session's output says about the files that judge the session."""
    _, _, rest = output.partition("This branch changes the files that judge it")
    lines = []
    for line in rest.splitlines()[1:]:
        if not line.startswith("  "):
            break
        if not re.search("cannot be read|changed in nothing", line):
            lines.append(line.strip())
    return lines


def _of_waivers(before: Sequence[Waiver], now: Sequence[Waiver]) -> Iterator[str]:
    """Yield a text for each changed field of a waiver, and for each waiver that was added or removed."""
    if len(before) != len(now):
        yield "added" if len(now) > len(before) else "removed"
    for then, today in zip(before, now, strict=False):
        if (then.case, then.metric) != (today.case, today.metric):
            yield f"waiver of {today.case} on {today.metric} added"
        else:
            yield from (
                f"{name} {getattr(then, name)} -> {getattr(today, name)}"
                for name in Waiver.model_fields
                if getattr(then, name) != getattr(today, name)
            )


def _paths(before: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value that differs between two JSON documents."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {*before, *now}:
            yield from _paths(before.get(key), now.get(key), f"{path}{key}.")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from _paths(*pair, f"{path}{number}.")
    elif json.dumps(before) != json.dumps(now):
        yield path.removesuffix(".")


def _are_told(paths: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether the lines report every changed value of a baseline that is judged."""
    if not lines:
        return False
    for path in paths:
        words = next((words for pattern, words in OF_BASELINES if re.match(pattern, path)), None)
        if words is not None and not any(re.search(words, line) for line in lines):
            return False
    return True


def _has_all_traces(before: bytes, damage: bytes, output: str, usual: str) -> bool:
    """Whether the output has a row for each line of the file.

    The row of a changed line must show the line's tolerance. It must also differ from the row in the usual
    output.
    """
    lines = damage.decode().splitlines()
    rows = _rows(output)
    old_lines = before.decode().splitlines()
    old_rows = _rows(usual)
    if not lines or len(lines) != len(rows):
        return False
    for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
        then = json.loads(old_lines[number]) if number < len(old_lines) else {}
        now = json.loads(line)
        if json.dumps(then, sort_keys=True) == json.dumps(now, sort_keys=True):
            continue
        tolerance = now["tolerance"] if isinstance(now, dict) else None
        if not isinstance(tolerance, float) or "bad line" in row or '"error"' in row:
            return False
        if not (f" {tolerance:.2%}" in row or f'"tolerance": {tolerance}' in row):
            return False
        is_other = number >= len(old_rows) or row != old_rows[number]
        if not is_other:
            return False
    return True


def _rows(output: str) -> list[str]:
    return re.findall(r"^ *\d+  .*|^\{.*\}$", output, re.MULTILINE)
