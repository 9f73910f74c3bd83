"""Recognise when a training run saves or loads a checkpoint, or evaluates its model. Imports torch.

The functions of a library are wrapped as soon as the library is imported. `RECOGNISED` lists the functions of
torch, of libraries that other libraries use, and of libraries that have several names. A framework
lists the functions of its own library (`Library.events`).

A name that begins with an underscore is private to its library (seen in transformers 5.23, lightning 2.6). If
a version of the library does not have the name, a note says so. The event is then not recognised. If the
private function calls other recognised functions, these are still timed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from types import ModuleType
from typing import Any, NamedTuple

import torch

from perfsuite.errors import error_text
from perfsuite.frameworks.base import Library
from perfsuite.frameworks.common import private
from perfsuite.results.counts import Event
from perfsuite.worker.clock import loaders
from perfsuite.worker.clock.startup_clock import PERFSUITE, Part
from perfsuite.worker.hooks import libraries
from perfsuite.worker.hooks.imports import AfterImport
from perfsuite.worker.hooks.named import replace_everywhere, wrap_method
from perfsuite.worker.observation.replicas import collectives_begun
from perfsuite.worker.spans import phases
from perfsuite.worker.spans.phases import watched as span_of
from perfsuite.worker.spans.recording import Meters, Spans

SAVE: Event = "save checkpoint"
LOAD: Event = "load checkpoint"
EVALUATE: Event = "evaluate"


class File(NamedTuple):
    """An argument of a function: a path or an open file."""

    position: int
    name: str

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument's value in a call, or None if it is missing (the function will report that)."""
        return args[self.position] if len(args) > self.position else kwargs.get(self.name)


class Recognised(NamedTuple):
    """A function whose calls are events."""

    module: str
    path: str  # `function` or `Class.method`
    event: Event
    file: File | None = None  # for functions that write or read one file: this file


_LIGHTNING = (("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning"))
RECOGNISED = (
    Recognised("torch.serialization", "save", SAVE, File(1, "f")),
    Recognised("torch.serialization", "load", LOAD, File(0, "f")),
    Recognised("torch.distributed.checkpoint.state_dict_saver", "save", SAVE),
    Recognised("torch.distributed.checkpoint.state_dict_saver", "save_state_dict", SAVE),
    Recognised("torch.distributed.checkpoint.state_dict_saver", "async_save", SAVE),
    Recognised("torch.distributed.checkpoint.state_dict_loader", "load", LOAD),
    Recognised("torch.distributed.checkpoint.state_dict_loader", "load_state_dict", LOAD),
    Recognised("safetensors.torch", "save_file", SAVE, File(1, "filename")),
    Recognised("safetensors.torch", "load_file", LOAD, File(0, "filename")),
    Recognised("safetensors.numpy", "save_file", SAVE, File(1, "filename")),
    Recognised("safetensors.numpy", "load_file", LOAD, File(0, "filename")),
    Recognised("transformers.trainer", "Trainer._save_checkpoint", SAVE),
    Recognised("transformers.trainer", "Trainer.save_model", SAVE),
    Recognised("transformers.trainer", "Trainer.evaluate", EVALUATE),
    Recognised("accelerate.accelerator", "Accelerator.save_state", SAVE),
    Recognised("accelerate.accelerator", "Accelerator.save_model", SAVE),
    Recognised("accelerate.accelerator", "Accelerator.load_state", LOAD),
    *(
        recognised
        for fabric, pytorch in _LIGHTNING
        for recognised in (
            Recognised(f"{fabric}.fabric", "Fabric.save", SAVE),
            Recognised(f"{fabric}.fabric", "Fabric.load", LOAD),
            Recognised(f"{fabric}.utilities.cloud_io", "_atomic_save", SAVE, File(1, "filepath")),
            Recognised(f"{pytorch}.trainer.trainer", "Trainer.save_checkpoint", SAVE),
            Recognised(f"{pytorch}.loops.evaluation_loop", "_EvaluationLoop.run", EVALUATE),
        )
    ),
)
ASYNC = "async_save"

_imports: AfterImport | None = None
_writing: set[int] = set()  # ids of the threads whose written bytes `_wrap_shards` counts


def watch() -> None:
    """Record the events and phases of this process from now on."""
    global _imports
    if _imports is not None:
        _imports.end()
    phases.is_compiling = torch.compiler.is_compiling
    spans = phases.spans = Spans(Meters(collectives=collectives_begun, peak=_allocator_peak))
    by_module = defaultdict[str, list[Callable[[ModuleType], object]]](list)

    def recognise(functions: Iterable[Recognised]) -> None:
        for recognised in functions:
            by_module[recognised.module].append(functools.partial(_wrap, recognised))

    def begins(name: str) -> None:
        with Part(PERFSUITE):
            library = libraries.of(name)
        if library is not None:
            functions = [*of_library(library)]
            recognise(functions)
            imports.add(dict.fromkeys((function.module for function in functions), act))

    recognise(RECOGNISED)
    by_module[private.NAMES["write_data"].module].append(_wrap_shards)

    def failed(error: Exception) -> None:
        spans.note(f"not all events are recognised ({error_text(error)})")

    def act(module: ModuleType) -> None:
        for wrap in by_module[module.__name__]:
            try:
                wrap(module)
            except Exception as error:
                failed(error)

    before = dict.fromkeys(libraries.names(), begins)
    imports = _imports = AfterImport(dict.fromkeys(by_module, act), failed, before=before)
    imports.begin()


