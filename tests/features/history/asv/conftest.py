"""Fixture with asv's pages of 30 nights. The pages are made once for all tests that read them."""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli import commands
from tests.features.history.nights import Level, write_history
from tests.samples import make_case
from tests.synthetic import make_repository

CASES = [make_case(hardware="h100", micro_batch=n) for n in (1, 2, 4, 8)]
SLOWER, FASTER, LARGER, SAME = range(4)
CHANGES = {SLOWER: (15, Level(step_s=1.1)), FASTER: (10, Level(step_s=0.9)), LARGER: (20, Level(memory=1.03))}
"""Case -> the first night of its new level, and this level."""
NIGHTS = 30
UNKNOWN = "f" * 40
"""A commit that is in the history but not in the repository."""


class Published(NamedTuple):
    """The files and the output of `perfsuite history publish`."""

    root: Path  # holds the repository in `repo`, the history in `history`, the export in `out`
    output: str


def levels(case: int, night: int) -> Level:
    first, level = CHANGES.get(case, (0, Level()))
    return level if night >= first else Level()


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    root = tmp_path_factory.mktemp("published")
    commits = make_repository(root / "repo", NIGHTS)
    write_history(root / "history", [*commits, UNKNOWN], CASES, levels)
    where = (f"--history={root / 'history'}", f"--repo={root / 'repo'}")
    return Published(root, commands.run("history", "publish", "--out", root / "out", *where).output)
