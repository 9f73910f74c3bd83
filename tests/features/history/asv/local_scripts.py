"""Copies of the scripts that asv's pages load from a CDN. Test browsers are offline.

`make browser` installs the copies with npm, according to the package.json in this folder.
"""

import re
import shutil
from pathlib import Path

from tests.browser import skip_or_fail

PACKAGES = Path(__file__).parent / "node_modules"
FILES = {
    "jquery-3.3.1.min.js": "jquery/dist/jquery.min.js",
    "jquery.flot.min.js": "flot/jquery.flot.js",
    "jquery.flot.time.min.js": "flot/jquery.flot.time.js",
    "jquery.flot.selection.min.js": "flot/jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "flot/jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "flot-orderbars/js/jquery.flot.orderBars.js",
    "stupidtable.min.js": "stupid-table-plugin/stupidtable.min.js",
    "md5.min.js": "blueimp-md5/js/md5.min.js",
    "bootstrap.min.js": "bootstrap/dist/js/bootstrap.min.js",
    "bootstrap.min.css": "bootstrap/dist/css/bootstrap.min.css",
}
"""End of a script's address -> the file of the script in an npm package."""
_LOADED = re.compile(r'(src|href)="https?://[^"]*/([^"/]+)" integrity=[^>]*>')


def use_local_scripts(pages: Path) -> None:
    """Make the `index.html` of asv's pages load local copies of the scripts.

    If the copies are not installed, the test is skipped, or it fails if CI is set. Raises KeyError if a
    script has no known npm package.
    """
    if not PACKAGES.exists():
        skip_or_fail("the scripts of asv's pages are not installed: run `make browser`")
    index = pages / "index.html"
    for file in FILES.values():
        shutil.copy(PACKAGES / file, pages)
    text = _LOADED.sub(
        lambda match: f'{match[1]}="{Path(FILES[match[2]]).name}">', index.read_text(encoding="utf-8")
    )
    index.write_text(text, encoding="utf-8")