def of_library(library: Library) -> Iterator[Recognised]:
    """Yield those functions of a framework's library whose calls are events (`Library.events`)."""
    for function, event in library.events.items():
        module, _, path = function.partition(":")
        yield Recognised(module, path, event)


def look_again() -> None:
    """Recognise functions of libraries that were still being imported when `watch` was called."""
    if _imports is not None:
        _imports.look()


def _allocator_peak() -> int | None:
    # Do not read the peak before the training has initialised CUDA. Reading would initialise CUDA, which
    # would then fail in forked processes.
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.memory_stats().get("allocated_bytes.all.peak")


def _wrap(recognised: Recognised, module: ModuleType) -> None:
    *parents, name = recognised.path.split(".")
    owner: Any = module
    for parent in parents:
        owner = getattr(owner, parent, None)
    function = getattr(owner, name, None)
    if function is None:
        if phases.spans is not None:
            absent = f"{recognised.module}.{recognised.path} does not exist in this version"
            phases.spans.note(f"not all events are recognised: {absent} ({recognised.event})")
        return
    if hasattr(function, "is_event"):  # already wrapped
        return

    def wrap(function: Callable[..., Any]) -> Any:
        if recognised.file is not None:
            wrapped = _of_a_file(function, recognised.event, recognised.file)
        elif name == ASYNC:
            wrapped = _in_the_background(function, recognised.event)
        else:
            wrapped = span_of(function, recognised.event, is_event=True)
        wrapped.is_event = True
        return wrapped

    if parents:
        wrap_method(owner, name, wrap)
    else:
        replace_everywhere(owner, name, function, wrap(function))


def _of_a_file(function: Callable[..., Any], event: str, file: File) -> Any:
    """Wrap a function that saves or loads one file. Its calls become events, and saved bytes are counted.

    A call with an in-memory file is not an event, because such files are used to send objects to other ranks.
    A call in which a data loader reads a file is not an event either.
    """
    as_span = span_of(_counted(function, file) if event == SAVE else function, event, is_event=True)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        is_in_memory = isinstance(file.of(args, kwargs), io.BytesIO)
        of_a_loader = event == LOAD and loaders.is_loading(get_ident())
        return (function if is_in_memory or of_a_loader else as_span)(*args, **kwargs)

    return watched


def _counted(function: Callable[..., Any], file: File) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        target = file.of(args, kwargs)
        before = _place(target)
        result = function(*args, **kwargs)
        if get_ident() not in _writing:
            _wrote(target, before)
        return result

    return watched


def _place(target: Any) -> int | None:
    """Return the position of an open file. None for a path, or if the file does not report its position."""
    with contextlib.suppress(Exception):
        return None if isinstance(target, str | os.PathLike) else int(target.tell())
    return None


def _wrote(target: Any, before: int | None) -> None:
    after = _place(target)
    with contextlib.suppress(Exception):  # for example, the path is on a remote file system
        if isinstance(target, str | os.PathLike):
            _add(os.path.getsize(target))
        elif before is not None and after is not None:
            _add(after - before)


def _add(number: int, *, in_background: bool = False) -> None:
    if phases.spans is not None:
        phases.spans.wrote(number, in_background=in_background)


def _in_the_background(function: Callable[..., Any], event: str) -> Any:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        left = None if phases.spans is None else phases.spans.leave()
        response = function(*args, **kwargs)
        # Since torch 2.9, the function returns two futures if some stagers are used. The future of the upload
        # ends last.
        upload = getattr(response, "upload_completion", response)
        if left is not None:
            left.future = upload
        for future in (upload, getattr(response, "staging_completion", None)):
            _watch_waits(future, event)
        return response

    return span_of(watched, event, is_event=True)


def _watch_waits(future: Any, event: str) -> None:
    """Add the seconds for which the training waits for `future` to the seconds of `event`.

    Without this, a script that starts a save in the background and waits for it at once would seem to save
    fast.
    """
    for name in ("result", "exception"):
        with contextlib.suppress(Exception):  # there is no future, or its attributes cannot be set
            wait = getattr(future, name)
            setattr(
                future, name, _if_unfinished(future, wait, span_of(wait, event, is_event=True, is_wait=True))
            )


def _if_unfinished(future: Any, wait: Callable[..., Any], as_span: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `wait`, or `as_span` if the future has not ended yet."""

    @functools.wraps(wait)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return (wait if future.done() else as_span)(*args, **kwargs)

    return watched


def _wrap_shards(module: ModuleType) -> None:
    """Count the bytes of a sharded checkpoint that this rank writes.

    torch's private function `write_data` returns a future with a result for each item that it has written.
    Raises `PrivateNameError` if torch does not have this function.
    """
    write = private.write_data
    if hasattr(write, "is_event"):
        return

    @functools.wraps(write)
    def watched(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        _writing.add(thread)
        try:
            future = write(*args, **kwargs)
        finally:
            _writing.discard(thread)
        with contextlib.suppress(Exception):
            _add(sum(result.size_in_bytes for result in future.wait()), in_background=True)
        return future

    watched.is_event = True  # type: ignore[attr-defined]
    setattr(*private.place("write_data"), watched)
