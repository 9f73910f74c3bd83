"""Describe the noise of a hardware class: between launches, between sessions, and of single cases. Pure."""

from perfsuite.verdict.sequential import Noise
from perfsuite.verdict.variance import Component

UNKNOWN = "unknown: accept baselines of two sessions or more (perfsuite baseline accept --sessions 2)"
NOT_SEPARATE = "not known separately, because no two cases have baselines of the same sessions"


def sentence(noise: Noise, hardware_class: str) -> str:
    """Return the standard deviations of tokens/s as a sentence.

    There are three: between launches, between sessions, and of the additional shift of a single case within
    a session. The last two are given with their upper limits.
    """
    of_session, of_case = noise.of_session, noise.of_case
    launches = f"noise of tokens/s on {hardware_class}: {noise.sigma:.1%} between launches"
    if of_session is None:
        return f"{launches}; between sessions: {UNKNOWN}"
    within = NOT_SEPARATE if of_case is None else _shown(of_case)
    return f"{launches}; between sessions: {_shown(of_session)}; of a case within a session: {within}"


def _shown(component: Component) -> str:
    return f"{component.sigma:.1%} (at most {component.upper_sigma:.1%})"
