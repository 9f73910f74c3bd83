"""The base class of all value objects, and their JSON files, which are written completely or not at all."""

import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticSerializationError

from perfsuite.errors import CaseError, FileError
from perfsuite.inputs import files

D = TypeVar("D", bound="Data")

# Validation context of data from a file. The framework of a case in the file might not be installed here.
FROM_FILE = {"from_file": True}


class Data(BaseModel):
    """Frozen, keyword-only data without unknown fields. Raises `CaseError` for bad values."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=True,
        ser_json_inf_nan="strings",
        defer_build=True,  # most processes use only a few of the classes that they import
    )

    if not TYPE_CHECKING:  # type checkers must see the fields in calls, not **values

        def __init__(self, **values: Any) -> None:
            __tracebackhide__ = True  # makes pytest show the line in the user's file
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise CaseError(
                    f"{type(self).__name__}: {explain(error, tuple(type(self).model_fields))}"
                ) from None

        # This makes pydantic build nested objects without `__init__`, so errors keep the path to the field.
        __init__.__pydantic_base_init__ = True

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes`, validated like a new object."""
        __tracebackhide__ = True
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self  # it is immutable


def did_you_mean(name: str, candidates: Iterable[str], question: str = " Did you mean {!r}?") -> str:
    """Return a question with the candidate most similar to `name`; empty if none is similar.

    A candidate that differs only in capital letters, hyphens and underscores is preferred to all others.
    """
    choices = [*candidates]
    same = [candidate for candidate in choices if _letters(candidate) == _letters(name)]
    near = same or get_close_matches(name, choices, n=1)
    return question.format(near[0]) if near else ""


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def explain(error: ValidationError, fields: Sequence[str] = ()) -> str:
    """Describe each problem as `field: allowed values, got the value`.

    For an unknown field, the description suggests the most similar name in `fields`. Several missing fields
    are listed together.
    """
    problems = error.errors(include_url=False)
    missing = [_name(problem["loc"]) for problem in problems if problem["type"] == "missing"]
    if len(missing) > 1:
        problems = [problem for problem in problems if problem["type"] != "missing"]
        return "; ".join([f"required, but missing: {', '.join(missing)}", *_described(problems, fields)])
    return "; ".join(_described(problems, fields))


def _name(location: Iterable[int | str]) -> str:
    return ".".join(str(part) for part in location)


def _described(problems: Iterable[ErrorDetails], fields: Sequence[str]) -> Iterator[str]:
    for problem in problems:
        field = _name(problem["loc"])
        message = problem["msg"].removeprefix("Value error, ").removesuffix(".")
        # Without a field, the message itself says which values do not fit together.
        if problem["type"] == "value_error" and not field:
            yield message
            continue
        if problem["type"] == "extra_forbidden":
            hint = did_you_mean(field, fields, " (did you mean {}?)") or "; remove it or correct its name"
            message = f"unknown field{hint}"
        elif problem["type"] == "model_type":
            message = message.replace("valid dictionary or instance of", "mapping or a")
        shown = repr(problem["input"])
        got = f", got {shown if len(shown) < 80 else shown[:77] + '...'}"
        if problem["type"] == "missing" or _is_shown(problem["input"], message) or message.endswith(got):
            got = ""
        if problem["type"] == "literal_error":
            allowed = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
            got += did_you_mean(str(problem["input"]), allowed, " (did you mean {!r}?)")
        yield f"{field or '(whole)'}: {message}{got}"


def _is_shown(value: object, message: str) -> bool:
    """Return whether a message already shows `value`. For a mapping, one shown key is enough."""
    texts = [value] if isinstance(value, str) else [*value] if isinstance(value, Mapping) else []
    return any(repr(text) in message for text in texts)


class Document(Data):
    """Data with its own file. Each subclass sets `schema_version: Literal[N] = N`."""

    schema_version: int

    def as_json(self) -> str:
        """Return the content of its file: sorted, indented JSON."""
        return json.dumps(plain(self), sort_keys=True, indent=1) + "\n"


