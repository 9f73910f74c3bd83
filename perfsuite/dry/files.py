"""Keep the files that existed before a dry run. Imports no torch."""

import builtins
import contextlib
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from perfsuite.results.run_dir import COMPILE_CACHES

NAMED = 3
"""Number of kept files that the note names."""
KEPT = "kept, although the script would have overwritten, renamed or removed this"
CACHES = (*COMPILE_CACHES, "HF_HOME", "XDG_CACHE_HOME")
"""Environment variables that name directories of caches. Files in these directories may change."""


class Kept:
    """Replaces Python's functions that change files, so that older files keep their content.

    Older files are those that existed before the dry run. If the script opens such a file to overwrite it,
    the script gets a file in `scratch` instead. If the script renames or removes such a file, nothing
    happens. The script can append to any file, write to empty files, and change the files that it has
    created.
    """

    def __init__(self, scratch: Path, *, free: tuple[Path, ...] = ()) -> None:
        caches = [Path(os.environ[name]) for name in CACHES if os.environ.get(name)]
        of_inductor = [*Path(tempfile.gettempdir()).glob("torchinductor_*")]
        roots = [*free, *caches, *of_inductor, Path("~/.cache").expanduser(), scratch]
        self._free = {os.path.realpath(root) for root in roots}  # files in these directories may change
        self._scratch = scratch
        self._made: set[str] = set()  # files and directories that the script has created
        self._binary: set[str] = set()  # files that the script has created to write bytes
        self._instead: dict[str, str] = {}  # files in `scratch`, by the file that each replaces
        self.paths: dict[str, None] = {}  # what was kept, in order

    def notes(self) -> list[str]:
        """Return a note that names what was kept, if anything was."""
        if not self.paths:
            return []
        paths = [*self.paths]
        more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
        return [f"{KEPT}: {', '.join(paths[:NAMED])}{more}"]

    def remove_empty(self) -> None:
        """Remove the empty files that the script opened for checkpoints, which were then not saved."""
        for path in self._binary:
            with contextlib.suppress(OSError):
                if os.path.isfile(path) and os.path.getsize(path) == 0:
                    os.remove(path)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace the functions until the context ends."""
        around: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (builtins, "open", self._open),
            (io, "open", self._open),
            (os, "open", self._os_open),
            (os, "mkdir", self._creates),
            (os, "symlink", self._links),
            (os, "link", self._links),
            (os, "rename", self._renames),
            (os, "replace", self._renames),
            (os, "truncate", self._removes),
            (os, "remove", self._removes),
            (os, "unlink", self._removes),
            (os, "rmdir", self._removes),
            (shutil, "rmtree", self._removes),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in around]
        try:
            for owner, name, wrapper in around:
                setattr(owner, name, wrapper(getattr(owner, name)))
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _open(self, real: Any) -> Any:
        def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int) or not isinstance(mode, str):
                return real(file, mode, *args, **kwargs)
            if not ({*mode} & {*"wax"} or self._instead):
                return real(file, mode, *args, **kwargs)  # the most frequent case
            path = os.path.realpath(os.fsdecode(file))
            if {*mode} & {*"wx"} and "b" in mode and not os.path.lexists(path):
                self._binary.add(path)
            there = self._instead_of(path, creates=bool({*mode} & {*"wax"}), overwrites="w" in mode)
            return real(there or file, mode, *args, **kwargs)

        return opened

    def _os_open(self, real: Any) -> Any:
        def opened(file: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            if not (flags & (os.O_CREAT | os.O_TRUNC) or self._instead):
                return real(file, flags, *args, **kwargs)
            path = _resolved(file, kwargs.get("dir_fd"), follow=True)
            there = self._instead_of(
                path, creates=bool(flags & os.O_CREAT), overwrites=bool(flags & os.O_TRUNC)
            )
            if there is None:
                return real(file, flags, *args, **kwargs)
            return real(there, flags | os.O_CREAT, *args)

        return opened

    def _instead_of(self, path: str, *, creates: bool, overwrites: bool) -> str | None:
        """Return the file to open instead of `path`, or None to open `path` itself."""
        if path not in self._instead:
            if not os.path.lexists(path):
                if creates:
                    self._made.add(path)
                return None
            # An empty file, such as a lock, has nothing to lose.
            if not (overwrites and os.path.isfile(path) and os.path.getsize(path) and self._keeps(path)):
                return None
            name = f"{len(self._instead)}-{os.path.basename(path)}"
            self._instead[path] = os.path.join(self._scratch, name)
            self._binary.discard(path)
        return self._instead[path]

    def _creates(self, real: Any) -> Any:
        def created(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            where = _resolved(path, dir_fd)
            if where in self.paths and os.path.isdir(where):
                return  # the script believes that it has removed this directory
            real(path, *args, dir_fd=dir_fd, **kwargs)
            self._made.add(where)

        return created

    def _links(self, real: Any) -> Any:
        def linked(source: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            where = _resolved(path, kwargs.get("dir_fd", kwargs.get("dst_dir_fd")))
            if where in self.paths and os.path.lexists(where):
                return
            real(source, path, *args, **kwargs)
            self._made.add(where)

        return linked

    def _renames(self, real: Any) -> Any:
        def renamed(
            src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
        ) -> None:
            before = _resolved(src, src_dir_fd)
            after = _resolved(dst, dst_dir_fd)
            if self._keeps(before):
                return
            is_new = not os.path.lexists(after)
            # A directory can only be replaced if it is empty, or if the script believes that it is gone.
            replaces = not is_new and (after in self.paths or os.path.islink(after) or os.path.isfile(after))
            if replaces and self._keeps(after):
                if os.path.isdir(before) and not os.path.islink(before):
                    shutil.rmtree(before)
                else:
                    os.remove(before)
                return
            real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if is_new:
                self._made.add(after)
            if before in self._binary:
                self._binary.add(after)

        return renamed

    def _removes(self, real: Any) -> Any:
        def removed(path: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(path, int) or not self._keeps(_resolved(path, kwargs.get("dir_fd"))):
                real(path, *args, **kwargs)

        return removed

    def _keeps(self, path: str) -> bool:
        """Return whether this path existed before and is kept. If so, remember it for the note."""
        try:
            kind = os.lstat(path).st_mode
        except OSError:
            return False
        is_file = stat.S_ISREG(kind) or stat.S_ISLNK(kind) or stat.S_ISDIR(kind)  # no device and no socket
        around = {path, *map(str, Path(path).parents)}
        if not is_file or around & self._made or around & self._free or "__pycache__" in path:
            return False
        self.paths[path] = None
        return True


def _resolved(path: Any, dir_fd: int | None = None, *, follow: bool = False) -> str:
    """Return the absolute path without links in its directories.

    With `follow`, the file itself is also resolved if it is a link.
    """
    text = os.fsdecode(path)
    if dir_fd is not None:
        text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
    if follow:
        return os.path.realpath(text)
    directory, name = os.path.split(text.rstrip("/") or "/")
    return os.path.join(os.path.realpath(directory or "."), name)
