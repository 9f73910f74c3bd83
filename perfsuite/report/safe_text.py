"""Text that others wrote, such as an error or a name, as it may be shown without harm. Pure."""

import re

from perfsuite.redaction import masked

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_REORDERING = re.compile("[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""Signs that show what follows in another order, begin a line, or are invisible letters: text could look
like another text."""
_COMMAND = re.compile(r"^([^\S\n]*)::", re.MULTILINE)


def visible(text: str) -> str:
    """Return text that others wrote as people may see it: it looks as it is, and holds no secret.

    Control characters, which a terminal obeys, and what no encoding has are written as `\\x1b`, signs that
    reorder text as `\\u202e`.
    """
    shown = _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", masked(text))
    return _REORDERING.sub(lambda found: f"\\u{ord(found[0]):04x}", shown)


def printable(text: str) -> str:
    """Return text that others wrote, such as an error's, as it may go to a terminal or into a job's log.

    It is `visible`. GitHub obeys commands at the beginning of a line (`::`, however far it is indented) and
    anywhere in it (`##[`): a blank parts these signs.
    """
    shown = visible(text)
    return _COMMAND.sub(r"\1: :", shown).replace("##[", "## [")
