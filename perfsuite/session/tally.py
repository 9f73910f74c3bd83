"""Count the judged cases of a session, and find the cases that fail the session."""

from dataclasses import dataclass

from perfsuite.results.outcome import UNJUDGED, UNMEASURED
from perfsuite.results.session_file import Measurement, Skipped
from perfsuite.session.resume import is_of_machine
from perfsuite.session.setup import Options


@dataclass(frozen=True)
class Tally:
    """The number of judged cases in a session, and the results that fail the session."""

    results: tuple[Measurement, ...]
    skipped: tuple[Skipped, ...]
    options: Options

    @property
    def failing(self) -> list[Measurement]:
        """The results that fail the session, regardless of the outcome of their tests."""
        return [result for result in self.results if not result.shadow and self.options.fails_session(result)]

    @property
    def only_shown(self) -> list[Measurement]:
        """The results whose times are only shown, because of `allow_shared`. Only their counts are judged."""
        shown = self.results if self.options.allow_shared and self.options.counts else ()
        return [
            result
            for result in shown
            if result.outcome == "unhealthy" and result.shared and result.measured_steps
        ]

    @property
    def nothing_measured(self) -> bool:
        """Whether no result measures the code. A known issue that was seen again counts as measured."""
        return not self.only_shown and all(
            result.outcome in UNMEASURED and result.excused != "known issue" for result in self.results
        )

    @property
    def judged(self) -> int:
        """The number of results with a verdict on the code."""
        judged = [
            result for result in self.results if result.outcome not in UNJUDGED and not is_of_machine(result)
        ]
        return sum(result.excused in (None, "waived") for result in judged)

    @property
    def to_judge(self) -> int:
        """The number of cases to judge: measured cases, and cases that the budget or their test left out.

        A file of cases that skipped itself counts as one case.
        """
        return len(self.results) + sum(skip.not_reached or skip.by_test for skip in self.skipped)

    @property
    def too_few_judged(self) -> bool:
        """Whether the share of judged cases is below the user's minimum."""
        return bool(self.to_judge) and self.judged / self.to_judge < self.options.min_judged
