"""Describe changes to the files that affect verdicts: baselines, waivers, settings and cases. Pure."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from statistics import median
from typing import Any, NamedTuple, TypeVar

from perfsuite import documents
from perfsuite.errors import FileError, PerfsuiteError, shortened
from perfsuite.inputs import ini
from perfsuite.results import waivers
from perfsuite.results.amounts import amount
from perfsuite.results.baseline import Acceptance, Baseline, BaselineDocument, BaselineLaunch
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.counts import are_alike
from perfsuite.results.metric import TOKENS_PER_S, TOKENS_PER_S_MEAN, judged_metrics
from perfsuite.results.waivers import Waiver
from perfsuite.verdict import exact
from perfsuite.verdict.loss import part_of_steps

UNREADABLE = "\0"  # stands for the content of anything that is not a file, or is too large to read
LONGEST = 60  # maximum number of characters of a setting's value
MOST_COUNTS = 3  # maximum number of changed counts that are named for a baseline
_WORDS = {
    TOKENS_PER_S.name: ("faster", "slower"),
    TOKENS_PER_S_MEAN.name: ("faster with stalls", "slower with stalls"),
}
"""Words for a larger and a smaller value of a metric. Other metrics use "more" and "less"."""
COUNTS = "counts"  # folder of the baselines of counts, below the directory of the baselines
PROFILES = "profiles"  # folder of the profiles, which do not affect verdicts
_CODEOWNERS = ("CODEOWNERS", ".github/CODEOWNERS", "docs/CODEOWNERS")
_A_CASE = re.compile(
    r"^\s*(async )?def test\w*\([^)]*\bbench\b|^from perfsuite import\b.*\bCase\b", re.MULTILINE
)

B = TypeVar("B", bound=BaselineDocument)
T = TypeVar("T")


class FileChange(NamedTuple):
    """A file that differs between the trees of two commits."""

    name: str  # relative to the top of the repository, with slashes
    before: str | None  # its text at the base; None if it did not exist
    now: str | None  # its text now; None if it does not exist
    link: str | None = None  # target of the link, if the file is now a link

    @property
    def word(self) -> str:
        """What happened to the file: `added`, `deleted` or `changed`."""
        return "added" if self.before is None else "deleted" if self.now is None else "changed"


class Places(NamedTuple):
    """Paths of the files that affect verdicts, relative to the top directory of the repository.

    The path of the top directory itself is `.`.
    """

    root: str  # pytest's root directory
    baselines: str
    cases: str
    # Files to which symbolic links point. They may lie outside of these directories.
    linked: frozenset[str] = frozenset()


def sentences(changes: Iterable[FileChange], places: Places, base: str) -> list[str]:
    """Describe the changes that affect verdicts, most important first. `base` names the earlier tree."""
    by_kind = dict[str, list[str]]()
    for change in sorted(changes):
        kind, lines = _kind_and_lines(change, places, base)
        by_kind.setdefault(kind, []).extend(lines)
    return [
        line
        for kind in ("ini", "waivers", "baseline", "code", "case", "workflow")
        for line in by_kind.get(kind, ())
    ]


def is_of_judge(name: str, places: Places) -> bool:
    """Return whether a file of this name can affect verdicts. Any Python file can."""
    return name.endswith(".py") or _kind(name, places) is not None


def _kind(name: str, places: Places) -> str | None:
    path = PurePosixPath(name)
    if path.name in ini.FILES:
        return "ini"
    if name == (PurePosixPath(places.root) / waivers.FILE).as_posix():
        return "waivers"
    if path.is_relative_to(places.baselines) and path.suffix == ".json":
        return "baseline"
    if path.name == "conftest.py":
        return "code"
    if name in places.linked or (path.suffix == ".py" and path.is_relative_to(places.cases)):
        return "case"
    if (
        path.is_relative_to(".github/workflows")
        or path.is_relative_to(".github/actions")
        or name in _CODEOWNERS
    ):
        return "workflow"
    return None


def _kind_and_lines(change: FileChange, places: Places, base: str) -> tuple[str, Sequence[str]]:
    kind = _kind(change.name, places)
    try:
        if kind == "ini":
            return kind, _of_ini(change, base)
        if kind == "waivers":
            return kind, _of_waivers(change, base)
        if kind == "baseline":
            return kind, _of_baseline(change, places, base)
    except FileError as unreadable:
        return str(kind), [str(unreadable)]
    if kind in ("code", "workflow"):
        return kind, [f"{change.name} {_by_lines(change)}"]
    if kind == "case" or any(
        text is not None and _A_CASE.search(text) for text in (change.before, change.now)
    ):
        return "case", [f"case file {change.name} {_by_lines(change)}"]
    return "", ()


def _by_lines(change: FileChange) -> str:
    if change.link is not None:
        return f"is now a link to {change.link}"
    if UNREADABLE in (change.before, change.now):
        return change.word
    before = Counter((change.before or "").splitlines())
    now = Counter((change.now or "").splitlines())
    added = (now - before).total()
    removed = (before - now).total()
    if change.word != "changed":
        return f"{change.word}: {_lines(added or removed)}"
    if not (added or removed):
        return "changed: its lines are in a different order"
    return f"changed: {_lines(added)} added, {_lines(removed)} removed"


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"


def _of_ini(change: FileChange, base: str) -> list[str]:
    """Describe changes of pytest's settings. Empty if the file has no settings on either side."""

    def settings(text: str | None) -> Mapping[str, Any]:
        return {} if text is None else ini.parsed(change.name, text) or {}

    before, now = _both(change, settings, change.name, base)
    lines = [
        f"{change.name}: {_of_setting(key, before.get(key), now.get(key))}"
        for key in sorted({*before, *now})
        if _flat(before.get(key)) != _flat(now.get(key))
    ]
    if change.word != "changed" and (before or now):
        lines.insert(0, f"{change.name}, which contains settings of pytest, was {change.word}")
    return lines


