"""Helper: replaces the processes that a refresh of baselines runs."""

from pathlib import Path

from perfsuite import documents
from perfsuite.session.outputs import write_report
from tests.sessions import make_session

SESSION = make_session(1)


class Jobs:
    """Holds the exit statuses of commands, and the files that pytest leaves."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.refusal: str | None = None
        self.asked: list[tuple[str, ...]] = []
        self.commands: list[list[str]] = []
        self.measures = True
        self.reports = True

    def run(self, module: str, *arguments: str) -> int:
        self.commands.append([module, *arguments])
        if module == "pytest" and self.measures:
            documents.write(Path(".perfsuite/runs/20260101-000000-000000/results.json"), SESSION)
            if self.reports:
                write_report(Path("out"), SESSION)
                documents.write(Path("out/results.json"), SESSION)
        return self.statuses.get(arguments[0] if module == "perfsuite.cli" else module, 0)

    def refused(self, *arguments: str) -> str | None:
        self.asked.append(arguments)
        return self.refusal
