import json
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perfsuite import documents
from perfsuite.documents import Data, Document, Sealed, plain
from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.script import Script
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.session_file import SessionFile
from tests.samples import deterministic, make_case, make_result, make_run, make_session_file


class Part(Data):
    size_bytes: int
    label: str = "part"


class Note(Document):
    schema_version: Literal[1] = 1
    text: str = ""
    step_s: tuple[float, ...] = ()
    part: Part = Part(size_bytes=1)


class SealedNote(Sealed):
    schema_version: Literal[1] = 1
    parts: tuple[Part, ...] = ()


def write_raw(path: Path, **changes: Any) -> Path:
    raw = {"schema_version": 1, **changes}
    path.write_text(json.dumps({name: value for name, value in raw.items() if value != "missing"}))
    return path


def test_reads_back_what_it_wrote(tmp_path: Path) -> None:
    values = (0.1, 1e-300, 123456789.125, math.inf, -math.inf, math.nan)
    note = Note(text="Grüße ☃", step_s=values, part=Part(size_bytes=2**40))
    documents.write(tmp_path / "note.json", note)
    assert repr(documents.read(tmp_path / "note.json", Note)) == repr(note)


@deterministic
@given(st.lists(st.floats()), st.text())
def test_plain_is_strict_json_that_reads_back(values: list[float], text: str) -> None:
    text = text.encode(errors="replace").decode()
    note = Note(text=text, step_s=tuple(values))
    back = Note.model_validate(json.loads(json.dumps(plain(note), allow_nan=False)))
    assert back.text == text
    assert [repr(value) for value in back.step_s] == [repr(value) for value in note.step_s]


any_text = st.text(st.characters() | st.sampled_from('\x00\x1b\ud800\udc80\udcff\u202e\n"\\'))


@deterministic
@given(any_text, st.lists(st.floats()))
def test_any_text_is_written_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, values: list[float]
) -> None:
    """Paths and variables that are not UTF-8 become text with lone surrogates."""
    file = tmp_path_factory.getbasetemp() / "any.json"
    note = Note(text=text, step_s=tuple(values), part=Part(size_bytes=1, label=text))
    documents.write(file, note)
    assert repr(documents.read(file, Note)) == repr(note)
    file.read_bytes().decode("ascii")


@deterministic
@given(any_text)
def test_reads_back_any_session_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "session.json"
    word = text.replace("\0", "")  # a case with NUL is refused, because NUL cannot be passed to a process
    framework = Script(command=("a", word), env={"A": word}, cwd=word)
    observed = Observed(settings={"a": text}, environment={"b": text})
    failure = Failure(kind="error", message=text, traceback=text)
    run = make_run(case=make_case(framework=framework), observed=observed, failure=failure, notes=(text,))
    result = make_result(run, before=None).replace(nodeid=text, directory=text, baseline_file=text)
    documents.write(file, make_session_file(result))
    assert documents.read(file, SessionFile) == make_session_file(result)


def test_a_name_that_is_not_utf8_becomes_readable(tmp_path: Path) -> None:
    observed = Observed(settings={}, environment={"NCCL_\udc80": "\udc80"})
    assert plain(observed)["environment"] == {"NCCL_\ufffd\ufffd\ufffd": "\udc80"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema_version": 1, "text": "a", "text": "b"}', "the field 'text' appears twice"),
        (
            '{"schema_version": 1, "part": {"size_bytes": 1, "size_bytes": 2}}',
            "'size_bytes' appears twice",
        ),
        ('{"schema_version": 1, "step_s": [NaN]}', "NaN is not valid JSON"),
        ('{"schema_version": 1, "step_s": [-Infinity]}', "-Infinity is not valid JSON"),
    ],
)
def test_what_json_does_not_allow_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "note.json").write_text(content)
    with pytest.raises(FileError, match=f"note.json: not JSON .*{said}"):
        documents.read(tmp_path / "note.json", Note)


