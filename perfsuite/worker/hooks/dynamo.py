"""Keep perfsuite's hooks out of the user's compiled code. Imports neither torch nor dynamo.

Without this, dynamo would also compile the hooks that run in a compiled function. The function would have
more graphs and recompilations than without perfsuite, and with `fullgraph=True` it would end with an error.
"""

from __future__ import annotations

from perfsuite.frameworks.common import private
from perfsuite.worker.hooks.imports import AfterImport

OURS = "perfsuite.worker"  # the package of all hooks
MOST_COMPILATIONS = 10_000
"""Number of compilations that dynamo remembers. By default, it remembers only the last 64. All others would
be missing from the counts."""
_imports: AfterImport | None = None


def watch() -> None:
    """As soon as dynamo is imported, tell it not to compile hooks, and to remember all compilations."""
    global _imports
    if _imports is not None:
        _imports.end()
    package = private.NAMES["skip_package"].module.rpartition(".")[0]
    _imports = AfterImport({package: _skip}, lambda error: None)
    _imports.begin()


def _skip(module: object) -> None:
    skip = private.or_none("skip_package")
    if skip is not None:
        skip(OURS)
    set_limit = private.or_none("set_compilations_limit")
    if set_limit is not None:
        set_limit(MOST_COMPILATIONS)
