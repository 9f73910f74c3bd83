"""Names of phases: parts of training that a case or a script names."""

import re

from perfsuite.errors import CaseError

LONGEST_NAME = 40


def phase_name(name: object) -> str:
    """Check the name of a phase and return it. Raises `CaseError` if it is not valid."""
    if not isinstance(name, str) or re.fullmatch(rf"[A-Za-z][\w ./-]{{0,{LONGEST_NAME - 1}}}", name) is None:
        raise CaseError(
            f"{name!r} is not a valid phase name: begin with a letter, followed by letters, digits, spaces "
            f"or any of _./- (at most {LONGEST_NAME} characters), such as 'rollout'"
        )
    if re.fullmatch(r"step \d+|(cold|start-up)\b.*", name):
        raise CaseError(
            f"{name!r} is used in reports for a step or the start-up: give the phase another name"
        )
    return name
