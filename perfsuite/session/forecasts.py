"""Forecast step times from the measurements in the local store, and check earlier forecasts with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from perfsuite.analysis.step_time.forecast import MeasuredCase, forecast
from perfsuite.errors import PredictionError
from perfsuite.results.amounts import duration
from perfsuite.results.dry_facts import DryFacts, Expected, Forecast
from perfsuite.results.session_file import Measurement, readable
from perfsuite.session.plan import SESSIONS_READ


class Forecasts:
    """The predictions and measurements of cases on one kind of GPU, from the newest sessions of a store."""

    def __init__(self, files: Sequence[Path], device_name: str) -> None:
        self._expected: dict[str, Expected] = {}  # by case id, like the next two attributes
        self._tokens_per_s: dict[str, float] = {}
        self._open: dict[str, Forecast] = {}  # newest forecast of each case that was not measured after it
        self.checked: list[bool] = []  # for each checked forecast, whether its interval was right
        for result in _results(files, device_name):
            self._add(result)

    def _add(self, result: Measurement) -> None:
        """Add a result, which must be newer than all results that were added before."""
        case_id = result.case_id
        facts = result.prediction or result.dry_facts
        if facts.expected is not None:
            self._expected[case_id] = facts.expected
        if result.dry:
            if facts.forecast is not None:
                self._open[case_id] = facts.forecast
            return
        speed = result.figures.tokens_per_s
        # Leave out the results of comparisons (`before`): the packages and environment variables of an arm
        # can differ from those of this environment.
        if speed is None or result.shared or result.before or result.no_evidence is not None:
            return
        self._tokens_per_s[case_id] = speed
        expected = self._expected.get(case_id)
        if case_id in self._open and expected is not None:
            self.checked.append(self._open.pop(case_id).holds(expected.tokens / speed))

    @property
    def cases(self) -> list[MeasuredCase]:
        """The cases that were both predicted and measured."""
        return [
            MeasuredCase(case_id, self._expected[case_id], self._expected[case_id].tokens / speed)
            for case_id, speed in self._tokens_per_s.items()
            if case_id in self._expected
        ]

    def of(self, case_id: str) -> Forecast | None:
        """Return the newest forecast of a case; None without one, or if the case was measured after it."""
        return self._open.get(case_id)

    def added(self, facts: DryFacts, case_id: str) -> DryFacts:
        """Add a forecast, or the reason why there is none, to the predictions of a case's dry run.

        If no case was both predicted and measured, the predictions are returned unchanged.
        """
        step = facts.expected
        cases = self.cases
        if step is None or not cases:
            return facts
        speed = self._tokens_per_s.get(case_id)
        if speed is not None:
            share = step.share(speed)
            measured = (
                f"a step took {duration(step.tokens / speed)}, which is {share:.0%} of the expected speed"
            )
            return facts.replace(no_forecast=f"the case was already measured: {measured}")
        try:
            made = forecast(step, cases)
        except PredictionError as error:
            return facts.replace(no_forecast=str(error))
        return facts.replace(forecast=made.replace(held=sum(self.checked), checked=len(self.checked)))


def _results(files: Sequence[Path], device_name: str) -> Iterator[Measurement]:
    """Yield the results on a kind of GPU, oldest first. Files that cannot be read are left out."""
    for session in readable(files[-SESSIONS_READ:]):
        for result in session.results:
            if result.runs and result.runs[-1].machine.device_name == device_name:
                yield result
