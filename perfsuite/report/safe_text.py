"""Make foreign text, such as an error or a name, safe to show. Pure."""

import re

from perfsuite.redaction import masked

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_REORDERING = re.compile("[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""Characters that reorder text, break lines or are invisible, so that a text can look like another text."""
_COMMAND = re.compile(r"^([^\S\n]*)::", re.MULTILINE)


def visible(text: str) -> str:
    """Return foreign text in a form that is safe to show, and mask secrets.

    Control characters, which a terminal obeys, and surrogates are written like `\\x1b`. Characters that
    reorder text are written like `\\u202e`.
    """
    shown = _UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", masked(text))
    return _REORDERING.sub(lambda match: f"\\u{ord(match[0]):04x}", shown)


def printable(text: str) -> str:
    """Return foreign text, such as an error, in a form that is safe for a terminal and for a job's log.

    The text is made `visible`. GitHub also obeys commands in logs: `::` at the beginning of a line, with any
    indentation, and `##[` anywhere. A space is inserted to disable them.
    """
    shown = visible(text)
    return _COMMAND.sub(r"\1: :", shown).replace("##[", "## [")