def _of_setting(key: str, before: Any, now: Any) -> str:
    then = _flat(before)
    today = _flat(now)
    if key == "perf_shadow" and {then, today} <= {None, "true", "false"}:
        return f"shadow mode {'on: no case fails a test' if today == 'true' else 'off'}"
    both = [text or "not set" for text in (then, today)]
    if max(map(len, both)) > LONGEST:
        lost, new = ([*filter(None, re.split(r"\s*\n\s*", text or ""))] for text in (then, today))
        words = [f"without {line}" for line in lost if line not in new] + [
            line for line in new if line not in lost
        ]
        return f"{key} changed: {shortened('; '.join(words), 3 * LONGEST)}"
    return f"{key} {both[0]} -> {both[1]}"


def _flat(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value).strip()


def _of_waivers(change: FileChange, base: str) -> list[str]:
    def by_name(text: str | None) -> dict[str, Waiver]:
        return _by_name(() if text is None else waivers.parsed(change.name, text))

    before, now = _both(change, by_name, change.name, base)
    lines = []
    for name in dict.fromkeys([*now, *before]):
        then = before.get(name)
        today = now.get(name)
        if then is None and today is not None:
            lines.append(f"waiver of {name} added: {today.tolerated} tolerated until {today.until}")
        elif then is not None and today is None:
            lines.append(
                f"waiver of {name} removed: it tolerated {then.tolerated} and was to end on {then.until}"
            )
        elif then is not None and today is not None and then != today:
            fields = [
                f"{field} {getattr(then, field)} -> {getattr(today, field)}"
                for field in Waiver.model_fields
                if getattr(then, field) != getattr(today, field)
            ]
            lines.append(f"waiver of {name}: {', '.join(fields)}")
    return lines


def _by_name(entries: Iterable[Waiver]) -> dict[str, Waiver]:
    """Return waivers by case and metric. If several have the same case and metric, the names are numbered."""
    by_name = dict[str, Waiver]()
    for entry in entries:
        name = f"{entry.case} on {entry.metric}"
        number = sum(used_name == name or used_name.startswith(f"{name} (") for used_name in by_name)
        by_name[f"{name} ({number + 1})" if number else name] = entry
    return by_name


def _of_baseline(change: FileChange, places: Places, base: str) -> list[str]:
    below = PurePosixPath(change.name).relative_to(places.baselines)
    folder = below.parent.name or "."
    case_id = below.stem
    if below.parts[0] == PROFILES:
        return []
    if below.parts[0] == COUNTS:
        name = f"baseline of the counts of {case_id} on {folder}"
        counts = _both(change, partial(_read, CountBaseline), f"{name} ({change.name})", base)
        return _changed(name, change, _counts_differ(*counts))
    name = f"baseline of {case_id} on {folder}"
    times = _both(change, partial(_read, Baseline), f"{name} ({change.name})", base)
    return _changed(name, change, _times_differ(*times))


def _changed(name: str, change: FileChange, differences: Iterable[str]) -> list[str]:
    if change.word != "changed":
        return [f"{name} {change.word}"]
    return [f"{name}: {', '.join(differences) or 'nothing that is judged has changed'}"]


def _read(kind: type[B], text: str | None) -> B | None:
    return None if text is None else kind.model_validate(json.loads(text), context=documents.FROM_FILE)


def _both(change: FileChange, read: Callable[[str | None], T], name: str, base: str) -> tuple[T, T]:
    """Parse a file on both sides with `read`, which gets None for a file that does not exist.

    Raises `FileError` if a side cannot be parsed. The message names this side, and refers to the file by
    `name`.
    """
    both = []
    for text, where in ((change.before, f"at {base}"), (change.now, "in its current version")):
        try:
            both.append(read(text))
        except (ValueError, RecursionError, PerfsuiteError):
            raise FileError(f"{name} cannot be read {where}, so its changes are not known") from None
    before, now = both
    return before, now


