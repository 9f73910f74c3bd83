"""Find the cases of arm A that arm B has deleted, changed or deselected, or that have other marks in arm B.

Both arms of a comparison run the cases of the working tree. If an arm is a commit, its own files can define
different cases. pytest therefore collects the cases of each arm with the code and the interpreter of that
arm.
"""

import os
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from perfsuite import documents
from perfsuite.case.case import NOT_IN_ID, Case, CollectedTest
from perfsuite.dry.cases import collect
from perfsuite.errors import PerfsuiteError
from perfsuite.inputs.ini import CASES, read_ini
from perfsuite.launch.arm import Arm, at_commit, merge_base
from perfsuite.report.text import cut
from perfsuite.results.session_file import CaseChange

SHOWN_FIELDS = 5  # maximum number of changed fields listed for a case
LONGEST_ERROR = 500  # maximum length of the reason why cases could not be collected, in characters
LONGEST_VALUE = 60  # maximum length of a value in messages, in characters
# Maximum number of case pairs that are compared for one test. With more pairs, cases are matched by position.
MOST_PAIRS = 40_000
SAME_TEST_FIELDS = 12
"""Maximum number of fields in which a new case may differ from a lost case of the same test. If they differ
in more fields, the new case does not count as a changed form of the lost one."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The tests that the user wants to compare."""

    paths: Sequence[Path] = ()  # empty: whatever pytest collects by default
    # File -> names of the tests that were selected by node id. No other tests of the file were selected.
    names: Mapping[Path, Sequence[str]] = field(default_factory=dict)
    words: Sequence[str] = ()  # pytest options that select among these tests: `-k`, `-m`
    # Whether all of these tests were requested. False if the user requested only certain case ids.
    asked: bool = True
    # If an arm lacks `paths`: whether to search the directory of cases that is given in the arm's settings.
    is_directory_of_cases: bool = False


def case_changes(
    arms: Sequence[Arm], selection: Selection, store: Path
) -> tuple[tuple[CaseChange, ...], str | None]:
    """Return the changes to cases from arm A to arm B. If they are unknown, also return the reason."""
    a, b = arms
    if a.directory == b.directory:
        return (), None
    with ThreadPoolExecutor(2) as threads:
        begun = [threads.submit(_tests_of, arm, selection, store) for arm in arms]
    tests_by_arm = []
    for letter, collection in zip("AB", begun, strict=True):
        try:
            tests_by_arm.append(collection.result())
        except PerfsuiteError as error:
            why = _in_short(str(error))
            unknown = "it is unknown which cases vanished"
            return (), f"{unknown}, because arm {letter}'s cases could not be collected: {why}"
    changes = tuple(_changes(*tests_by_arm, asked=selection.asked))
    return _of_this_branch(changes, arms, selection, store), None


def _of_this_branch(
    changes: tuple[CaseChange, ...], arms: Sequence[Arm], selection: Selection, store: Path
) -> tuple[CaseChange, ...]:
    """Mark the cases that arm A added after the arms diverged as `new`: arm B has not lost these cases.

    No case is marked as new if the commit at which the arms diverged is unknown, or if the cases of that
    commit are unknown.
    """
    a, b = arms
    if not changes or a.moved is None:
        return changes
    try:
        base = merge_base(a, b, Path(a.moved[0]))
        if base is None or base == a.commit:
            return changes
        tests = _tests_of(at_commit(a, base, store), selection, store)
    except PerfsuiteError:
        return changes
    before = {test.case.id for test in tests if test.left_out is None}
    return tuple(
        change if change.case_id in before else change.replace(kind="new", difference="")
        for change in changes
    )


