from __future__ import annotations

import pytest

from perfsuite.results.baseline import from_runs
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Observed
from perfsuite.results.run import Run
from perfsuite.verdict.comparability import UNEXPLAINED
from perfsuite.verdict.overall import with_counts
from perfsuite.verdict.settings import ASKED, is_unlike
from tests.twin_counts import baseline_of, counts
from tests.verdict.judging import CHOSEN, judged, session, usual

OLD, NEW = {"torch": "2.13.0"}, {"torch": "2.14.0"}


def seen(runs: list[Run], environment: dict[str, str], **settings: str) -> list[Run]:
    observed = Observed(settings=settings, environment=environment)
    return [run.replace(observed=observed) for run in runs]


def upgraded(then: dict[str, str], now: dict[str, str], *, speed: float = 1.0) -> Verdict:
    """The verdict after an upgrade of torch that also changed these settings."""
    return session(seen(usual(speed), NEW, **now), from_runs(seen(usual()[:5], OLD, **then)))


@pytest.mark.parametrize(("speed", "outcome"), [(1.0, "passed"), (0.8, "regressed"), (1.25, "improved")])
@pytest.mark.parametrize("setting", ["attention_kernel", "wrapped_modules", "parameter_dtype", "a_hook"])
def test_what_a_library_chooses_is_listed_first_and_speed_is_judged(
    setting: str, speed: float, outcome: str
) -> None:
    verdict = upgraded({setting: "one"}, {setting: "two"}, speed=speed)
    assert (verdict.outcome, verdict.failure, verdict.reasons) == (outcome, None, ())
    chosen = f"{setting}: one -> two (not asked for by the case)"
    assert verdict.changed == (chosen, "torch: 2.13.0 -> 2.14.0")


def test_a_librarys_choice_that_no_version_explains_is_the_first_that_is_told() -> None:
    before, now = (seen(usual(), OLD, attention_kernel=kernel) for kernel in ("Flash", "math"))
    verdict = judged(now[:1], from_runs(before[:5]))
    assert verdict.outcome == "passed"
    said = "attention_kernel: Flash -> math (not asked for by the case)"
    assert verdict.reasons == (f"{UNEXPLAINED}: {said}",)
    assert verdict.changed[0] == said


@pytest.mark.parametrize("setting", sorted(ASKED))
def test_what_a_case_asks_for_otherwise_is_unlike_after_an_upgrade_too(setting: str) -> None:
    verdict = upgraded({setting: "one"}, {setting: "two"})
    assert (verdict.failure, verdict.launches) == ("unlike", 1)
    said = f"cannot be compared: observed {setting} was 'one' in the baseline and is 'two'"
    assert verdict.reasons == (said,)
    assert verdict.changed == ("torch: 2.13.0 -> 2.14.0",)


@pytest.mark.parametrize("setting", ["compute_dtype", "attention", "wrapper"])
@pytest.mark.parametrize("unseen", ["not observed (no linear layer)", "?", None])
@pytest.mark.parametrize("is_now", [True, False])
def test_what_was_not_observed_is_no_difference_and_is_told(
    setting: str, unseen: str | None, is_now: bool
) -> None:
    known, unknown = {setting: "one"}, {} if unseen is None else {setting: unseen}
    verdict = upgraded(*((known, unknown) if is_now else (unknown, known)))
    assert verdict.outcome == "passed"
    if is_now:
        assert verdict.changed[0] == f"{setting}: one -> {unseen or 'not observed'}"
    elif unseen is None:
        assert verdict.changed[-1] == f"{setting}: not looked at -> one"
    else:
        assert verdict.changed[0] == f"{setting}: {unseen} -> one"


def test_what_is_unlike_hides_no_counts() -> None:
    then = from_runs(seen(usual()[:5], OLD, wrapper="DDP"))
    (run,) = seen(usual()[:1], OLD, wrapper="FSDPModule")
    run = run.replace(counts=baseline_of(counts(host_reads={"forward": 99})).counts)
    verdict = with_counts(judged([run], then), [run], baseline_of())
    assert (verdict.outcome, verdict.failure) == ("failed", "unlike")
    assert verdict.counts is not None
    assert verdict.counts.outcome == "regressed"


def test_a_setting_is_asked_for_or_chosen() -> None:
    assert not ASKED & CHOSEN
    assert all(is_unlike(setting, "a", "b") for setting in ASKED)
    assert not any(is_unlike(setting, "a", "b") for setting in CHOSEN)
