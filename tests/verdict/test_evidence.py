import pytest

from perfsuite.results.outcome import Verdict
from perfsuite.verdict.evidence import Evidence

UNDECIDED = Verdict(outcome="undecided", launches=4, reasons=("first",))


def test_a_launch_without_problems_is_healthy() -> None:
    evidence = Evidence.of("abc", {1: [], 2: ["hot"], 3: []})
    assert (evidence.healthy, evidence.set_aside) == (["a", "c"], {2: ["hot"]})


@pytest.mark.parametrize(
    ("healthy", "set_aside", "most", "expected"),
    [(0, 3, 3, True), (0, 2, 3, False), (3, 3, 3, True), (4, 3, 3, False), (0, 1, 1, True), (0, 0, 1, False)],
)
def test_decides_whether_evidence_is_too_little(
    healthy: int, set_aside: int, most: int, expected: bool
) -> None:
    problems = {number: ["hot"] for number in range(1, set_aside + 1)}
    evidence = Evidence.of(range(healthy + set_aside), problems)
    assert evidence.is_too_little(most) is expected


@pytest.mark.parametrize(("healthy", "expected"), [(0, True), (1, False)])
def test_no_healthy_launch_is_too_little_in_the_end(healthy: int, expected: bool) -> None:
    evidence = Evidence.of(range(healthy + 1), {1: ["hot"]})
    assert evidence.is_too_little(3, is_last=True) is expected


def test_a_verdict_names_what_is_set_aside() -> None:
    verdict = Evidence.of("abcd", {2: ["hot", "shared"], 4: ["hot"]}).named_in(UNDECIDED, "pair")
    assert verdict.unhealthy_launches == (2, 4)
    assert verdict.reasons == ("first", "pair 2 set aside: hot; shared", "pair 4 set aside: hot")
