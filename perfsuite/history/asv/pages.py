"""Makes asv's pages of an export, so that they work without internet. Imports neither torch nor pytest."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from perfsuite import documents
from perfsuite.errors import PublishError

VENDOR = Path(__file__).parent / "vendor"
LOCAL = {
    "jquery-3.3.1.min.js": "jquery.min.js",
    "jquery.flot.min.js": "jquery.flot.js",
    "jquery.flot.time.min.js": "jquery.flot.time.js",
    "jquery.flot.selection.min.js": "jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "jquery.flot.orderBars.js",
    "stupidtable.min.js": "stupidtable.min.js",
    "md5.min.js": "md5.min.js",
    "bootstrap.min.js": "bootstrap.min.js",
    "bootstrap.min.css": "bootstrap.min.css",
}
"""The file of `vendor/` that replaces each script and style that asv's pages load."""
_REMOTE = re.compile(r'(?P<where>src|href)="https?://[^"]*/(?P<name>[^"/]+)"(?P<rest>[^>]*)>')
_LOADED = re.compile(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="(https?://[^"]*)"')


def publish(out: Path, *, commits: frozenset[str]) -> Path:
    """Run `asv publish` on an export of `commits`, and return the directory of the pages.

    Raises `PublishError` if asv fails, leaves out a commit, or loads something that `vendor/` does not have.
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
    _check_commits(pages, commits, done.stdout + done.stderr)
    make_local(pages)
    return pages


def make_local(pages: Path) -> None:
    """Point `index.html` to local copies of the scripts and styles that it loads.

    Raises `PublishError` if one has no copy.
    """
    index = pages / "index.html"
    text = _REMOTE.sub(_local, index.read_text(encoding="utf-8"))
    if remote := _LOADED.findall(text):
        raise PublishError(f"{index} loads what perfsuite has no copy of: {', '.join(remote)}")
    shutil.copytree(VENDOR, pages / "vendor", dirs_exist_ok=True)
    documents.write_text(index, text.replace("of an unladen", "of"))


def _local(found: re.Match[str]) -> str:
    """Return the attribute that loads the local copy; unchanged if there is none."""
    if found["name"] not in LOCAL:
        return found[0]
    rest = re.sub(r'\s(integrity|crossorigin|referrerpolicy)="[^"]*"', "", found["rest"])
    return f'{found["where"]}="vendor/{LOCAL[found["name"]]}"{rest}>'


def _check_commits(pages: Path, expected: frozenset[str], output: str) -> None:
    """Raise `PublishError` if asv left out a commit: it exits with 0 whatever it leaves out."""
    shown = json.loads((pages / "index.json").read_text(encoding="utf-8"))["revision_to_hash"].values()
    if missing := expected - set(shown):
        raise PublishError(
            f"asv publish left out {len(missing)} of {len(expected)} commits, "
            f"{min(missing)[:8]} for one: {output}"
        )
