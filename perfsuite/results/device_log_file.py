"""Write the log of a simulated GPU to a compressed file, and read it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfsuite.errors import FileError
from perfsuite.results.device_log import KINDS, Entry

VERSION = 1
LEVEL = 1  # compression level: at a higher level, compressing takes longer than all other work on the log


def write(path: Path, entries: Sequence[Entry]) -> None:
    """Write the entries as rows that begin with the name of their kind. Raises `FileError`."""
    rows = [[type(entry).__name__, *entry] for entry in entries]
    content = json.dumps({"version": VERSION, "entries": rows}, separators=(",", ":"))
    try:
        path.write_bytes(gzip.compress(content.encode(), LEVEL, mtime=0))
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path) -> tuple[Entry, ...]:
    """Return the entries of a file. Raises `FileError`, which says what to do."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        raise FileError(f"{path} does not exist. Repeat the dry run of the case") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FileError(f"{path}: cut short or damaged ({error}). Repeat the dry run of the case") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise FileError(
            f"{path}: version {version!r}, but this perfsuite reads {VERSION}. Repeat the dry run of the case"
        )
    try:
        return tuple(map(_entry, content["entries"]))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise FileError(
            f"{path}: not the log of a dry run ({error!r}). Repeat the dry run of the case"
        ) from None


def _entry(row: Any) -> Entry:
    name, *fields = row
    if name == "Kernel":  # JSON has no tuples
        fields[-2] = tuple(fields[-2])
    return KINDS[name](*fields)
