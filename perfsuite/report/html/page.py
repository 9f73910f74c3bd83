"""Render sessions as one HTML page that works offline. All data is escaped.

The page's content security policy (CSP) forbids all requests, and all scripts and styles except its own.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from perfsuite import extensions
from perfsuite.extensions import COMMANDS
from perfsuite.report import common_change, counts, nodes, summary
from perfsuite.report.columns import Column, extras, of_cases
from perfsuite.report.html import tables
from perfsuite.report.html.case_view import case_view, overview
from perfsuite.report.names import short_names
from perfsuite.report.safe_text import visible
from perfsuite.report.text import Table
from perfsuite.results.outcome import STYLES, WORST_FIRST
from perfsuite.results.session_file import Preflight, SessionFile

Finalize = Callable[[object], Markup]
PACKAGE = "perfsuite.report.html"  # contains the templates and the style sheet of reports


def render(sessions: Sequence[SessionFile]) -> str:
    """Return the page of one or more sessions."""
    results = [result for session in sessions for result in session.results]
    unit = summary.speed_unit(results)
    columns = of_cases(results, overview(unit, extras(results)))
    views = _views(sessions, columns)
    shown = [name for name, _ in columns if any(view["cells"][name].number is not None for view in views)]
    number_of = Counter(map(summary.verdict, results))
    style = template_text(PACKAGE, "report.css")
    script = template_text(PACKAGE, "report.js")
    return rendered(
        "report.html",
        sessions,
        views=views,
        columns=shown,
        unit=unit,
        verdicts=[(verdict, number_of[verdict]) for verdict in WORST_FIRST if number_of[verdict]],
        only_dry=summary.only_dry(results),
        arms=any(session.arms for session in sessions),
        several_classes=len({result.hardware_class for result in results}) > 1,
        summary=summary,
        counts=counts,
        names=short_names(
            {result.case_id: result.runs[0].case.parameters if result.runs else {} for result in results}
        ),
        styles=STYLES,
        style=Markup(style),
        script=Markup(script),
        policy=f"{style_policy(style)}; script-src '{_hash(script)}'",
    )


def rendered(
    template: str, sessions: Sequence[SessionFile], *, finalize: Finalize | None = None, **content: Any
) -> str:
    """Render a template with `content` and the content that all reports share.

    `finalize` escapes the values (default: as HTML).
    """
    results = [result for session in sessions for result in session.results]
    return (
        environment(PACKAGE, finalize)
        .get_template(template)
        .render(
            headline=summary.headline(sessions),
            judge_changes=summary.judge_changes(session.judge_changes for session in sessions),
            sessions=[
                (
                    summary.provenance(session),
                    [
                        *filter(None, [summary.interruption(session)]),
                        *common_change.sentences(session.results, session.reference),
                        *map(str.strip, summary.case_changes(session)),
                        *summary.unclaimed_lines(session.unclaimed),
                        *session.waivers,
                    ],
                )
                for session in sessions
            ],
            skipped=Table(
                caption="Cases that this hardware cannot run or that their tests skipped, with the reason.",
                headers=("case", "reason"),
                rows=[(skip.case_id, skip.reason) for session in sessions for skip in session.skipped],
                text_columns=2,
            ),
            preflights=[_preflight(preflight) for session in sessions for preflight in session.preflights],
            scalings=nodes.scalings(results),
            **content,
        )
    )


def environment(package: str, finalize: Finalize | None = None) -> Environment:
    """Return Jinja's environment for a package's templates; `finalize` escapes values (default: as HTML)."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        finalize=finalize or _visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def template_text(package: str, name: str) -> str:
    """Return the unchanged text of a file among a package's templates, such as a style sheet."""
    return resources.files(package).joinpath("templates", name).read_text(encoding="utf-8")


def style_policy(style: str) -> str:
    """Return the CSP of a page that has this style sheet and makes no requests."""
    return f"default-src 'none'; img-src data:; style-src '{_hash(style)}'"


def _views(sessions: Sequence[SessionFile], columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the views of all cases, worst first. Equally bad cases are in the order of measurement."""
    taken: Counter[str] = Counter()
    commands = extensions.names(COMMANDS)
    views = []
    for session in sessions:
        for result in session.results:
            anchor = "case-" + re.sub(r"[^A-Za-z0-9._+-]", "_", result.case_id)
            taken[anchor] += 1
            if taken[anchor] > 1:
                anchor += f":{taken[anchor]}"
            view = case_view(result, session, anchor=anchor, columns=columns, commands=commands)
            views.append(view)
    return sorted(views, key=lambda view: WORST_FIRST.index(summary.verdict(view["result"])))


def _preflight(preflight: Preflight) -> tuple[str, list[Table], list[str]]:
    seen = [(node.name, node.health) for node in preflight.nodes if node.health is not None]
    shown = [nodes.table(preflight), tables.gpus(seen, of="node", when="during the preflight")]
    return nodes.title(preflight), [table for table in shown if table], nodes.notes(preflight)


def _visible(value: object) -> object:
    """Apply `visible` to text that a template prints. The template itself escapes the text."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
