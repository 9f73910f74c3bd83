"""Find reviewed baselines that belong to no case of a complete nightly run: a case might have been lost."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.case.hardware import ARCHITECTURES
from perfsuite.report.text import relative
from perfsuite.results.count_baseline import DRY
from perfsuite.results.store import BaselineFiles
from perfsuite.session.mode import Mode


def unclaimed(
    mode: Mode,
    collected: Mapping[str, Case],
    claimed: Collection[str],
    markers: Collection[str],
    elsewhere: str | None = None,
) -> list[tuple[str, str]]:
    """Return the case id of each unclaimed baseline, and why the baseline belongs to no selected case.

    The search covers the baselines of times and of counts for all hardware on which a selected case is
    measured. A case that has both is listed once. `collected` has all cases by id, and `claimed` has the ids
    of the selected cases. `markers` are the markers in `-m`, if `-m` names hardware. If the command line
    names only directories outside of the directory of cases, `elsewhere` is the directory that the setting
    `perf_cases` names. Otherwise, `elsewhere` is None.
    """
    selected = [case for case_id, case in collected.items() if case_id in claimed]
    files = [file for case in selected for file in mode.reviewed_files(case)]
    reasons: dict[str, str] = {}
    for folder in dict.fromkeys(file.parent for file in files):
        for file in sorted(folder.glob("*.json")):
            case = collected.get(file.stem)
            if file.stem in claimed or (case and _is_of_another_night(mode, case, file, markers)):
                continue
            name = relative(str(file), mode.options.root)
            reasons.setdefault(file.stem, f"{name}: {_why(case, markers, elsewhere)}")
    return [*reasons.items()]


def without_any_case(mode: Mode, markers: Collection[str]) -> list[tuple[str, str]]:
    """Return the baselines that would apply to this machine, in a session in which no case is selected.

    The result has the same form as that of `unclaimed`. `markers` are the markers in `-m`, if `-m` names
    hardware. An unreadable file is included, because it could be a baseline for this machine.
    """
    baselines = mode.baselines
    kinds: list[BaselineFiles[Any]] = [baselines, baselines.counts]
    reasons: dict[str, str] = {}
    for store in kinds:
        for file in sorted(store.reviewed.glob("*/*.json")):
            if file.parent.name.startswith(DRY) != mode.dry:
                continue
            document = documents.read_or_none(file, store.kind)
            if document is None:
                why = "it cannot be read, and no case is selected"
            elif _is_meant(mode, document.case, markers):
                why = "no case is selected"
            else:
                continue
            reasons.setdefault(file.stem, f"{relative(str(file), mode.options.root)}: {why}")
    return [*reasons.items()]


def _is_meant(mode: Mode, case: Case, markers: Collection[str]) -> bool:
    if markers:
        return not set(case.markers).isdisjoint(markers)
    try:
        return mode.setup.host.why_not(case) is None
    except Exception:  # the case would fail here
        return False


def _is_of_another_night(mode: Mode, case: Case, file: Path, markers: Collection[str]) -> bool:
    """Return whether `-m` excludes a case that this machine could judge.

    For example, on an H100, `-m gpu` excludes the cases that are meant for `h100` only. A baseline of counts
    is valid for all hardware of one architecture. If `file` is such a baseline, the case may be meant for any
    of this hardware.
    """
    if not markers or not set(case.markers).isdisjoint(markers):
        return False
    if not mode.dry and file.is_relative_to(mode.baselines.counts.reviewed):
        return _is_counted_on(case, file.parent.name)
    try:
        return mode.setup.host.why_not(case) is None and mode.reviewed_file(case) == file
    except Exception:  # the case would also fail in its own nightly run
        return False


def _is_counted_on(case: Case, target: str) -> bool:
    """Return whether a case is meant for hardware with this target of counts, such as `sm90`."""
    families = {name.partition("-")[0] for name in case.hardware}
    return target in {f"sm{ARCHITECTURES[name]}" if name in ARCHITECTURES else name for name in families}


def _why(case: Case | None, markers: Collection[str], elsewhere: str | None) -> str:
    if case is None and elsewhere:
        return f"no case in the directories of this session has this id. perf_cases names {elsewhere} instead"
    if case is None:
        return "no case has this id"
    if markers and set(case.markers).isdisjoint(markers):
        return f"its case is now for {' or '.join(case.hardware)}"
    return "its case was deselected by pytest's settings or by a hook in conftest.py"
