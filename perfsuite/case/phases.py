"""Names of phases, which are parts of a training that a case or a script names."""

import re

from perfsuite.errors import CaseError

LONGEST_NAME = 40


def phase_name(name: object) -> str:
    """Check the name of a phase and return it. Raises `CaseError` for an invalid one."""
    if not isinstance(name, str) or re.fullmatch(rf"[A-Za-z][\w ./-]{{0,{LONGEST_NAME - 1}}}", name) is None:
        raise CaseError(
            f"{name!r} is no name of a phase: begin with a letter, and go on with letters, digits, spaces or "
            f"any of _./-, {LONGEST_NAME} in all at the most, as 'rollout'"
        )
    if re.fullmatch(r"step \d+|(cold|start-up)\b.*", name):
        raise CaseError(
            f"{name!r} is taken in reports, by a step or by the start-up: give the phase another name"
        )
    return name
