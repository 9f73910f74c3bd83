"""Make text of others, such as an error or a name, safe to show. Pure."""

import re

from perfsuite.redaction import masked

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_REORDERING = re.compile("[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""Characters that reorder text, break lines, or are invisible, so that text can look like other text."""
_COMMAND = re.compile(r"^([^\S\n]*)::", re.MULTILINE)


def visible(text: str) -> str:
    """Return text of others as it can be shown: it cannot look like other text, and secrets are masked.

    Control characters, which a terminal obeys, and surrogates are written as `\\x1b`, characters that reorder
    text as `\\u202e`.
    """
    shown = _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", masked(text))
    return _REORDERING.sub(lambda found: f"\\u{ord(found[0]):04x}", shown)


def printable(text: str) -> str:
    """Return text of others, such as an error, as it can go to a terminal or into a job's log.

    It is `visible`. GitHub obeys commands at the beginning of a line (`::`, at any indentation) and anywhere
    in it (`##[`), so a blank separates these characters.
    """
    shown = visible(text)
    return _COMMAND.sub(r"\1: :", shown).replace("##[", "## [")