def _in_short(error: str) -> str:
    """Return the line of an error that gives the reason. In a pytest report, it is the last "E" line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return f"{lines[0].rpartition(': ')[0]}: {marked[-1]}" if marked else " ".join(lines)[:LONGEST_ERROR]


def _tests_of(arm: Arm, selection: Selection, store: Path) -> tuple[CollectedTest, ...]:
    """Collect the tests of an arm with its own pytest. Raises `CaseError` or `FileError`."""
    paths = _paths(arm, selection)
    if selection.paths and not paths:
        return ()  # this commit has no cases yet
    store.mkdir(parents=True, exist_ok=True)
    # The file is in the store, not in /tmp, because a container can access only the repository and the store.
    with tempfile.TemporaryDirectory(dir=store) as temporary:
        case_list = collect(
            [*map(str, paths)], *_limits(arm), *selection.words, arm=arm, file=Path(temporary) / "cases.json"
        )
    names = {_in_arm(path, arm): names for path, names in selection.names.items()}
    return tuple(test for test in case_list.tests if _is_asked(test, names))


def _is_asked(test: CollectedTest, names: Mapping[Path, Sequence[str]]) -> bool:
    """Return whether a test was selected.

    If node ids select tests of its file, only these tests were selected. If not, the whole file was selected.
    """
    file, _, name = test.nodeid.partition("::")
    parts = PurePosixPath(file).parts
    asked = [
        words for path, listed in names.items() if path.parts[-len(parts) :] == parts for words in listed
    ]
    return not asked or any(name == words or name.startswith((f"{words}[", f"{words}::")) for words in asked)


def _paths(arm: Arm, selection: Selection) -> list[Path]:
    """Return the selected paths that exist in an arm, as paths in its worktree."""
    if arm.directory is None:
        return [*selection.paths]
    there = arm.directory
    kept = [path for path in (_in_arm(path, arm) for path in selection.paths) if path.exists()]
    if kept or not selection.is_directory_of_cases:
        return kept
    own = Path(read_ini(there).directories().get("cases", there / CASES))
    here = Path(os.path.relpath(own, there))
    # If the working tree also has the arm's directory of cases, the arm's directory was not renamed to the
    # selected one. The user then did not select the cases of the arm's directory.
    was_renamed = next(here.rglob("*.py"), None) is None
    return [own] if own.is_dir() and was_renamed else []


def _in_arm(path: Path, arm: Arm) -> Path:
    """Map a path to the worktree of an arm."""
    return path if arm.directory is None else Path(os.path.normpath(arm.directory / os.path.relpath(path)))


def _limits(arm: Arm) -> list[str]:
    """Return the options that keep pytest inside an arm's worktree, which is inside the repository."""
    if arm.moved is None:
        return []
    top = Path(arm.moved[1])
    inside = [f"--confcutdir={top}"]
    if not read_ini(arm.directory or top).root.is_relative_to(top):  # the arm has no settings of its own
        inside += ["-c", os.devnull, f"--rootdir={arm.directory or top}"]
    return inside


def _changes(a: Sequence[CollectedTest], b: Sequence[CollectedTest], *, asked: bool) -> Iterator[CaseChange]:
    """Yield a change for each test of arm A that arm B would run differently, or not at all."""
    by_id = {test.case.id: test for test in b}
    ours = {test.case.id for test in a}
    lost = [test for test in a if test.left_out is None and test.case.id not in by_id]
    new = [test for test in b if test.case.id not in ours]
    instead = _in_their_place(lost, new)
    for test in a:
        if test.left_out is not None:
            continue
        names = {"case_id": test.case.id, "nodeid": test.nodeid, "asked": asked}
        now = by_id.get(test.case.id)
        replacement = instead.get(test.case.id)
        if now is not None:
            change = _same_id(test, now)
            if change is not None:
                other = _does_other_work(test.case, now.case)
                yield CaseChange(kind=change[0], difference=change[1], does_other_work=other, **names)
        elif replacement is not None:
            description = f"{replacement.case.id}: {differences(test.case, replacement.case)}"
            yield CaseChange(kind="changed", difference=description, **names)
        else:
            yield CaseChange(kind="deleted", **names)


def _does_other_work(then: Case, now: Case) -> bool:
    """Return whether two cases with the same id differ in a field that changes their work."""
    fields = Case.model_fields.keys() - NOT_IN_ID
    return any(getattr(then, name) != getattr(now, name) for name in fields)


