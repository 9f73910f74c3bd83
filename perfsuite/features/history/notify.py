"""Post to a webhook of Slack or Mattermost which cases changed state in a nightly run."""

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from perfsuite import documents
from perfsuite.errors import FileError, PerfsuiteError
from perfsuite.features.history import verdicts
from perfsuite.features.history.verdicts import CaseNight
from perfsuite.report import summary
from perfsuite.report.markdown import code
from perfsuite.report.text import cut
from perfsuite.results.session_file import SessionFile

TIMEOUT_S = 10
MOST = 40  # maximum number of lines about cases, because Slack and Mattermost truncate long texts


class _NoRedirect(HTTPRedirectHandler):
    """Treat redirects as errors, because nobody reads a message that is posted to a login page."""

    def redirect_request(self, *args: Any) -> None:
        return None


def announce(variable: str, history: Path, added: Sequence[Path], results: Sequence[Path]) -> str:
    """Post the cases whose state changed in added sessions.

    Return a line that says what was posted, or why nothing was posted. Raises nothing.
    """
    try:
        if not os.environ.get(variable, "").strip():
            return (
                f"--notify: nothing was posted: the variable {variable} is not set. Set it to the address of "
                "the webhook. In a workflow that calls perfsuite's workflow, pass the address as the secret "
                "notify_url"
            )
        sessions = list[SessionFile]()
        cut_short = list[str]()
        for file in results:
            try:
                sessions.append(documents.read(file, SessionFile))
            except FileError as error:  # the other sessions are still announced
                cut_short.append(f"a session could not be read: {error}")
        cut_short += filter(None, map(summary.interruption, sessions))
        changed = verdicts.changed(history, added) if added else []
        if not changed and not cut_short:
            return "--notify: nothing was posted, because no case changed its state"
        reasons = {
            (result.hardware_class or session.machine.hardware_class, result.case_id): summary.reason(result)
            for session in sessions
            for result in session.results
        }
        problem = post(variable, message(changed, reasons, os.environ.get("RUN_URL", ""), cut_short))
    except PerfsuiteError as error:
        problem = str(error)
    outcome = f"nothing was posted: {problem}" if problem else f"posted, {len(changed)} changed"
    return f"--notify: {outcome}"


def message(
    changed: Sequence[CaseNight],
    reasons: Mapping[tuple[str, str], str],
    link: str,
    cut_short: Sequence[str] = (),
) -> str:
    """Return a message about cases that changed state. The keys of `reasons` are hardware class and case.

    `cut_short` contains a reason for each session that was interrupted or cannot be read. These reasons come
    first.
    """
    lines = [f"perfsuite: {_safe(why)}" for why in cut_short]
    lines += ["perfsuite: cases changed since the night before"] if changed else []
    for state in ("red", "undecided", "green"):
        for night in (night for night in changed if night.state == state):
            why = reasons.get((night.place.hardware_class, night.case))
            line = f"newly {state}: {_safe(night.case)} on {_safe(night.place.hardware_class)}: {night.word}"
            lines.append(line + (f": {_safe(why)}" if why else ""))
    return "\n".join([*cut(lines, MOST + 1 + len(cut_short)), *filter(None, [escape(link, quote=False)])])


def _safe(text: str) -> str:
    """Return untrusted text as code, in which Slack and Mattermost recognise no markup and no mentions."""
    return escape(code(text.replace("->", "→")).replace("@", "@\u200b"), quote=False)


def post(variable: str, text: str, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Post a text to the address in a variable. Returns None, or the reason of a failure.

    The reason does not contain the address, because the address is a secret.
    """
    address = os.environ.get(variable, "").strip()
    if not address.startswith(("https://", "http://")):
        problem = "is not an address that begins with https://" if address else "is not set"
        return f"{variable} {problem}"
    try:
        content = {"Content-Type": "application/json"}
        request = Request(address, json.dumps({"text": text}).encode(), content)
        build_opener(_NoRedirect).open(request, timeout=timeout_s).close()
    except HTTPError as error:
        return f"the answer was {error.code}"
    except (OSError, HTTPException, ValueError) as error:  # the text of these errors can contain the address
        why = getattr(error, "reason", error)
        return getattr(why, "strerror", None) or type(why).__name__
    return None