def _times_differ(before: Baseline | None, now: Baseline | None) -> Iterator[str]:
    if before is None or now is None:
        return
    launches = (*before.launches, *now.launches)
    metrics = judged_metrics(launch.figures for launch in launches)
    for metric in metrics:
        more, less = _WORDS.get(metric.name, (f"more {metric.label}", f"less {metric.label}"))
        medians = before.median(metric.name), now.median(metric.name)
        if None in medians and medians[0] != medians[1]:
            both = [amount(value, metric.unit) for value in medians]
            yield f"{metric.label} {both[0]} -> {both[1]}"
        else:
            yield from _ratio(medians[0] or 0, medians[1] or 0, metric.unit, more=more, less=less)
    if len(before.launches) != len(now.launches):
        yield f"launches {len(before.launches)} -> {len(now.launches)}"
    for metric in metrics:
        scatter = [_scatter(baseline.values(metric.name)) for baseline in (before, now)]
        if scatter[1] >= scatter[0] + 0.01:
            of_what = "" if metric is TOKENS_PER_S else f" in {metric.label}"
            yield f"scatter of its launches{of_what} {scatter[0]:.1%} -> {scatter[1]:.1%}"
    if before.case != now.case:
        yield "different case"
    yield from _losses_differ(before, now)
    norms = [
        _median(launch.figures.gradient_norm for launch in baseline.launches) for baseline in (before, now)
    ]
    if not _is_close(norms[0], norms[1], 0.01):
        yield f"norm of the gradients {_number(norms[0])} -> {_number(norms[1])}"
    if before.dtypes != now.dtypes:
        yield "dtypes changed"
    if before.observed != now.observed:
        yield "settings or versions changed"
    if before.flops != now.flops:
        yield "FLOPs changed"
    yield from _acceptance(before.accepted, now.accepted)


def _losses_differ(before: Baseline, now: Baseline) -> Iterator[str]:
    """Yield how the losses of two baselines differ in the last part of the steps in which they differ.

    A launch has one recorded loss for each part of the steps.
    """
    longest = max(len(launch.loss) for launch in (*before.launches, *now.launches))
    for behind in range(1, longest + 1):
        both = [_median(_loss(launch, behind) for launch in baseline.launches) for baseline in (before, now)]
        if not _is_close(both[0], both[1], 0.001):
            where = "at the end" if behind == 1 else part_of_steps(longest - behind, longest)
            yield f"loss {where} {_number(both[0])} -> {_number(both[1])}"
            return


def _loss(launch: BaselineLaunch, behind: int) -> float | None:
    return launch.loss[-behind] if len(launch.loss) >= behind else None


def _is_close(before: float | None, now: float | None, relative: float) -> bool:
    if before is None or now is None:
        return before is now
    return math.isclose(before, now, rel_tol=relative)


def _median(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return median(measured) if measured else None


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _scatter(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / max(values) if values and max(values) > 0 else 0.0


def _ratio(before: float, now: float, unit: str, *, more: str, less: str) -> Iterator[str]:
    """Yield the change of a value: as a factor if it is at least 1.1, and otherwise as a percentage."""
    if before == now:
        return
    if not before or not now or before < 0 or now < 0:
        yield f"{amount(before, unit)} -> {amount(now, unit)} ({less if before else more})"
        return
    word = more if now > before else less
    factor = max(now / before, before / now)
    yield f"x {factor:.2f} {word}" if factor >= 1.1 else f"{factor - 1:.1%} {word}"


def _counts_differ(before: CountBaseline | None, now: CountBaseline | None) -> Iterator[str]:
    if before is None or now is None:
        return
    if not are_alike(before.method, now.method):
        yield f"counted with the method {now.method!r} instead of {before.method!r}"
    else:
        differences = [finding.sentence for finding in exact.count_differences(before, now)]
        yield from differences[:MOST_COUNTS]
        if len(differences) > MOST_COUNTS:
            yield f"and {len(differences) - MOST_COUNTS} more counts"
        lost = exact.missing_ranks(before, now)
        if lost:
            yield f"{lost} no longer counted"
    unjudged = sorted({*now.unsteady} - {*before.unsteady})
    if unjudged:
        yield f"no longer judged: {', '.join(unjudged)}"
    if before.case != now.case:
        yield "different case"
    yield from exact.changed_versions(before.versions, now.versions)
    yield from _acceptance(before.accepted, now.accepted)


def _acceptance(before: Acceptance | None, now: Acceptance | None) -> Iterator[str]:
    if before == now:
        return
    if now is None:
        yield "no longer accepted by anyone"
    else:
        yield f"accepted by {now.by} on {now.date}, reason: {now.reason or 'none given'}"
