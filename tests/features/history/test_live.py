import json
import re
from pathlib import Path

import pytest

from tests.doc_pages import ROOT
from tests.features.history.live import write_live


@pytest.mark.launch
def test_home_page_links_to_a_live_chart(tmp_path: Path) -> None:
    """The link zooms the axis to the values, because on an axis from 0, a change of 3% is hardly visible."""
    write_live(tmp_path)
    home = (ROOT / "docs" / "index.md").read_text()
    ((chart, settings),) = re.findall(r'href="live/history/index\.html#(.*)\?(.*)"', home)
    benchmarks = json.loads((tmp_path / "live" / "history" / "index.json").read_text())["benchmarks"]
    assert chart in benchmarks
    assert settings == "y-axis-scale=zoom"
    assert 'href="live/history/history.html"' in home
    assert (tmp_path / "live" / "history" / "history.html").is_file()
