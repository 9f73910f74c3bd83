"""A live history for the documentation: `python -m tests.features.history.live build/docs`."""

import shutil
import sys
import tempfile
from pathlib import Path

from perfsuite import DDP, FSDP2
from perfsuite.features.history.asv.export import export, publish
from tests.features.history.nights import Level, write_history
from tests.samples import make_case
from tests.synthetic import make_repository


def write_live(site: Path) -> None:
    """Write asv's pages of a history of 60 nights, made up."""
    tiny = make_case(hardware="h100")
    cases = [tiny.replace(framework=framework) for framework in (DDP(), FSDP2())]
    with tempfile.TemporaryDirectory() as directory:
        repository = Path(directory, "repository")
        history = Path(directory, "history")
        commits = make_repository(repository, 60)
        pages = Path(directory, "pages")
        write_history(
            history, commits, cases, lambda case, night: Level(step_s=1.03 if case and night > 40 else 1.0)
        )
        exported = export(history, repository, pages)
        publish(pages, commits=exported.commits)
        shutil.copytree(pages / "html", site / "live" / "history", dirs_exist_ok=True)


if __name__ == "__main__":
    write_live(Path(sys.argv[1]))
