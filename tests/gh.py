"""A replacement for `gh`, GitHub's own command."""

import json
from pathlib import Path

from tests.processes import executable


class Gh:
    """A replacement for `gh` in a directory. Records its arguments and its standard input."""

    def __init__(self, directory: Path) -> None:
        self.program = executable(
            directory / "gh",
            f'cd "{directory}"; echo "$@" >> calls',
            'case "$*" in *"-file -"* | *"@-"* | *"--input -"*) cat >> calls ;; esac',
            'case "$2" in view | list) cat answer ;; create) echo https://example.org/made ;; esac',
            'case "$2" in repos/*/commits/*) cat commit ;; esac',
        )
        self._calls = directory / "calls"
        self._answer = directory / "answer"
        self._commit = directory / "commit"

    @property
    def calls(self) -> str:
        return self._calls.read_text() if self._calls.exists() else ""

    def answers(self, content: object) -> None:
        """Make the replacement print this content as JSON when a command reads a pull request or issues."""
        self._answer.write_text(json.dumps(content))

    def knows_commit(self, *parents: str) -> None:
        """Make the replacement report these parents for every commit."""
        self._commit.write_text(json.dumps({"parents": [{"sha": sha} for sha in parents]}))
