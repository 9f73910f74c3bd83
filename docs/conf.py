"""How `make docs` builds the site: Sphinx, with MyST for Markdown. Nothing is fetched from the internet."""

from typing import Any

from pydantic import BaseModel

from perfsuite import __version__

project = "perfsuite"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"perfsuite {__version__}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_extra_path = ["extra"]  # for coding agents: llms.txt, and a skill
exclude_patterns = ["extra"]

myst_heading_anchors = 3
default_role = "code"  # docstrings here write code between single backquotes
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
    """Leave the fields out of the signature of a class of data: they stand below it, each explained."""
    return ("", "") if what == "class" and issubclass(documented, BaseModel) else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", without_fields)
