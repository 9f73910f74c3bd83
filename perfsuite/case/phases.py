"""Check the names of phases. A phase is a part of the training that a case or a script has named."""

import re

from perfsuite.errors import CaseError

LONGEST_NAME = 40
MEASURED_STEPS = "measured steps"
DATA_WAIT = "data wait"
"""`MEASURED_STEPS` and `DATA_WAIT` are names of rows in a report's table of spans."""
_NAMES_IN_REPORTS = (
    MEASURED_STEPS,
    DATA_WAIT,
    r"steps? \d.*",
    r"from step \d.*",
    r"every \d+(st|nd|rd|th) step\b.*",
    r"(cold|start-up)\b.*",
)


def phase_name(name: object) -> str:
    """Check the name of a phase and return it. Raises `CaseError` if it is not valid."""
    if not isinstance(name, str) or re.fullmatch(rf"[A-Za-z][\w ./-]{{0,{LONGEST_NAME - 1}}}", name) is None:
        raise CaseError(
            f"{name!r} is not a valid phase name: begin with a letter, followed by letters, digits, spaces "
            f"or any of _./- (at most {LONGEST_NAME} characters), such as 'rollout'"
        )
    if re.fullmatch("|".join(_NAMES_IN_REPORTS), name):
        raise CaseError(
            f"{name!r} is used in reports for steps, the start-up or the wait for data: "
            "give the phase another name"
        )
    return name
