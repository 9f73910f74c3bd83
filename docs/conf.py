"""How `make docs` builds the site: Sphinx, with MyST for Markdown. Nothing is fetched from the internet."""

from perfsuite import __version__

project = "perfsuite"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"perfsuite {__version__}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 3
default_role = "code"  # docstrings here write code between single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]
