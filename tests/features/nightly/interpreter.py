"""Helper: a program in place of the Python interpreter with which a night runs pytest and perfsuite."""

import shutil
import sys
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.session.outputs import write_report
from tests.processes import executable
from tests.sessions import make_session

SESSION = make_session(1)
REFUSED = 4  # exit status of pytest for wrong arguments


class Interpreter:
    """Records how a night calls its interpreter. A call of pytest leaves the files of `SESSION`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory.mkdir()
        self._directory = directory
        documents.write(directory / "results.json", SESSION)
        write_report(directory / "out", SESSION)
        documents.write(directory / "out" / "results.json", SESSION)
        self.end_with()
        program = executable(
            directory / "python",
            f"here='{directory}'",
            "shift  # -m",
            'case "$*" in *" --collect-only --quiet --color=no")',
            '    printf "%s\\n" "$@" > "$here/asked"',
            f'    if [ -e "$here/refusal" ]; then cat "$here/refusal" >&2; exit {REFUSED}; fi',
            "    exit 0;;",
            "esac",
            'printf "%s\\n" "$@" "" >> "$here/calls"',
            'if [ "$1" = pytest ] && [ -e "$here/results.json" ]; then',
            "    run=.perfsuite/runs/20260101-000000-000000",
            '    cp -r out "$here/before"',
            '    mkdir -p "$run"',
            '    cp "$here/results.json" "$run"',
            '    printf %s "$PERFSUITE_NIGHT" > "$run/night"',
            '    cp -r "$here/out" .',
            "fi",
            'if [ "$1" = pytest ]; then name=$1; else name=$2; fi',
            'status=$(sed -n "s/^$name //p" "$here/statuses")',
            'case "$status" in -*) kill "$status" $$;; esac',
            'exit "${status:-0}"',
        )
        monkeypatch.setattr(sys, "executable", str(program))

    def end_with(self, **statuses: int) -> None:
        """End these commands with these exit statuses, and all others with 0. -9 stands for SIGKILL."""
        lines = [f"{name} {status}\n" for name, status in statuses.items()]
        (self._directory / "statuses").write_text("".join(lines))

    def refuse(self, message: str) -> None:
        """Let pytest refuse its arguments with this message."""
        (self._directory / "refusal").write_text(f"{message}\n")

    def accept(self) -> None:
        """Let pytest accept its arguments again."""
        (self._directory / "refusal").unlink()

    def measure_nothing(self) -> None:
        """Let pytest leave no files."""
        (self._directory / "results.json").unlink()

    def cut_short(self) -> None:
        """Let pytest end in the middle of its session, without a report."""
        documents.write(self._directory / "results.json", SESSION.replace(status="running"))
        shutil.rmtree(self._directory / "out")
        (self._directory / "out").mkdir()

    def forget_report(self) -> None:
        """Restore the directory `out` of the time at which pytest began. The session of the night stays."""
        shutil.rmtree("out")
        shutil.copytree(self._directory / "before", "out")

    @property
    def commands(self) -> list[list[str]]:
        """The module and the arguments of each call, except questions."""
        calls = self._directory / "calls"
        texts = calls.read_text().split("\n\n") if calls.exists() else []
        return [text.splitlines() for text in texts if text]

    @property
    def asked(self) -> list[str]:
        """The arguments about which pytest was asked last, without those that make it collect only."""
        return (self._directory / "asked").read_text().splitlines()[1:-3]
