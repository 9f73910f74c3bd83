from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from perfsuite.errors import FileError
from perfsuite.results.waivers import FILE, Waiver, read

GOOD = {
    "case": '"fsdp2-*"',
    "metric": '"tokens_per_s"',
    "tolerated": '"22%"',
    "issue": '"https://example.org/1"',
    "owner": '"@me"',
    "until": "2026-12-31",
}
ALL = r"each \[\[waiver\]\] has case, metric, tolerated, issue, owner, until \(without quotes: 2026-12-31\)"


def write(directory: Path, **changes: str | None) -> Path:
    """A file of one good waiver, and one with some fields otherwise or left out."""
    file = directory / FILE
    second = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    tables = (
        "\n".join(["[[waiver]]", *(f"{name} = {value}" for name, value in table.items())])
        for table in (GOOD, second)
    )
    file.write_text("\n".join(tables))
    return file


def test_each_waiver_is_read_and_says_what_it_tolerates(tmp_path: Path) -> None:
    first, second = read(write(tmp_path, tolerated="24", until="2026-12-30"))
    assert first == Waiver(
        case="fsdp2-*",
        metric="tokens_per_s",
        tolerated="22%",
        issue="https://example.org/1",
        owner="@me",
        until=date(2026, 12, 31),
    )
    assert first.told == "22% tolerated until 2026-12-31, @me, https://example.org/1"
    assert (second.tolerated, second.until) == (24, date(2026, 12, 30))


def test_without_a_file_or_with_an_empty_one_nothing_is_waived(tmp_path: Path) -> None:
    assert read(tmp_path / FILE) == ()
    (tmp_path / FILE).write_text("# none now\n")
    assert read(tmp_path / FILE) == ()


SHARE = 'give a share, as "22%", or for a count its growth in calls, bytes or FLOP, as 24'
DAY = "Input should be a valid date"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"owner": None}, "owner: Field required"),
        ({"owner": '""'}, "owner: String should have at least 1 character, got ''"),
        ({"metrics": '"x"'}, r"metrics: unknown field; remove it or correct its name, got 'x'"),
        ({"why": '"x"'}, "why: unknown field; remove it or correct its name, got 'x'"),
        ({"until": '"soon"'}, f"until: {DAY}, got 'soon'"),
        ({"until": '"2026-12-31"'}, f"until: {DAY}, got '2026-12-31'"),
        ({"until": "20261231"}, f"until: {DAY}, got 20261231"),
        ({"until": "2026-12-31T10:00:00"}, f"until: {DAY}, got datetime.datetime.*"),
        *(({"tolerated": bad}, f"tolerated: {SHARE}, got {bad}") for bad in ("0.22", "0", "-3", "1.5")),
        ({"tolerated": "true"}, f"tolerated: {SHARE}, got True"),
        ({"tolerated": '"0%"'}, f"tolerated: {SHARE}, got '0%'"),
        ({"tolerated": '"22"'}, f"tolerated: {SHARE}, got '22'"),
        ({"tolerated": '"any"'}, f"tolerated: {SHARE}, got 'any'"),
        ({"issue": '"#1"'}, "issue: String should match pattern .*, got '#1'"),
    ],
)
def test_a_bad_entry_is_named_with_its_value_and_what_is_allowed(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(FileError, match=rf"^{file}: waiver\.1\.{said}; {ALL}, and there is"):
        read(file)


def test_an_entry_without_a_case_is_named_by_its_number(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"waiver\.1\.case: Field required"):
        read(write(tmp_path, case=None))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[waiver", r" cannot be read: Expected .*; it is TOML, with a \[\[waiver\]\] for each"),
        ("[[waiver]]\nuntil = 2026-02-30", " cannot be read: .*; it is TOML"),
        ("[[waivers]]\ncase = 'x'", ": waivers: unknown field"),
        ("[waiver]\ncase = 'x'", ": waiver: Input should be a valid tuple"),
        ("waiver = [1]", ": waiver.0: Input should be a valid dictionary"),
    ],
)
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(FileError, match=f"^{tmp_path / FILE}{said}"):
        read(tmp_path / FILE)


def test_a_directory_is_no_file_of_waivers(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(FileError, match=r"cannot be read: .*Is a directory"):
        read(tmp_path / FILE)
