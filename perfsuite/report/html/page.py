"""Makes one HTML page of sessions, which works offline. Imports neither torch nor pytest.

Everything from data is escaped. Beyond that, the page's own policy (CSP) forbids every script and style but
its own, and every request.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from perfsuite.report import preflight, summary
from perfsuite.report.columns import Column, extras, of_cases
from perfsuite.report.html import tables
from perfsuite.report.html.case_view import CaseView, case_view, overview
from perfsuite.report.scaling import scalings
from perfsuite.report.table import Table
from perfsuite.results.outcome import STYLES, WORST_FIRST
from perfsuite.results.preflight import Preflight
from perfsuite.results.session_file import SessionFile


def render(sessions: Sequence[SessionFile]) -> str:
    """Return the page of one or more sessions."""
    results = [result for session in sessions for result in session.results]
    unit = summary.speed_unit(results)
    views = _views(sessions, of_cases(results, overview(unit, extras(results))))
    counts = Counter(view.verdict for view in views)
    style, script = _own("report.css"), _own("report.js")
    environment = Environment(
        loader=PackageLoader("perfsuite.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        headline=summary.headline(sessions),
        sessions=[(summary.provenance(session), summary.interruption(session)) for session in sessions],
        views=views,
        columns=_columns(views),
        unit=unit,
        verdicts=[(verdict, counts[verdict]) for verdict in WORST_FIRST if counts[verdict]],
        only_dry=summary.only_dry(results),
        arms=any(session.arms for session in sessions),
        several_classes=len({view.hardware for view in views}) > 1,
        skipped=_skipped(sessions),
        preflights=[_preflight(each) for session in sessions for each in session.preflights],
        scalings=[(each.name, each.table()) for each in scalings(results)],
        styles=STYLES,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
    )


def _views(sessions: Sequence[SessionFile], columns: Sequence[Column]) -> list[CaseView]:
    """Return every case, the worst first, else in the order they were measured."""
    taken: Counter[str] = Counter()
    views = []
    for session in sessions:
        for result in session.results:
            anchor = "case-" + re.sub(r"[^A-Za-z0-9._+-]", "_", result.case_id)
            taken[anchor] += 1
            if taken[anchor] > 1:
                anchor += f":{taken[anchor]}"
            views.append(case_view(result, session, anchor=anchor, columns=columns))
    return sorted(views, key=lambda view: WORST_FIRST.index(view.verdict))


def _columns(views: Sequence[CaseView]) -> list[str]:
    """The headings of the overview: those for which any case has a figure."""
    known = [{name for name, cell in view.summary.items() if cell.number is not None} for view in views]
    return [name for name in (views[0].summary if views else ()) if name in set().union(*known)]


def _skipped(sessions: Sequence[SessionFile]) -> Table | None:
    rows = [(skip.case_id, skip.reason) for session in sessions for skip in session.skipped]
    caption = "Cases that this hardware cannot run, and why."
    return Table(caption=caption, headers=("case", "reason"), rows=rows, text_columns=2) if rows else None


def _preflight(found: Preflight) -> tuple[str, list[Table], list[str]]:
    gpus = tables.gpus(
        [(node.name, node.health) for node in found.nodes if node.health is not None],
        of="node",
        caption="Each GPU meanwhile: clocks are medians, power is the mean, temperature the highest.",
    )
    return preflight.title(found), [preflight.table(found), *gpus], preflight.notes(found)


def _own(name: str) -> str:
    return resources.files("perfsuite.report.html").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
