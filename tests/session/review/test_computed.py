from typing import Any

import pytest

from perfsuite import documents
from perfsuite.results import baseline, count_baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.rank_report import Observed
from perfsuite.session.review.computed import of_counts, of_times
from tests.samples import make_figures, make_run
from tests.twin_counts import counts, launch

FIGURES = make_figures(gradient_norm=1.0, unclipped_norm=7.0, tokens_given=4096.0)
OBSERVED = Observed(settings={"optimizer": "AdamW", "wrapper": "FSDP"}, environment={"torch": "2.13.0"})
RUN = make_run(
    figures=FIGURES,
    loss=tuple(5 - step / 10 for step in range(10)),
    observed=OBSERVED,
    dtypes={"parameters": {"float32": 1000}, "gradients": {"float32": 1000}},
)


def differences(**changes: Any) -> list[str]:
    """Return the differences between a baseline and the same baseline with these changes in each launch."""
    before, now = (baseline.from_runs([run] * 5) for run in (RUN, RUN.replace(**changes)))
    return [*of_times(before, now)]


def test_the_same_computation_has_no_differences() -> None:
    assert differences() == []


def test_lists_the_most_different_loss_part() -> None:
    loss = tuple(1.5 * value for value in RUN.loss)
    loss = (*loss[:5], 9.0, *loss[6:])
    assert differences(loss=loss) == [
        "loss between 50% and 60% of the steps: 4.5 -> 9 (+100.0%); the loss also differs in 9 other parts"
    ]


@pytest.mark.parametrize(
    ("figure", "value", "said"),
    [
        ("gradient_norm", 0.5, "the norm of the gradients after clipping in step 4: 1 -> 0.5 (-50.0%)"),
        ("unclipped_norm", None, "the norm of the gradients before clipping in step 4: 7 -> not recorded"),
        ("tokens_given", 2048.0, "tokens given to the model in a step: 4096 -> 2048 (-50.0%)"),
    ],
)
def test_figures_of_the_computation_are_listed(figure: str, value: float | None, said: str) -> None:
    assert differences(figures=FIGURES.replace(**{figure: value})) == [said]


def test_lists_halved_elements_and_new_dtypes() -> None:
    dtypes = {"parameters": {"float32": 500}, "gradients": {"bfloat16": 1000}}
    assert differences(dtypes=dtypes) == [
        "dtypes.parameters.float32: 1000 -> 500",
        "dtypes.gradients.float32: 1000 -> not recorded",
        "dtypes.gradients.bfloat16: not recorded -> 1000",
    ]


def test_settings_and_versions_are_listed() -> None:
    observed = Observed(settings={**OBSERVED.settings, "optimizer": "SGD"}, environment={"torch": "2.14.0"})
    assert differences(observed=observed) == [
        "observed.settings.optimizer: AdamW -> SGD",
        "observed.environment.torch: 2.13.0 -> 2.14.0",
    ]


def test_fields_of_the_case_are_listed() -> None:
    assert differences(case=RUN.case.replace(learning_rate=0.5)) == ["case.learning_rate: 0.001 -> 0.5"]


def test_lists_one_edited_launch_of_equal_median() -> None:
    before = baseline.from_runs([RUN] * 3)
    launches = [documents.plain(kept) for kept in before.launches]
    launches[1]["figures"]["gradient_norm"] = 2
    now = Baseline.model_validate(
        {**documents.plain(before), "launches": launches}, context=documents.FROM_FILE
    )
    assert [*of_times(before, now)] == [
        "the norm of the gradients after clipping in step 4: 1, 1, 1 -> 1, 2, 1"
    ]


def test_count_baseline_lists_what_was_computed() -> None:
    run = launch(counts()).replace(figures=FIGURES, loss=RUN.loss, observed=OBSERVED, dtypes=RUN.dtypes)
    other = run.replace(
        figures=FIGURES.replace(tokens_given=2048.0),
        loss=tuple(2 * value for value in RUN.loss),
        observed=OBSERVED.replace(settings={"optimizer": "SGD", "wrapper": "FSDP"}),
        dtypes={**RUN.dtypes, "parameters": {"float32": 500}},
    )
    before, now = (count_baseline.from_runs([counted_run]) for counted_run in (run, other))
    assert [*of_counts(before, now)] == [
        "loss between 0% and 10% of the steps: 5 -> 10 (+100.0%); the loss also differs in 9 other parts",
        "tokens given to the model in a step: 4096 -> 2048 (-50.0%)",
        "settings.optimizer: AdamW -> SGD",
        "dtypes.parameters.float32: 1000 -> 500",
    ]