def test_text_is_sorted_indented_and_stable(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    documents.write(path, Note())
    first = path.read_text()
    keys = list(json.loads(first))
    assert keys == sorted(keys)
    assert first.endswith("}\n")
    assert len(first.splitlines()) > len(keys)
    documents.write(path, Note())
    assert path.read_text() == first


def test_write_makes_directories_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / ("n" * 250 + ".json")  # the longest name
    documents.write(path, Note(text="old", step_s=(1.0,) * 1000))
    assert path.stat().st_mode & 0o777 == 0o644
    documents.write(path, Note(text="new"))
    assert documents.read(path, Note).text == "new"
    assert [*path.parent.iterdir()] == [path]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Make writes past `size` bytes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_failed_write_leaves_only_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "note.json"
    documents.write(path, Note(text="old"))
    with largest_file(1000), pytest.raises(FileError, match=r"cannot write .*note\.json: File too large"):
        documents.write(path, Note(text="x" * 100_000))
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        documents.write(path, Note(text="new"))
    assert documents.read(path, Note).text == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["note.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(None, r"cannot read .*note\.json: No such file", id="missing"),
        *(
            pytest.param(content, r"note\.json: not JSON .*Delete it or restore it", id=name)
            for name, content in (
                ("empty", b""),
                ("cut short", b'{"schema_version": 1, "text": "ab'),
                ("binary", b"\xff\xfe\x00garbage"),
                ("a number without end", b"9" * 10_000),
                ("a nest without end", b"[" * 100_000),
            )
        ),
        *(
            pytest.param(content, rf"note\.json: expected a JSON object, got {kind}", id=kind)
            for kind, content in (("list", b"[]"), ("str", b'"text"'), ("NoneType", b"null"))
        ),
    ],
)
def test_unreadable_file_is_named_with_advice(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "note.json").write_bytes(content)
    with pytest.raises(FileError, match=said):
        documents.read(tmp_path / "note.json", Note)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema_version": 2}, "field schema_version: this perfsuite reads 1, got 2"),
        ({"schema_version": None}, "field schema_version: this perfsuite reads 1, got None"),
        ({"schema_version": "missing"}, "field schema_version: this perfsuite reads 1, got None"),
        ({"extra": 3}, "field extra: unknown field; remove it or correct its name, got 3"),
        ({"extra": 3, "digest": "of a plain document"}, "field extra: unknown field.*digest: unknown field"),
        ({"part": {"size_bytes": 1, "colour": "red"}}, "field part.colour: unknown field"),
        ({"part": {"size_bytes": "big"}}, "field part.size_bytes: "),
        ({"part": {}}, "field part.size_bytes: Field required"),
        ({"step_s": [0.1, "slow"]}, "field step_s.1: "),
        ({"step_s": [0.1, [0.2]]}, "field step_s.1: "),
        ({"text": 5}, "field text: "),
        ({"text": 5, "part": {"size_bytes": "big"}}, "field text: .*got 5; part.size_bytes: .*got 'big'"),
        pytest.param({"step_s": "x" * 100_000}, "field step_s: .*got 'xxx", id="a huge value is cut"),
    ],
)
def test_read_names_the_file_and_the_field(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write_raw(tmp_path / "note.json", **changes)
    with pytest.raises(FileError, match=f"^{path}: {said}") as caught:
        documents.read(path, Note)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_unknown_field_of_a_sealed_file_is_of_another_version(tmp_path: Path) -> None:
    part = {"size_bytes": 1, "colour": "red"}
    path = write_raw(tmp_path / "note.json", **documents.sealed({"schema_version": 1, "parts": [part, part]}))
    said = f"{path}: this perfsuite does not know the field colour, so another version wrote the file. Use"
    with pytest.raises(FileError, match=f"^{re.escape(said)}"):
        documents.read(path, SealedNote)


def test_read_or_none_gives_none_if_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "note.json"
    documents.write(file, Note(text="read"))
    assert documents.read_or_none(file, Note) == Note(text="read")
    file.write_text("{")
    assert documents.read_or_none(file, Note) is None
    assert documents.read_or_none(tmp_path / "missing.json", Note) is None


def test_replace_gives_a_changed_copy() -> None:
    part = Part(size_bytes=1, label="old")
    changed = part.replace(label="new")
    assert (changed.size_bytes, changed.label, part.label) == (1, "new", "old")
    for data in (part, changed):
        with pytest.raises(ValidationError, match="frozen"):
            data.label = "newer"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Part(size_bytes=1).replace(size_bytes="big"), r"^Part: size_bytes: .*got 'big'"),
        (lambda: Part(size_bytes=1).replace(size=1), r"^Part: size: unknown field"),
        (lambda: Note(part={}), r"^Note: part\.size_bytes: Field required$"),
    ],
    ids=["replace", "replace of an unknown field", "nested"],
)
def test_errors_name_class_and_field(make: Callable[[], Data], said: str) -> None:
    with pytest.raises(CaseError, match=said):
        make()