def _same_id(then: CollectedTest, now: CollectedTest) -> tuple[Any, str] | None:
    """Return the kind and description of the change to a case that both arms have; None if unchanged."""
    if then.case.hardware != now.case.hardware:
        return "re-marked", f"{', '.join(then.case.hardware)} -> {', '.join(now.case.hardware)}"
    if now.left_out is None:
        description = differences(then.case, now.case)
        return ("changed", description) if description else None
    kind, _, why = now.left_out.partition(": ")
    if kind == "skipped":
        return "skipped", why
    if then.marks != now.marks:
        return "re-marked", f"{', '.join(then.marks) or 'no mark'} -> {', '.join(now.marks) or 'no mark'}"
    return "deselected", ""


def _in_their_place(lost: Sequence[CollectedTest], new: Sequence[CollectedTest]) -> dict[str, CollectedTest]:
    """Return the replacements of lost tests, by the ids of the lost cases.

    The replacement is the new test of the same test function whose case differs in the fewest fields.
    """
    candidates = defaultdict[tuple[str, str], list[CollectedTest]](list)
    for test in new:
        candidates[_function(test)].append(test)
    without = defaultdict[tuple[str, str], list[CollectedTest]](list)
    for test in lost:
        without[_function(test)].append(test)
    replacements: dict[str, CollectedTest] = {}
    for function, tests in without.items():
        replacements |= _nearest(tests, candidates[function])
    return replacements


def _nearest(lost: Sequence[CollectedTest], new: Sequence[CollectedTest]) -> dict[str, CollectedTest]:
    """Match lost tests of one function with the most similar new tests. Keys are ids of the lost cases."""
    if len(lost) * len(new) > MOST_PAIRS:
        # Comparing every pair would take minutes. Match cases by position, because a loop that generates
        # cases keeps their order.
        places = [(at, at) for at in range(min(len(lost), len(new)))]
    else:
        places = [(at, place) for at in range(len(lost)) for place in range(len(new))]
    then = [_flat(documents.plain(test.case)) for test in lost]
    now = [_flat(documents.plain(test.case)) for test in new]
    pairs = [(len(_differing(then[at], now[place])), abs(at - place), at, place) for at, place in places]
    nearest: dict[str, CollectedTest] = {}
    taken = set[int]()
    for fields, _, at, place in sorted(pairs):
        if lost[at].case.id not in nearest and place not in taken and fields <= SAME_TEST_FIELDS:
            nearest[lost[at].case.id] = new[place]
            taken.add(place)
    return nearest


def _function(test: CollectedTest) -> tuple[str, str]:
    """Return the file name and the function of a test, without the directory, which might have moved."""
    file, _, name = test.nodeid.partition("::")
    return PurePosixPath(file).name, name.partition("[")[0]


def differences(then: Case, now: Case) -> str:
    """Describe the fields in which two cases differ: `micro_batch 2 -> 1, steps 50 -> 20`."""
    changed = _differing(_flat(documents.plain(then)), _flat(documents.plain(now)))
    shown = [f"{name} {_shown(old)} -> {_shown(new)}" for name, (old, new) in changed.items()]
    return ", ".join(cut(shown, SHOWN_FIELDS))


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of each field that differs, by path, such as `topology.processes_per_node`."""
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    for whole in ("model", "framework"):  # different models have different fields: the name is enough
        if f"{whole}.name" in names:
            names = [name for name in names if not name.startswith(f"{whole}.") or name == f"{whole}.name"]
    return {name: (old.get(name), new.get(name)) for name in names}


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested values into one mapping by path. Lists are kept whole."""
    flat: dict[str, Any] = {}
    for name, entry in value.items():
        inner = isinstance(entry, dict) and bool(entry)
        flat |= _flat(entry, f"{before}{name}.") if inner else {f"{before}{name}": entry}
    return flat


def _shown(value: Any) -> str:
    if isinstance(value, list):
        value = shlex.join(map(str, value))
    text = "nothing" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