class Sealed(Document):
    """A document that only perfsuite writes. Its file contains a digest. A file without a digest is not read.

    Many parts of a result are computed from other parts. Without a digest, a damaged or edited file would be
    trusted although its parts contradict each other. Reviewed files, which people may edit, are plain
    `Document`s.
    """

    def as_json(self) -> str:
        """Return the content of its file: sorted, indented JSON with the digest."""
        return json.dumps(sealed(plain(self)), sort_keys=True, indent=1) + "\n"

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, values: Any, info: ValidationInfo) -> Any:
        is_file = bool(info.context and info.context.get("from_file"))
        if not isinstance(values, dict) or (not is_file and "digest" not in values):
            return values
        return unsealed(values, "Restore it, or measure again")


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a document, including their digest."""
    return {**content, "digest": digest(content)}


def unsealed(values: dict[str, Any], restore: str) -> dict[str, Any]:
    """Check the digest of a document, and return the values of the document without the digest.

    Raises ValueError, whose message ends with `restore`.
    """
    content = {key: value for key, value in values.items() if key != "digest"}
    if values.get("digest") != digest(content):
        raise ValueError(
            f"its digest is {values.get('digest')!r}, but the digest of its content is {digest(content)!r}: "
            f"it was edited or damaged, or an older perfsuite wrote it. {restore}"
        )
    return content


def plain(data: Data) -> Any:
    """Convert data to JSON values.

    NaN and infinities, which JSON lacks, become text that can be read back. Bytes that are not UTF-8 can also
    be read back: Python represents them in paths and variables as lone surrogates, which JSON writes as
    `\\udc80`. In names of fields, which are never read back, such bytes become U+FFFD.
    """
    try:
        return json.loads(data.model_dump_json())
    except PydanticSerializationError:  # lone surrogates, which pydantic cannot encode, but json can
        return _finite(data.model_dump(mode="json"))


def _finite(value: Any) -> Any:
    """Return JSON values in which NaN and infinities are replaced with the text that `Data` uses."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def lines(value: Any, indent: int = 0) -> str:
    """Format sorted, indented JSON in which each innermost list or object is on one line."""
    is_object = isinstance(value, dict)
    inner = value.values() if is_object else value if isinstance(value, list) else ()
    if not any(isinstance(item, dict | list) for item in inner):
        return json.dumps(value, sort_keys=True)
    margin = "\n" + " " * indent
    parts = [
        (f"{json.dumps(key)}: " if is_object else "") + lines(item, indent + 1)
        for key, item in (sorted(value.items()) if is_object else enumerate(value))
    ]
    start, end = "{}" if is_object else "[]"
    return start + ",".join(f"{margin} {part}" for part in parts) + margin + end


def digest(content: Any, length: int = 16) -> str:
    """Return `length` hexadecimal digits that identify JSON values. The order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def write(path: Path, document: Document) -> None:
    """Write a document atomically, so that the file is never partial, even if this process is killed."""
    write_text(path, document.as_json())


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically, following links. Write directly to a device or FIFO. Raises `FileError`."""
    try:
        if _is_in_place(path):
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise FileError(f"cannot write {path}: {error}") from None


def _is_in_place(path: Path) -> bool:
    """Return whether a path is a device, a FIFO, or an open file of this process, such as /dev/stdout."""
    if path.parent in files.OPEN_FILES:
        return True
    try:
        return not (path.is_dir() or stat.S_ISREG(path.stat().st_mode))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _replace(path: Path, text: str) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",
            dir=path.parent,
            prefix=f".{path.name[:100]}.",
            delete=False,
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o644)  # temporary files are private, but this file is meant to be shared
        temporary.replace(path)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def read_or_none(path: Path, kind: type[D]) -> D | None:
    """Call `read`, but return None instead of raising a `FileError`."""
    try:
        return read(path, kind)
    except FileError:
        return None


def read(path: Path, kind: type[D]) -> D:
    """Read a file that `write` wrote. Raises `FileError`, which names the file and any invalid field."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise FileError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    version = kind.model_fields.get("schema_version")
    if version is not None and raw.get("schema_version") != version.default:
        raise FileError(
            f"{path}: field schema_version: this perfsuite reads {version.default}, "
            f"got {raw.get('schema_version')!r}. Record it again or use the perfsuite that wrote it."
        )
    try:
        return kind.model_validate(raw, context=FROM_FILE)
    except ValidationError as error:
        unknown = _unknown_fields(error)
        # If the file has a digest, the digest has been checked, so the unknown field is not a typing mistake.
        if unknown and "digest" in raw and "digest" not in unknown:
            raise FileError(
                f"{path}: this perfsuite does not know the field {', '.join(unknown)}, so another version "
                "wrote the file. Use that version, or delete the file and measure again."
            ) from None
        raise FileError(f"{path}: field {explain(error)}") from None
    except CaseError as error:
        raise FileError(f"{path}: {error}") from None
    except (ArithmeticError, RecursionError) as error:  # numbers too large to add, or endless nesting
        raise FileError(f"{path}: cannot be used ({error}). Delete it or restore it.") from None


def _unknown_fields(error: ValidationError) -> list[str]:
    """Return the names of the fields that a document must not have. Each name appears once."""
    names = (str(problem["loc"][-1]) for problem in error.errors() if problem["type"] == "extra_forbidden")
    return list(dict.fromkeys(names))


def read_json(path: Path) -> Any:
    """Read the JSON values of a file. Raises `FileError` if the file cannot be read or is not JSON."""
    try:
        return parse(files.read_text(path, files.LARGEST_DOCUMENT))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also for bytes that are not UTF-8
        raise FileError(f"{path}: not JSON ({error}). Was it cut short? Delete it or restore it.") from error


def parse(text: str) -> Any:
    """Parse the JSON values of a text strictly. Raises ValueError or RecursionError.

    Python silently accepts more than JSON allows. If a name occurs twice in an object, Python uses the last
    value. It also reads NaN as a number, although comparisons with NaN silently give False.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} appears twice")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")
