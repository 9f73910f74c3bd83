"""Which reviewed baselines no case of a whole night claims: a case may have been lost without a word."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.report.text import relative
from perfsuite.results.count_baseline import DRY
from perfsuite.results.store import BaselineFiles
from perfsuite.session.session import Session


def unclaimed(
    session: Session,
    collected: Mapping[str, Case],
    claimed: Collection[str],
    markers: Collection[str],
    elsewhere: str | None = None,
) -> list[tuple[str, str]]:
    """Return the id of the case of each of these baselines, and why nothing claims it.

    Only folders of hardware that a claimed case is measured on are looked at. `collected` are all cases and
    `claimed` those that are selected, by their ids; `markers` are those of `-m`, if it names hardware.
    `elsewhere` is the directory of the cases where the session has tests of other directories alone.
    """
    files = [session.way.reviewed_file(case) for case_id, case in collected.items() if case_id in claimed]
    found = []
    for folder in dict.fromkeys(file.parent for file in files):
        for file in sorted(folder.glob("*.json")):
            case = collected.get(file.stem)
            if file.stem not in claimed and not (case and _is_of_another_night(session, case, file, markers)):
                name = relative(str(file), session.setup.options.root)
                found.append((file.stem, f"{name}: {_why(case, markers, elsewhere)}"))
    return found


def without_any_case(session: Session, markers: Collection[str]) -> list[tuple[str, str]]:
    """Return the same where no case at all is selected: the baselines that this machine could be judged by.

    `markers` are those of `-m`, if it names hardware. A file that cannot be read might be one of them.
    """
    baselines = session.setup.baselines
    kinds: list[BaselineFiles[Any]] = [baselines, baselines.counts]
    found: dict[str, str] = {}
    for known in kinds:
        for file in sorted(known.reviewed.glob("*/*.json")):
            if file.parent.name.startswith(DRY) != session.way.dry:
                continue
            document = documents.read_or_none(file, known.kind)
            if document is None:
                why = "it cannot be read, and no case is selected"
            elif _is_meant(session, document.case, markers):
                why = "no case is selected"
            else:
                continue
            found.setdefault(file.stem, f"{relative(str(file), session.setup.options.root)}: {why}")
    return [*found.items()]


def _is_meant(session: Session, case: Case, markers: Collection[str]) -> bool:
    if markers:
        return not set(case.markers).isdisjoint(markers)
    try:
        return session.setup.host.why_not(case) is None
    except Exception:  # it would fail here
        return False


def _is_of_another_night(session: Session, case: Case, file: Path, markers: Collection[str]) -> bool:
    """Whether `-m` leaves a case out that this machine could measure by that baseline: `-m gpu` an H100's."""
    if not markers or not set(case.markers).isdisjoint(markers):
        return False
    try:
        return session.setup.host.why_not(case) is None and session.way.reviewed_file(case) == file
    except Exception:  # it would fail in its own night, too
        return False


def _why(case: Case | None, markers: Collection[str], elsewhere: str | None) -> str:
    if case is None and elsewhere:
        return f"no case of these directories has this id, and perf_cases names {elsewhere}"
    if case is None:
        return "no case has this id"
    if markers and set(case.markers).isdisjoint(markers):
        return f"its case is for {' or '.join(case.hardware)} now"
    return "its case was deselected, by pytest's settings or by a hook of conftest.py"
