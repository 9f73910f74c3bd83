"""Compare two arms for `perfsuite compare`: select cases, resolve the arms, measure, find changed cases."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perfsuite.case.case import Case
from perfsuite.errors import CaseError
from perfsuite.launch.arm import Arm
from perfsuite.launch.base import Launcher
from perfsuite.launch.download import Consent
from perfsuite.report.progress import Progress
from perfsuite.session.against_arm import AgainstArm, ByDryRuns, by_counts, by_times, resolved
from perfsuite.session.by_command import fitting, measured, runnable, selected
from perfsuite.session.case_changes import Selection, case_changes
from perfsuite.session.record import Record
from perfsuite.session.session import Session
from perfsuite.session.setup import DryHost, Host, Options, Setup

Way = Literal["times", "counts", "dry"]
"""What is compared: the times of launches, the counts of one launch of each arm, or the counts of one dry run
of each arm."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of two arms, as the user asked for it."""

    way: Way
    against: str  # arm A, as the user wrote it
    arm: str  # arm B, as the user wrote it
    options: Options
    progress: Progress
    launcher: Launcher
    consent: Consent
    max_pairs: int | None  # None: the default

    def measure(
        self, directory: Path, ids: list[str] | None, expression: str | None, *, as_json: bool
    ) -> Session:
        """Compare the cases of a directory, and print and write the results.

        The cases are selected by id or with a -k expression. Without either, all cases are compared. Nothing
        is installed for an arm unless a case can run. Raises `CaseError` if a case that was selected by id
        cannot run.
        """
        if not ids and expression is None:
            expression = ""  # all cases of the directory
        host = DryHost() if self.way == "dry" else Host(self.launcher, self.options.store)
        asked = selected(directory, ids, expression)
        if not runnable(host, asked, are_named=expression is None):
            return self._without_cases(host, asked, as_json=as_json)
        arms = self._arms(host)
        session = self._session(arms)
        if self.way != "dry":
            session.setup.host = host  # this host has already examined the machine
        fits = fitting(session, asked)
        if session.record.skipped and expression is None:
            raise CaseError(f"{session.record.skipped[0].case_id}: {session.record.skipped[0].reason}")
        self.progress.cases = len(fits)
        words = () if expression is None else ("-k", expression)
        wanted = Selection(
            paths=(directory,), words=words, asked=expression is not None, is_directory_of_cases=True
        )
        changes, unknown = case_changes(arms, wanted, self.options.store)
        session.record.case_changes = changes
        session.record.cases_unknown = unknown
        measured(session, fits, as_json=as_json)
        return session

    def _without_cases(self, host: Host, asked: list[Case], *, as_json: bool) -> Session:
        """Report why none of the cases can run here."""
        setup = Setup(self.options, self.progress, host)
        session = Session(ByDryRuns(setup) if self.way == "dry" else AgainstArm(setup))
        fitting(session, asked)
        measured(session, [], as_json=as_json)
        return session

    def _arms(self, host: Host) -> tuple[Arm, Arm]:
        words = (("--against", self.against), ("--arm", self.arm))
        driver = None if self.way == "dry" else host.machine.driver
        a, b = resolved(self.options, words, self.consent, driver=driver)
        return a, b

    def _session(self, arms: tuple[Arm, Arm]) -> Session:
        if self.way == "times":
            return by_times(self.options, self.progress, self.launcher, arms, max_pairs=self.max_pairs)
        return by_counts(self.options, self.progress, None if self.way == "dry" else self.launcher, arms)


def is_decided(record: Record) -> bool:
    """Return whether every case of both arms was compared, with a clear verdict."""
    is_clear = all(result.outcome in ("passed", "improved") for result in record.results)
    return bool(record.results) and is_clear and record.has_all_cases
