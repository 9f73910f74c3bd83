"""Settings for `make docs`, which builds the site with Sphinx and MyST, without internet access."""

from typing import Any

from docutils import nodes
from pydantic import BaseModel
from sphinx import addnodes

from perfsuite import __version__

project = "perfsuite"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"perfsuite {__version__}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # files for coding agents: llms.txt and a skill
exclude_patterns = ["extra"]

myst_heading_anchors = 3
default_role = "code"  # the docstrings write code in single backquotes
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "undoc-members": True,
    "exclude-members": "model_config",
}
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]


def without_fields(_app: Any, what: str, _name: str, documented: Any, *_: Any) -> tuple[str, str] | None:
    """Remove the fields from the signature of a data class, because they are explained below it."""
    return ("", "") if what == "class" and issubclass(documented, BaseModel) else None


def without_validators(_app: Any, doctree: nodes.document) -> None:
    """Show only the type of a field. Leave out the checks in `Annotated`, because the text explains them."""
    for node in doctree.findall(addnodes.desc_annotation):
        text = node.astext()
        if "Annotated[" in text:
            node.children = []
            node += nodes.Text(bare(text))


def bare(annotation: str) -> str:
    """Return an annotation in which each `Annotated` is replaced by its first argument."""
    before, mark, rest = annotation.partition("Annotated[")
    if not mark:
        return annotation
    ends = []
    depth = 0
    for place, character in enumerate(rest):
        depth += (character in "[({") - (character in "])}")
        if depth < 0 or (depth == 0 and character == ","):
            ends.append(place)
        if depth < 0:
            break
    return f"{before}{bare(rest[: ends[0]])}{bare(rest[ends[-1] + 1 :])}"


def typeset(_app: Any, doctree: nodes.document, _name: str) -> None:
    """Replace `->` with an arrow character, except in blocks of code."""
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, nodes.literal_block | nodes.raw | nodes.comment):
            continue
        shown = text.astext().replace(" -> ", "\N{NO-BREAK SPACE}→ ")
        if shown != text.astext():
            text.parent.replace(text, nodes.Text(shown))


def setup(app: Any) -> None:
    """Connect the functions above to Sphinx. Sphinx calls this function at the start."""
    app.connect("autodoc-process-signature", without_fields)
    app.connect("doctree-read", without_validators)
    app.connect("doctree-resolved", typeset)
