"""The comment on a pull request and the chat message, as HTML pages that are photographed.

The texts are those that `perfsuite github comment` and `perfsuite history add --notify` send for the sample
session. Only the frames around them are ours.
"""

import html
import re
from datetime import UTC, datetime
from pathlib import Path

from markdown_it import MarkdownIt

from perfsuite.features.github.command import commented
from perfsuite.features.history.notify import message
from perfsuite.features.history.store import Place, StoredVerdict
from perfsuite.features.history.verdicts import CaseNight
from perfsuite.report import summary
from tests.sample_reports import session

RUN_URL = "https://github.com/OWNER/REPOSITORY/actions/runs/1"
FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ margin: 0; padding: 16px; color: #1f2328; background: #fff;
  font: 14px/1.5 system-ui, "DejaVu Sans", sans-serif; }}
a {{ color: #0969da; }}
.box {{ border: 1px solid #d1d9e0; border-radius: 6px; }}
.by {{ padding: 8px 16px; color: #59636e; background: #f6f8fa; border-bottom: 1px solid #d1d9e0;
  border-radius: 6px 6px 0 0; }}
.by b {{ color: #1f2328; }}
.text {{ padding: 4px 16px 12px; }}
h2 {{ font-size: 21px; border-bottom: 1px solid #d1d9e0; padding-bottom: 6px; }}
h3 {{ font-size: 17px; }}
table {{ border-collapse: collapse; }}
th, td {{ border: 1px solid #d1d9e0; padding: 6px 13px; }}
code {{ background: #eff1f3; border-radius: 4px; padding: 2px 5px;
  font: 12px "DejaVu Sans Mono", monospace; }}
.chat {{ display: grid; grid-template-columns: 40px 1fr; gap: 4px 12px; }}
.face {{ width: 40px; height: 40px; border-radius: 8px; background: #0b5cad; color: #fff;
  font: 600 20px/40px sans-serif; text-align: center; }}
.chat code {{ color: #c01343; border: 1px solid #dddddd; }}
</style></head><body>{body}</body></html>
"""


def comment() -> str:
    """Return the comment on a pull request as GitHub shows it, in our frame."""
    text = commented([session()], RUN_URL, "<!-- perfsuite: comment perfsuite -->")
    shown = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text)
    by = '<p class="by" style="margin:0"><b>github-actions</b> bot commented</p>'
    return FRAME.format(title="comment", body=f'<div class="box">{by}<div class="text">{shown}</div></div>')


def chat() -> str:
    """Return the message of a night as a chat shows it, in our frame."""
    measured = session()
    nights = [
        CaseNight(
            Place(Path(), str(result.hardware_class), str(measured.commit), "20260102"),
            result.case_id,
            StoredVerdict(word=result.outcome),
        )
        for result in measured.results
        if result.outcome == "regressed"
    ]
    reasons = {
        (str(result.hardware_class), result.case_id): summary.reason(result) for result in measured.results
    }
    text = message(nights, reasons, RUN_URL)
    lines = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", text)
    lines = re.sub(r"https://\S+", lambda match: f'<a href="{match[0]}">{match[0]}</a>', lines)
    at = datetime.fromisoformat(measured.started_at).astimezone(UTC)
    body = (
        f'<div class="chat"><div class="face">p</div><div><b>perfsuite</b> <span style="color:#59636e">'
        f"{html.escape(f'{at:%H:%M}')}</span><br>{lines.replace(chr(10), '<br>')}</div></div>"
    )
    return FRAME.format(title="message", body=body)
