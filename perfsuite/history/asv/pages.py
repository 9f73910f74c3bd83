"""asv's pages out of an export, made to work where there is no internet. Imports neither torch nor pytest."""

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
"""What asv's pages load, and which file of `vendor/` it is."""
_REMOTE = re.compile(r'(?P<where>src|href)="https?://[^"]*/(?P<name>[^"/]+)"(?P<rest>[^>]*)>')
_LOADED = re.compile(r'<(?:script|link|img)\b[^>]*\b(?:src|href)="(https?://[^"]*)"')


def publish(out: Path, *, commits: frozenset[str]) -> Path:
    """Run `asv publish` on an export that shows `commits`, and return the directory of the pages.

    Raises `PublishError`, also if asv left a commit out or loads something that `vendor/` does not have.
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
    """Point `index.html` to copies of the scripts and styles that it loads from elsewhere."""
    index = pages / "index.html"
    text = _REMOTE.sub(_local, index.read_text(encoding="utf-8"))
    if remote := _LOADED.findall(text):
        raise PublishError(f"{index} loads what perfsuite has no copy of: {', '.join(remote)}")
    shutil.copytree(VENDOR, pages / "vendor", dirs_exist_ok=True)
    documents.write_text(index, text)


def _local(found: re.Match[str]) -> str:
    if found["name"] not in LOCAL:
        return found[0]
    rest = re.sub(r'\s(integrity|crossorigin|referrerpolicy)="[^"]*"', "", found["rest"])
    return f'{found["where"]}="vendor/{LOCAL[found["name"]]}"{rest}>'


def _check_commits(pages: Path, expected: frozenset[str], said: str) -> None:
    """Whether asv knows every commit that it was given: it exits 0 whatever it leaves out."""
    shown = json.loads((pages / "index.json").read_text(encoding="utf-8"))["revision_to_hash"].values()
    if missing := expected - set(shown):
        raise PublishError(
            f"asv publish left out {len(missing)} of {len(expected)} commits, "
            f"{min(missing)[:8]} for one: {said}"
        )
