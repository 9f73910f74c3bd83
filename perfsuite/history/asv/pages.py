"""Makes asv's pages of an export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from perfsuite.errors import PublishError


def publish(out: Path, *, commits: frozenset[str]) -> Path:
    """Run `asv publish` on an export of `commits`, and return the directory of the pages.

    Raises `PublishError` if asv fails or leaves out a commit.
    """
    done = subprocess.run(
        [sys.executable, "-m", "asv", "publish", "--no-pull", "--config", "asv.conf.json"],
        cwd=out,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise PublishError(f"asv publish in {out} ended with {done.returncode}: {done.stdout}{done.stderr}")
    pages = out / "html"
    shown = json.loads((pages / "index.json").read_text(encoding="utf-8"))["revision_to_hash"].values()
    if missing := commits - set(shown):  # asv exits with 0 whatever it leaves out
        raise PublishError(
            f"asv publish left out {len(missing)} of {len(commits)} commits, "
            f"{min(missing)[:8]} for one: {done.stdout}{done.stderr}"
        )
    return pages
