"""Makes files of pull requests and of issues of nights, for `tests.benchmarks.damaged` to damage."""

import json
from pathlib import Path

from perfsuite import documents
from perfsuite.features.github.issue import title
from perfsuite.results.trend import Trend
from tests import samples
from tests.benchmarks.damaged.world import URL, Target, bad_result, stand_in
from tests.features.github.test_issue import drift
from tests.samples import COMMIT


def targets(root: Path) -> list[Target]:
    """Make the projects, and return the files that can be damaged."""
    results = "results/results.json"
    answered = root / "answered"
    samples.write_session(answered / "results", bad_result())
    stand_in(answered / "bin", {"headRefOid": COMMIT, "comments": [], "commits": [{"oid": COMMIT}]})
    comment = ("github", "comment", results, "--run-url", URL, "--pull-request", "7")
    night = root / "night"
    samples.write_session(night / "results", bad_result())
    body = f"text\n<!-- perfsuite: {json.dumps([samples.make_case().id])} -->"
    stand_in(night / "bin", [{"number": 7, "title": title("cpu-test-2c"), "body": body}])
    issue = ("github", "issue", results, "--run-url", URL)
    return [
        Target("answered", results, "sealed", [comment]),
        Target("answered", "bin/answer", "sealed", [comment], is_printed=True),
        Target("night", results, "sealed", [issue]),
        Target("night", "bin/answer", "sealed", [issue], is_printed=True),
        _drifted(root),
    ]


def _drifted(root: Path) -> Target:
    """Make a night whose results are good, and a trend with an open drift."""
    project = root / "drifted"
    samples.write_session(project / "results", samples.make_result(samples.BEFORE))
    finding = drift()
    trend = Trend(since=finding.first_day, sessions=24, series=2, findings=(finding,), unplaced={})
    documents.write(project / "trend.json", trend)
    subject = f"drift of {finding.case}, {finding.metric}"
    body = f"text\n<!-- perfsuite: {json.dumps([subject])} -->"
    stand_in(project / "bin", [{"number": 7, "title": title("cpu-test-2c"), "body": body}])
    issue = ("github", "issue", "results/results.json", "--run-url", URL, "--trend", "trend.json")
    return Target("drifted", "trend.json", "sealed", [issue])
