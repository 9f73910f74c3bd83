"""Settings for `make docs`, which builds the site with Sphinx and MyST, without internet access."""

import sys
from dataclasses import fields, is_dataclass
from inspect import get_annotations, isfunction
from types import SimpleNamespace
from typing import Any, Protocol, get_type_hints

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
html_favicon = "static/favicon.svg"
html_css_files = ["site.css"]
html_extra_path = ["extra"]  # files for coding agents: llms.txt and a skill
exclude_patterns = ["extra"]

myst_heading_anchors = 3
default_role = "code"  # the docstrings write code in single backquotes
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "undoc-members": True,
    "exclude-members": "model_config",
}
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]


def without_fields(_app: Any, what: str, _name: str, documented: Any, *_: Any) -> tuple[str, str] | None:
    """Remove the fields from the signature of a data class, because they are explained below it.

    A protocol has no signature of its own either: nobody creates an object of it.
    """
    if what != "class":
        return None
    types = types_of_fields(documented)
    show_types(documented, types)
    is_explained = types or issubclass(documented, BaseModel) or Protocol in documented.__bases__
    return ("", "") if is_explained else None


def types_of_fields(documented: type) -> dict[str, Any]:
    """Return the type of each field of a data class. Other classes have no fields."""
    if issubclass(documented, BaseModel):
        documented.model_rebuild()
        return {name: field.annotation for name, field in documented.model_fields.items()}
    if not is_dataclass(documented):
        return {}
    types = get_type_hints(documented, include_extras=True)
    return {field.name: types[field.name] for field in fields(documented)}


def show_types(documented: type, types: dict[str, Any]) -> None:
    """Change a data class in this process, so that autodoc shows each of its fields with a readable type."""
    own = get_annotations(documented)  # without those of base classes
    for name in types.keys() & own.keys():
        own[name] = without_checks(types[name])
        if isfunction(vars(documented).get(name)):  # autodoc would show this default as a method
            delattr(documented, name)
    documented.__annotations__ = own


def without_checks(annotation: Any) -> Any:
    """Replace each `Annotated` in a type by its first argument, because the text explains the checks."""
    return get_type_hints(SimpleNamespace(__annotations__={"field": annotation}))["field"]


def without_this_machine(_app: Any, doctree: nodes.document) -> None:
    """Show the code of a default, not the path that it has on this machine."""
    for node in doctree.findall(addnodes.desc_annotation):
        if repr(sys.executable) in node.astext():
            node.clear()
            node += nodes.Text(" = sys.executable")


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
    app.connect("doctree-read", without_this_machine)
    app.connect("doctree-resolved", typeset)
