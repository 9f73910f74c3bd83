"""Track verdicts from night to night: cases that changed state, and failures that a later night reversed."""

from collections import defaultdict
from collections.abc import Collection, Iterator
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from perfsuite.features.history import store
from perfsuite.features.history.store import Place, StoredVerdict


class CaseNight(NamedTuple):
    """The verdict on a case in one session."""

    place: Place
    case: str
    verdict: StoredVerdict

    @property
    def state(self) -> str:
        """`red`, `undecided` or `green`."""
        if self.verdict.shadow or self.verdict.word in ("failed", "regressed"):
            return "red"
        return "undecided" if self.verdict.word in ("inconclusive", "unhealthy", "undecided") else "green"

    @property
    def word(self) -> str:
        """The verdict as it appears in reports."""
        return self.verdict.word + (" (shadow)" if self.verdict.shadow else "")


def by_case(
    history: Path, *, hardware_class: str = "*", case: str = "*", since: date | None = None
) -> list[list[CaseNight]]:
    """Return the verdicts on each case on each hardware class, oldest first. Raises `FileError`."""
    cases = store.read_cases(history)
    nights = defaultdict[tuple[str, str], list[CaseNight]](list)
    for place in store.places(history, hardware_class=hardware_class, since=since):
        for name, verdict in place.read(cases).verdicts.items():
            if fnmatchcase(name, case):
                nights[place.hardware_class, name].append(CaseNight(place, name, verdict))
    return [nights[key] for key in sorted(nights)]


def failures(nights: list[CaseNight]) -> Iterator[tuple[CaseNight, CaseNight | None]]:
    """Yield each failure of a case, and the night that reversed it (None if no night did).

    Failures in shadow mode are included. A later night reverses a failure if the case passes against the same
    baselines.
    """
    for number, night in enumerate(nights):
        if night.state == "red":
            by = night.verdict.baselines
            good = (later for later in nights[number:] if later.word in ("passed", "improved"))
            yield night, next((later for later in good if by and later.verdict.baselines == by), None)


def changed(history: Path, added: Collection[Path]) -> list[CaseNight]:
    """Return the cases of added sessions that changed state since the night before. New cases start green."""
    changed_nights = []
    for nights in by_case(history):
        new = [night for night in nights if night.place.file in added]
        before = ["green", *(earlier.state for earlier in nights[: nights.index(new[0])])][-1] if new else ""
        changed_nights += [night for night in new[-1:] if night.state != before]
    return changed_nights
