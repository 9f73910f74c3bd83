import pytest

from perfsuite.results.cost import Cost


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (
            Cost(least_s=0.0, most_s=0.006, step_s=0.43, hidden_above=31e9),
            "; predicted cost: 0.0 ms to 6.0 ms of a step of 430.0 ms (at most 1.4%); "
            "the step waits for these bytes only if the link of each GPU is slower than 31 GB/s",
        ),
        (
            Cost(least_s=-0.003, most_s=0.006, step_s=0.6),
            "; predicted cost: -3.0 ms to 6.0 ms of a step of 600.0 ms (at most 1.0%)",
        ),
        (
            Cost(least_s=-0.006, most_s=-0.003, step_s=0.6),
            "; predicted saving: 3.0 ms to 6.0 ms of a step of 600.0 ms (at most 1.0%)",
        ),
        (
            Cost(hidden_above=31e9),
            "; predicted cost: unknown, because the speed of the network is unknown, "
            "but the step waits for these bytes only if the link of each GPU is slower than 31 GB/s",
        ),
        (Cost(why_naive="why"), "; it is unknown how long the step waits for this work: why"),
    ],
)
def test_a_price_in_words(cost: Cost, words: str) -> None:
    assert cost.in_words("bytes") == words


def test_a_naive_price_depends_on_the_work() -> None:
    cost = Cost(least_s=-0.002, most_s=-0.002, why_naive="why")
    rest = "2.0 ms, but it is unknown how long the step waits for this: why"
    assert cost.in_words("bytes") == f"; sending these bytes takes {rest}"
    assert cost.in_words("FLOP") == f"; computing these FLOPs takes at least {rest}"
