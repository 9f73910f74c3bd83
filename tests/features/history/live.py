"""Makes a live history for the documentation: `python -m tests.features.history.live build/docs`."""

import shutil
import sys
import tempfile
from pathlib import Path

from perfsuite.features.history import page
from perfsuite.features.history.asv.export import export, publish
from tests.features.history.nights import Level, write_history
from tests.sample_reports import SPEEDS
from tests.samples import make_case
from tests.synthetic import make_repository


def write_sample_history(root: Path) -> None:
    """Write a repository of 60 commits and the history of its nights.

    One case becomes slower, one becomes faster, and one uses more memory for a while.
    """
    tiny = make_case(hardware="h100")
    cases = [tiny.replace(framework=framework) for framework, _ in SPEEDS]
    commits = make_repository(root / "trainer", 60)

    def level(case: int, night: int) -> Level:
        return {
            ("fsdp2", night > 40): Level(step_s=1.03),
            ("trainer", night > 30): Level(step_s=0.93),
            ("torchtitan", 20 < night < 45): Level(memory=1.05),
        }.get((cases[case].framework.name, True), Level())

    write_history(root / "history", commits, cases, level)


def write_live(site: Path) -> None:
    """Write perfsuite's page and asv's pages of the sample history."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_sample_history(root)
        pages = root / "pages"
        exported = export(root / "history", root / "trainer", pages)
        page.write(publish(pages, commits=exported.commits), root / "history", root / "trainer")
        shutil.copytree(pages / "html", site / "live" / "history", dirs_exist_ok=True)


if __name__ == "__main__":
    write_live(Path(sys.argv[1]))
