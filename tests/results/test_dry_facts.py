from __future__ import annotations

from perfsuite.results.dry_facts import Fit, MemoryPart


def test_the_range_of_a_need() -> None:
    """At least what lives at once, at most what the allocator would hold; each with what lies beside it."""
    fit = Fit(
        rank=0,
        live=90,
        allocated=100,
        reserved=130,
        reserved_expandable=110,
        outside=(
            MemoryPart(name="a", low=5, high=10, source="s"),
            MemoryPart(name="b", low=1, high=4, source="s"),
        ),
        card=200,
        verdict="fits",
    )
    assert (fit.least, fit.most) == (106, 144)