def test_write_text_to_a_device_writes_to_it() -> None:
    """No file can be made in this device's folder, so a failure of the test harms nothing."""
    reads, writes = os.openpty()
    documents.write_text(Path(os.ttyname(writes)), "text")
    assert os.read(reads, 100) == b"text"
    os.close(reads)
    os.close(writes)


def test_write_text_follows_links_and_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "out.json").write_text("old")
    for name in ("out.json", "new.json"):
        (tmp_path / name).symlink_to(Path("kept") / name)
        documents.write_text(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "kept" / name).read_text() == "new"


def test_writes_text_into_a_fifo(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    text = "x" * 200_000  # more than a pipe holds, so the writer waits for the reader
    with (tmp_path / "read").open("wb") as output, subprocess.Popen(["cat", path], stdout=output):
        documents.write_text(path, text)
    assert (tmp_path / "read").read_text() == text
    assert path.is_fifo()


def test_reads_a_pipe_to_its_end(tmp_path: Path) -> None:
    """The shell passes such a pipe in `perfsuite report <(command)`."""
    note = Note(text="x" * 200_000)  # more than a pipe holds
    documents.write(tmp_path / "note.json", note)
    with subprocess.Popen(["cat", tmp_path / "note.json"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert documents.read(Path(f"/proc/self/fd/{writer.stdout.fileno()}"), Note) == note


def test_no_descriptor_of_a_directory_stays(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileError, match="Is a directory"):
        documents.read(tmp_path, Note)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1"])
def test_writing_to_redirected_stdout_appends(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out.txt"
    code = (
        "import sys; from pathlib import Path; from perfsuite import documents; print('before', flush=True); "
        "documents.write_text(Path(sys.argv[1]), 'text\\n'); print('after')"
    )
    with out.open("ab") as file:
        subprocess.run([sys.executable, "-c", code, name], cwd=tmp_path, stdout=file, check=True)
    assert out.read_text() == "before\ntext\nafter\n"


@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("file/out.json", "File exists"),
        ("file/deep/out.json", "Not a directory"),
        ("directory", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_write_text_names_the_file_and_what_to_do(tmp_path: Path, below: str, said: str) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileError, match=f"cannot write {tmp_path / below}: .*{said}"):
        documents.write_text(tmp_path / below, "")
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "loop").is_symlink()


def test_innermost_lists_take_one_line() -> None:
    value: Any = {"b": [{"y": 1, "x": [1, 2]}, {"z": "]"}], "a": {}, "c": None}
    assert documents.lines(value).splitlines() == [
        "{",
        ' "a": {},',
        ' "b": [',
        "  {",
        '   "x": [1, 2],',
        '   "y": 1',
        "  },",
        '  {"z": "]"}',
        " ],",
        ' "c": null',
        "}",
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(json_values)
@deterministic
def test_json_in_lines_reads_back(value: Any) -> None:
    assert json.loads(documents.lines(value)) == value


@pytest.mark.parametrize(
    ("name", "meant"),
    [("BF16-mixed", "bf16-mixed"), ("fp16mixed", "fp16-mixed"), ("bf1", "bf16"), ("int8", None)],
)
def test_suggests_the_nearest_spelling(name: str, meant: str | None) -> None:
    known = ("fp16-mixed", "bf16-mixed", "bf16")
    assert documents.did_you_mean(name, known) == (f" Did you mean {meant!r}?" if meant else "")


class Plan(Data):
    one: int
    two: int
    three: int = 3


def test_missing_fields_are_listed_together() -> None:
    with pytest.raises(CaseError, match=r"^Plan: required, but missing: one, two; three: "):
        Plan(three="x")  # type: ignore[call-arg]
