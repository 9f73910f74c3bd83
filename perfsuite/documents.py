"""The base of every value object, and JSON files of them, written whole or not at all."""

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from perfsuite.errors import CaseError, FileError

D = TypeVar("D", bound="Data")

FROM_FILE = {"from_file": True}
"""The validation context of data from a file: it may name a framework that is not installed here."""


class Data(BaseModel):
    """Frozen, keyword-only data without unknown fields. Raises `CaseError` on bad values."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=True,
        ser_json_inf_nan="strings",
        defer_build=True,  # most processes use few of the kinds that they import
    )

    if not TYPE_CHECKING:  # a type checker shall see the fields in calls, not **values

        def __init__(self, **values: Any) -> None:
            __tracebackhide__ = True  # pytest shows the line of the user's file
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise CaseError(
                    f"{type(self).__name__}: {explain(error, tuple(type(self).model_fields))}"
                ) from None

        # So pydantic makes nested objects without it, and their errors keep the path to the field.
        __init__.__pydantic_base_init__ = True

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes`, validated as a new object is."""
        __tracebackhide__ = True
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self  # nothing in it can change


def explain(error: ValidationError, known: Sequence[str] = ()) -> str:
    """Each problem as `field: what is allowed, got the value`, or the `known` one that was meant."""
    problems = []
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ").removesuffix(".")
        if problem["type"] == "extra_forbidden":
            near = get_close_matches(field, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else "; remove it or correct its name"
            message = f"unknown field{hint}"
        if problem["type"] == "value_error" and not field:  # it says itself what does not fit together
            problems.append(message)
            continue
        shown = _shown(problem["input"])
        got = f", got {shown if len(shown) < 80 else shown[:77] + '...'}"
        is_told = isinstance(problem["input"], str) and shown in message
        if problem["type"] == "missing" or is_told or message.endswith(got):
            got = ""
        problems.append(f"{field or '(whole)'}: {message}{got}")
    return "; ".join(problems)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number too long to be shown"


class Document(Data):
    """Data that stands in a file of its own. Each kind sets `schema_version: Literal[N] = N`."""

    schema_version: int

    def as_json(self) -> str:
        """What its file holds: sorted, indented JSON."""
        return json.dumps(plain(self), sort_keys=True, indent=1) + "\n"


def plain(data: Data) -> Any:
    """As JSON values. NaN and infinities, which JSON does not know, become text that reads back."""
    return json.loads(data.model_dump_json())


def lines(value: Any, indent: int = 0) -> str:
    """JSON values as sorted, indented JSON in which what holds no other list or object takes one line."""
    is_object = isinstance(value, dict)
    inner = value.values() if is_object else value if isinstance(value, list) else ()
    if not any(isinstance(each, dict | list) for each in inner):
        return json.dumps(value, sort_keys=True)
    margin = "\n" + " " * indent
    parts = [
        (f"{json.dumps(key)}: " if is_object else "") + lines(each, indent + 1)
        for key, each in (sorted(value.items()) if is_object else enumerate(value))
    ]
    start, end = "{}" if is_object else "[]"
    return start + ",".join(f"{margin} {part}" for part in parts) + margin + end


def digest(content: Any, length: int = 16) -> str:
    """Return `length` hexadecimal digits that tell JSON values apart, whatever the order of keys."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def write(path: Path, document: Document) -> None:
    """Write the text of a document: never half a file, whoever kills this process when."""
    write_text(path, document.as_json())


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole; links are followed. A device or a FIFO is written to. Raises `FileError`."""
    try:
        if _is_in_place(path):
            _write_in_place(path, text)
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "Make room on that disk." if is_full else "Give a directory that you may write to."
        if error.errno == errno.ENXIO:
            advice = "Start what reads from it first, or give another path."
        raise FileError(f"cannot write {path}: {error.strerror}. {advice}") from error


def _is_in_place(path: Path) -> bool:
    """Whether a path is a device, a FIFO or a socket, or an open file of a process as /dev/stdout is."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    next_link = os.readlink(path) if path.is_symlink() else ""
    is_open_file = any(place.startswith("/proc/") for place in (os.path.realpath(path.parent), next_link))
    return is_open_file or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _write_in_place(path: Path, text: str) -> None:
    """Append to what is there. A FIFO that nothing reads from is an error: to wait could take for ever."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(descriptor, True)  # a slow reader is waited for
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _replace(path: Path, text: str) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name[:100]}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o644)  # temporary files are private; these are meant to be shared
        temporary.replace(path)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """Return the text of a file, or what is written to a FIFO. Raises `OSError`, for a FIFO that nothing
    writes to as well: to wait could take for ever; and `UnicodeDecodeError`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        first = b""
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            with contextlib.suppress(BlockingIOError):  # its writer has yet to write
                if not (first := os.read(descriptor, 1)):
                    raise OSError(errno.ENXIO, "it is a FIFO that nothing writes to")
        os.set_blocking(descriptor, True)
        with open(descriptor, "rb", closefd=False) as file:
            return (first + file.read()).decode()
    finally:
        os.close(descriptor)


def read(path: Path, kind: type[D]) -> D:
    """Read a file that `write` wrote. Raises `FileError` naming the file, and the field if one is bad."""
    try:
        raw = json.loads(read_text(path))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # the latter: nested without end
        raise FileError(f"{path}: not JSON ({error}). Was it cut short? Delete it or restore it.") from error
    if not isinstance(raw, dict):
        raise FileError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    version = kind.model_fields.get("schema_version")
    if version is not None and raw.get("schema_version") != version.default:
        raise FileError(
            f"{path}: field schema_version: this perfsuite reads {version.default}, "
            f"got {raw.get('schema_version')!r}. Record it anew or use the perfsuite that wrote it."
        )
    try:
        return kind.model_validate(raw, context=FROM_FILE)
    except ValidationError as error:
        raise FileError(f"{path}: field {explain(error)}") from None
    except CaseError as error:
        raise FileError(f"{path}: {error}") from None


def read_or_none(path: Path, kind: type[D]) -> D | None:
    """Return what `read` does; None of a file that is not there, or that nobody could use."""
    with contextlib.suppress(FileError):
        return read(path, kind)
    return None
