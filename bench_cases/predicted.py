"""Predict the speeds of a published table before it is opened, and compare them with the table afterwards.

    perfsuite dry-run ID ... --interconnect 8xib400
    python -m bench_cases.predicted freeze FROZEN.json [--store .perfsuite]
    python -m bench_cases.predicted compare FROZEN.json SHA256 [NAME ...] [--table published.json]

`freeze` writes the speeds that dry runs expect, and prints the digest of the file. `compare` refuses a file
with another digest, so that nobody can adapt a prediction to the table.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from bench_cases.published import PUBLISHED, PublishedFile, Row
from perfsuite import documents
from perfsuite.documents import Document
from perfsuite.errors import CaseError, PerfsuiteError
from perfsuite.inputs.ini import STORE
from perfsuite.report.console import console, plain_table
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import Store


class FrozenFile(Document):
    """The speeds that were predicted before a table was opened."""

    schema_version: Literal[1] = 1
    tokens_per_s: dict[str, float]  # case id -> predicted tokens/s of all devices together
    unknown: dict[str, str]  # case id -> why the case has no prediction


class Spread(NamedTuple):
    """The errors of several predictions, as shares of the published step time."""

    median: float
    nine_of_ten: float  # nine of ten predictions have at most this error

    @classmethod
    def of(cls, errors: Iterable[float]) -> Spread:
        """Return the spread of absolute errors."""
        ordered = sorted(map(abs, errors))
        return cls(median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1])


def as_predicted(ratios: Sequence[float]) -> Spread:
    """Return the errors of predictions. A ratio is the predicted step time / the published step time."""
    return Spread.of(ratio - 1 for ratio in ratios)


def with_one_factor(ratios: Sequence[float]) -> Spread:
    """Return the errors that remain if each prediction is divided by the ratio of another row.

    Each row in turn corrects all other rows.
    """
    return Spread.of(
        ratio / calibration - 1
        for index, calibration in enumerate(ratios)
        for other, ratio in enumerate(ratios)
        if other != index
    )


def frozen(sessions: Sequence[SessionFile]) -> FrozenFile:
    """Return the prediction of each case's newest dry run in these sessions, or why there is none."""
    newest: dict[str, DryFacts] = {}
    for session in sorted(sessions, key=lambda session: session.started_at):
        newest.update((result.case_id, result.dry_facts) for result in session.results if result.dry)
    return FrozenFile(
        tokens_per_s={
            case: facts.expected.tokens_per_s for case, facts in newest.items() if facts.expected is not None
        },
        unknown={case: facts.no_expected for case, facts in newest.items() if facts.no_expected is not None},
    )


def published_tokens_per_s(row: Row) -> float | None:
    """Return the published speed of all devices together; None if the row does not give one."""
    for figure in row.figures:
        if figure.value is not None and figure.quantity == "tokens_per_s":
            return figure.value
        if figure.value is not None and figure.quantity == "tokens_per_s_per_device":
            return figure.value * row.devices
    return None


def ratios(rows: Iterable[Row], predicted: Mapping[str, float]) -> dict[str, float]:
    """Return predicted step time / published step time by case id, for the rows that have both."""
    published = {row.case: published_tokens_per_s(row) for row in rows if row.case in predicted}
    return {case: speed / predicted[case] for case, speed in published.items() if speed is not None}


def checked(path: Path, sha256: str) -> FrozenFile:
    """Read a file of predictions. Raises `CaseError` if it is not the file with that digest."""
    its = digest(path)
    if its != sha256:
        raise CaseError(f"{path}: its SHA-256 is {its}, not {sha256}: it is not the file that was frozen")
    return documents.read(path, FrozenFile)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def show(table: PublishedFile, names: Sequence[str], predictions: FrozenFile) -> None:
    """Print the error of each predicted row, and the spread for each comparison."""
    out = console()
    for comparison in [table.find(name) for name in names] or table.comparisons:
        found = ratios(comparison.rows, predictions.tokens_per_s)
        if not found:
            continue
        grid = plain_table(["case", "error of the step time"])
        for case, ratio in found.items():
            grid.add_row(case, f"{ratio - 1:+.1%}")
        out.print(f"{comparison.name}, {comparison.accelerator}", style="bold")
        out.print(grid)
        out.print(f"as predicted: {_text(as_predicted([*found.values()]))}")
        if len(found) > 1:
            out.print(f"corrected with the ratio of another row: {_text(with_one_factor([*found.values()]))}")
    for case, reason in predictions.unknown.items():
        out.print(f"not predicted: {case}: {reason}")


def _text(spread: Spread) -> str:
    return f"median {spread.median:.1%}, nine of ten within {spread.nine_of_ten:.1%}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Freeze the predictions of dry runs, or compare frozen predictions with a published table."""
    parser = argparse.ArgumentParser(prog="python -m bench_cases.predicted", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    freeze = commands.add_parser("freeze", help="write the predictions, and print the digest of the file")
    freeze.add_argument("file", type=Path)
    freeze.add_argument("--store", type=Path, default=STORE, help="directory of the local store")
    comparing = commands.add_parser("compare", help="compare frozen predictions with a table")
    comparing.add_argument("file", type=Path)
    comparing.add_argument("sha256", help="digest that `freeze` printed")
    comparing.add_argument("names", nargs="*", metavar="NAME", help="name of a comparison (default: all)")
    comparing.add_argument("--table", type=Path, default=PUBLISHED, help="file like published.json")
    given = parser.parse_args(arguments)
    try:
        if given.command == "freeze":
            files = Store(given.store).results()
            documents.write(given.file, frozen([documents.read(file, SessionFile) for file in files]))
            print(digest(given.file))
        else:
            predictions = checked(given.file, given.sha256)  # before the table is read
            show(documents.read(given.table, PublishedFile), given.names, predictions)
    except (PerfsuiteError, OSError) as error:
        sys.exit(f"bench_cases.predicted: {error}")


if __name__ == "__main__":
    main()
