"""Results of a night that are named after their meaning: good, slower, undecided, crashed."""

from typing import Any

from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Measurement
from tests.samples import BEFORE, make_result, make_run, now

GOOD = make_result(BEFORE)
SLOW = make_result(*[now(tokens_per_s=50000)] * 3)
NOISY = make_result(BEFORE, verdict=GOOD.verdict.replace(outcome="inconclusive"))


def crashed(message: str, **changes: Any) -> Measurement:
    return make_result(make_run(failure=Failure(kind="crash", message=message)), **changes)
