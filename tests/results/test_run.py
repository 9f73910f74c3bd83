from __future__ import annotations

import json
import math

from perfsuite import documents
from perfsuite.results.run import Figures


def test_figures_by_name_are_what_was_measured_other_packages_metrics_last() -> None:
    figures = Figures(mfu=0.4, tokens_per_s=1.0, extra={"b": 2.0, "a": 3.0})
    assert list(figures.by_name().items()) == [("tokens_per_s", 1.0), ("mfu", 0.4), ("a", 3.0), ("b", 2.0)]
    assert Figures.of(figures.by_name()) == figures


def test_one_figure_by_its_name() -> None:
    figures = Figures(mfu=0.4, extra={"a": 3.0})
    assert [figures.get(name) for name in ("mfu", "a", "tokens_per_s", "b", "extra", "get")] == [
        *(0.4, 3.0),
        *[None] * 4,
    ]


def test_a_file_without_other_packages_metrics_reads_and_none_is_written() -> None:
    assert "extra" not in documents.plain(Figures(mfu=0.4))
    assert Figures.model_validate({"mfu": 0.4}) == Figures(mfu=0.4)


def test_what_is_no_number_reads_back() -> None:
    figures = Figures(mfu=math.inf, extra={"a": -math.inf})
    assert Figures.model_validate(json.loads(json.dumps(documents.plain(figures)))) == figures
