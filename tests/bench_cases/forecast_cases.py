"""Helpers: cases that were predicted and measured, on clusters with published steps and on one H100."""

from functools import cache
from pathlib import Path
from typing import Literal

from perfsuite import documents
from perfsuite.analysis.step_time.expected import parallelism
from perfsuite.analysis.step_time.forecast import MeasuredCase
from perfsuite.analysis.step_time.streams import reported_step
from perfsuite.documents import Document
from perfsuite.results import device_log_file
from perfsuite.results.dry_facts import DryFacts, Expected
from tests.bench_cases.published_steps import MORE, STEPS, PublishedStep
from tests.gpu.test_day import WIDE

PREDICTED = Path(__file__).with_name("one_h100.json")
_MEASURED_MS = (
    122.6, 134.3, 134.7, 138.5, 127.3, 133.9, 150.3, 98.6, 127.6, 835.7, 101.2, 253.8, 161.8, 165.1, 247.4,
    143.0, 89.5,
)  # fmt: skip
MEASURED_MS = {case.id: ms for case, ms in zip(WIDE[:-1], _MEASURED_MS, strict=True)}
"""The steps of docs/evidence/one-h100.md, in the order of the cases. The last case is a script."""


class PredictedFile(Document):
    """The predictions for the cases on one H100, by case id. They were written before any comparison."""

    schema_version: Literal[1] = 1
    predicted: dict[str, DryFacts]


def _published(step: PublishedStep) -> MeasuredCase:
    """Return a published step. The host never sets its pace, so the step takes as long with any host."""
    parts = step.predicted
    log = reported_step(device_log_file.read(step.log(MORE)))
    expected = Expected(
        **parts._asdict(),
        tokens=1,
        parallelism=parallelism(log),
        by_host=((0.0, parts.total_s), (1.0, parts.total_s)),
    )
    return MeasuredCase(", ".join(step.row.settings), expected, parts.total_s / step.ratio)


def one_h100() -> list[MeasuredCase]:
    """Return the cases that were predicted and measured on one H100."""
    predicted = documents.read(PREDICTED, PredictedFile).predicted
    return [
        MeasuredCase(case_id, facts.expected, MEASURED_MS[case_id] / 1e3)
        for case_id, facts in predicted.items()
        if facts.expected is not None
    ]


CLUSTERS = tuple(dict.fromkeys(step.cluster for step in STEPS))


@cache
def cases_of(cluster: str) -> list[MeasuredCase]:
    """Return the published steps of a cluster."""
    return [_published(step) for step in STEPS if step.cluster == cluster]
