"""Adds notes about the scripts to a page of `perfsuite releases`: `... PACKAGE < PAGE` in the Makefile."""

import sys
import tomllib
from pathlib import Path

NOTES = tomllib.loads(Path(__file__).with_name("notes.toml").read_text(encoding="utf-8"))


def noted(page: str, package: str) -> str:
    """Insert the general notes and this package's notes above the changes of each release."""
    head, section, rest = page.partition("\n## ")
    notes = [NOTES["all"].strip(), NOTES["packages"][package].strip()]
    return "\n".join([head.rstrip("\n"), "", "\n\n".join(notes), section + rest])


if __name__ == "__main__":
    sys.stdout.write(noted(sys.stdin.read(), sys.argv[1]))
