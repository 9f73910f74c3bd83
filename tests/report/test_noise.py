from dataclasses import replace

from perfsuite.report.noise import NOT_SEPARATE, UNKNOWN, sentence
from perfsuite.verdict.sequential import Noise
from perfsuite.verdict.variance import Component

OF_SESSION = Component(observed=1.01e-4, explained=1e-6, degrees=2)
OF_CASE = Component(observed=5e-6, explained=1e-6, degrees=9)
NOISE = Noise(sigma=0.003, degrees_of_freedom=30, of_session=OF_SESSION, of_case=OF_CASE)


def test_shows_each_effect_with_its_limit() -> None:
    assert sentence(NOISE, "h100") == (
        "noise of tokens/s on h100: 0.3% between launches; between sessions: 1.0% (at most 2.7%); "
        "of a case within a session: 0.2% (at most 0.3%)"
    )


def test_one_session_shows_only_launches() -> None:
    alone = replace(NOISE, of_session=None, of_case=None)
    assert sentence(alone, "h100").endswith(f"0.3% between launches; between sessions: {UNKNOWN}")


def test_one_case_cannot_separate_sessions() -> None:
    assert sentence(replace(NOISE, of_case=None), "h100").endswith(f"within a session: {NOT_SEPARATE}")
