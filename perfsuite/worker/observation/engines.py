"""Find the engines of libraries. An engine steps torch's optimizers.

If there is an engine, a training step is a step of the engine, and not a step of the optimizer.

Frameworks name the classes of engines (`perfsuite.frameworks.base.Engine`). Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import Engine
from perfsuite.worker.hooks import libraries
from perfsuite.worker.hooks.imports import AfterImport

_living: weakref.WeakSet[Any] = weakref.WeakSet()  # engines that were created or stepped since `watch`
_created: list[Engine] = []  # kinds of engines created since `watch`. The engines can be gone or incomplete
_imports: AfterImport | None = None
notes: list[str] = []  # reasons why some engines are not noticed


def watch() -> None:
    """Notice each engine that is created from now on.

    Call this as soon as torch has been imported. The class of an engine is watched after the module of the
    class has been executed. If that module has itself imported torch, it is still being executed when `watch`
    is called, so call `look_again` later. If an engine was created before its class was watched, the engine
    is noticed at its first step.
    """
    global _imports
    notes.clear()
    _created.clear()
    if _imports is not None:
        _imports.end()

    def failed(error: Exception) -> None:
        notes.append(f"some engines of libraries are unknown ({type(error).__name__}: {error})")

    def begins(name: str) -> None:
        library = libraries.of(name)
        if library is not None and library.engine is not None:
            module, _, _ = library.engine.path.partition(":")
            imports.add({module: functools.partial(notice, library.engine)})

    imports = _imports = AfterImport({}, failed, before=dict.fromkeys(libraries.names(), begins))
    imports.begin()


def look_again() -> None:
    """Watch classes whose modules were still being imported when `watch` was called."""
    if _imports is not None:
        _imports.look()


def notice(engine: Engine, module: ModuleType) -> None:
    """Notice each new engine of this kind. The class of the engines is in `module`."""
    kind: Any = getattr(module, engine.path.partition(":")[2])
    create = kind.__init__
    if hasattr(create, "is_watched"):
        return

    @functools.wraps(create)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        _created.append(engine)  # record this first, because the constructor fails in some dry runs
        create(self, *args, **kwargs)
        _keep(self)

    watched.is_watched = True  # type: ignore[attr-defined]
    kind.__init__ = watched


def _keep(engine: Any) -> None:
    with contextlib.suppress(TypeError):  # the engine has no hash, or does not support weak references
        _living.add(engine)


def of(optimizer: Any) -> Any:
    """Return the living engine that steps `optimizer`, or None if there is none."""
    engine, _ = _engine_of(optimizer)
    return engine


def gradient_norm(optimizer: Any) -> float | None:
    """Return the gradient norm that the engine of `optimizer` knows, or None without an engine or a norm."""
    engine, kind = _engine_of(optimizer)
    return None if kind is None else kind.gradient_norm(engine)


def loss_scale() -> float | None:
    """Return the factor by which engines multiply losses before backward. This is 1 without an engine.

    None if engines have different factors, because a loss does not name its engine.
    """
    if not _living:
        return 1.0
    scales = {kind.loss_scale(engine) for kind, engines in among(_living) for engine in engines} - {None}
    return next(iter(scales), 1.0) if len(scales) < 2 else None


def among(objects: Iterable[Any]) -> list[tuple[Engine, list[Any]]]:
    """Return the engines among these objects, by kind."""
    everything = list(objects)
    kinds = [(kind, _class(kind)) for kind in _kinds()]
    return [
        (kind, [instance for instance in everything if isinstance(instance, of_kind)])
        for kind, of_kind in kinds
        if of_kind is not None
    ]


def not_dry() -> str | None:
    """Return why an engine of this process cannot be used in a dry run, or None if all engines can be."""
    return next((kind.not_dry for kind in _created if kind.not_dry is not None), None)


def steps(optimizer: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> bool:
    """Return whether a step of `optimizer` is part of an engine's step.

    If this is true, each later step of the engine calls `before` and `after` with `optimizer`. Raises
    `MismatchError` if the library steps the optimizer outside of an engine's step.
    """
    return any(_is_part(kind, optimizer, before, after) for kind in _kinds())


def _engine_of(optimizer: Any) -> tuple[Any, Engine | None]:
    for kind, engines in among(_living):
        for engine in engines:
            if any(stepped is optimizer for stepped in kind.optimizers(engine)):
                return engine, kind
    return None, None


def _is_part(
    kind: Engine, optimizer: Any, before: Callable[[Any], None], after: Callable[[Any], None]
) -> bool:
    module, _, name = kind.path.partition(":")
    library = module.partition(".")[0]
    callers = _callers(library)
    if not callers:
        return False
    # Check the class, because other objects of the library, for example wrappers of optimizers, can have a
    # method of the same name.
    of_kind = _class(kind) or ()
    steppers = (self_ for function, self_ in callers if function == kind.step)
    engine = next((self_ for self_ in steppers if isinstance(self_, of_kind)), None)
    if engine is None and not any(function == "__init__" for function, _ in callers):
        raise MismatchError(
            f"{_with_version(library)} takes a step of {type(optimizer).__name__} outside of "
            f"{name}.{kind.step}, in {callers[0][0]}, so the end of a training step is unknown. Train with "
            f"the methods of a {name}, with another version of {library}, or without that library"
        )
    if engine is not None and kind.step not in vars(engine):
        _created.append(kind)  # needed if the engine was created before `watch`
        _keep(engine)
        step = getattr(engine, kind.step)

        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before(optimizer)
            result = step(*args, **kwargs)
            after(optimizer)
            return result

        setattr(engine, kind.step, timed)
    return True


def _callers(library: str) -> list[tuple[str, Any]]:
    """Return the running functions of a library, innermost first, each with its `self`."""
    return [
        (frame.f_code.co_name, frame.f_locals.get("self"))
        for frame, _ in traceback.walk_stack(sys._getframe())
        if _is_of(library, frame.f_globals.get("__name__"))
    ]


def _is_of(library: str, module: object) -> bool:
    """Return whether a module is the library itself (which can be a single file) or a part of it."""
    return isinstance(module, str) and (module == library or module.startswith(f"{library}."))


def _with_version(library: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{library} {importlib.metadata.version(library)}"
    return library


def _kinds() -> list[Engine]:
    return [library.engine for library in libraries.imported() if library.engine is not None]


def _class(engine: Engine) -> type | None:
    """Return the class of an engine, or None if its module is not imported."""
    module, _, name = engine.path.partition(":")
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) else None
