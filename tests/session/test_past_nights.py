from pathlib import Path
from typing import Any

import pytest

from perfsuite.results.baseline import Acceptance, Baseline, from_runs
from perfsuite.results.outcome import CountCheck, Verdict
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run import Run
from perfsuite.results.session_file import ArmFacts, Canary, Measurement, SessionReference
from perfsuite.results.store import Store
from perfsuite.session.past_nights import DAYS_READ, nights_of
from tests.samples import DISTURBED, known, make_case, make_figures, make_result, make_run, write_session

CASES = [make_case(micro_batch=batch) for batch in (1, 2)]
SEEN = Observed(settings={}, environment={"torch": "2.13.0"}, code="0123456789ab")
COMMIT = "0123abcd" * 5
AT_COMMIT = Acceptance(by="me", date="today", commit="e" * 40, measured=COMMIT)


def launch(speed: float = 1.0, *, case: int = 0, **changes: Any) -> Run:
    figures = make_figures(tokens_per_s=1000 * speed)
    return make_run(**{"case": CASES[case], "figures": figures, "observed": SEEN, **changes})


def night(*runs: Run, **changes: Any) -> Measurement:
    """Return the result of a case that did the same work as its baseline."""
    usual = {"outcome": "passed", "launches": len(runs), "counts": CountCheck(outcome="passed")}
    return make_result(*runs, verdict=Verdict(**{**usual, **changes}))


def canary(*runs: Run, **changes: Any) -> Canary:
    return Canary(**{"case_id": CASES[0].id, "baseline_file": "", "runs": runs, **changes})


BASELINE = from_runs([launch() for _ in range(5)], sessions=["reviewed"] * 5)


class Nights:
    """Writes past sessions into a store, and finds those with the code of a baseline."""

    def __init__(self, directory: Path) -> None:
        self.store = Store(directory)

    def add(
        self, name: str, *results: Measurement, canaries: tuple[Canary, ...] = (), commit: str = ""
    ) -> None:
        arm = ArmFacts(text="v1", facts={"commit": commit})
        reference = SessionReference(arm=arm, canaries=canaries) if canaries else None
        write_session(self.store.sessions / name, *results, reference=reference)

    def found(self, baseline: Baseline = BASELINE) -> list[tuple[str | None, float]]:
        """Return the session and speed of each launch that was found."""
        return [
            (launch.session, known(launch.figures.tokens_per_s))
            for night in nights_of([baseline], self.store.results())
            for launch in night.launches
        ]


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def test_finds_sessions_in_which_nothing_changed(nights: Nights) -> None:
    """A slower session is `unhealthy`, because the machine was slower."""
    nights.add("1", night(launch(0.9), launch(0.91), outcome="unhealthy"))
    nights.add("2", night(launch()), night(launch(case=1)))
    assert nights.found() == [("1", 900.0), ("1", 910.0), ("2", 1000.0)]


def test_finds_launches_of_references(nights: Nights) -> None:
    nights.add("1", canaries=(canary(launch(0.9)),))
    nights.add("2", night(launch(0.5), counts=None), canaries=(canary(launch(0.8), launch(0.81)),))
    assert nights.found() == [("1", 900.0), ("2", 800.0), ("2", 810.0)]


def test_a_session_of_the_baseline_is_not_used_again(nights: Nights) -> None:
    for name in ("1", "2", "reviewed"):
        nights.add(name, night(launch()))
    assert {session for session, _ in nights.found()} == {"1", "2"}


def test_sessions_of_one_day_are_one_session(nights: Nights) -> None:
    """Sessions within an hour hardly differ, although the machine can be far slower the next day."""
    nights.add("20261129-230000-1", night(launch()))
    for minute in range(10, 40, 10):
        nights.add(f"20261130-10{minute}00-1", night(launch()))
    assert [session for session, _ in nights.found()] == ["20261129", *["20261130"] * 3]


def test_one_day_shows_nothing(nights: Nights) -> None:
    nights.add("20261130-100000-1", night(launch(), launch()))
    nights.add("20261130-110000-1", night(launch(), launch()))
    assert nights.found() == []


def test_a_damaged_file_is_left_out(nights: Nights) -> None:
    for name in ("1", "2", "3"):
        nights.add(name, night(launch()))
    nights.store.results()[1].write_text("{")
    assert {session for session, _ in nights.found()} == {"1", "3"}


def test_reads_only_the_newest_days(nights: Nights) -> None:
    for number in range(DAYS_READ + 2):
        nights.add(f"{number:08}-1", night(launch()))
    assert [session for session, _ in nights.found()] == [f"{n:08}" for n in range(2, DAYS_READ + 2)]


@pytest.mark.parametrize(
    "changed",
    [
        night(launch(observed=SEEN.replace(code="other"))),
        night(launch(observed=SEEN.replace(environment={"torch": "2.14.0"}))),
        night(launch(), launch(inject="slowdown=30%")),
        night(launch(), counts=None),
        night(launch(), counts=CountCheck(outcome="regressed")),
        night(launch(), unhealthy_launches=(1,)),
        night(launch()).replace(before=(launch(),)),
        night(launch(machine=make_run().machine.replace(hardware_class="cpu-other-2c"))),
        night(launch(failure=Failure(kind="crash", message="x")), outcome="failed"),
    ],
)
def test_a_session_with_a_change_is_left_out(nights: Nights, changed: Measurement) -> None:
    nights.add("1", night(launch()))
    nights.add("2", changed)
    nights.add("3", night(launch()))
    assert {session for session, _ in nights.found()} == {"1", "3"}


@pytest.mark.parametrize(
    "unusable",
    [
        canary(launch(), unused="it crashed"),
        canary(launch(), looked_slower=True),
        canary(launch(failure=Failure(kind="crash", message="x"))),
        canary(launch(health=DISTURBED)),
        canary(launch(observed=SEEN.replace(code="other"))),
        canary(launch(machine=make_run().machine.replace(hardware_class="cpu-other-2c"))),
        canary(launch(), case_id="unknown"),
        canary(),
    ],
)
def test_a_reference_that_shows_nothing_is_left_out(nights: Nights, unusable: Canary) -> None:
    nights.add("1", canaries=(canary(launch()),))
    nights.add("2", canaries=(unusable,))
    nights.add("3", canaries=(canary(launch()),))
    assert {session for session, _ in nights.found()} == {"1", "3"}


@pytest.mark.parametrize(
    ("accepted", "commit", "is_same"),
    [
        (AT_COMMIT, COMMIT[:12], True),
        (AT_COMMIT, f"{COMMIT[:12]} with uncommitted changes", False),
        (AT_COMMIT, "f" * 12, False),
        (None, COMMIT[:12], False),
    ],
)
def test_a_reference_at_the_measured_commit_has_its_code(
    nights: Nights, accepted: Acceptance | None, commit: str, is_same: bool
) -> None:
    """If packages are installed again, the digest of the code is another one."""
    for name in ("1", "2"):
        reinstalled = launch(observed=SEEN.replace(code="other"))
        nights.add(name, canaries=(canary(reinstalled),), commit=commit)
    assert bool(nights.found(BASELINE.replace(accepted=accepted))) == is_same
