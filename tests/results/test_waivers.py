from datetime import date
from pathlib import Path

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
ALL = (
    r"each \[\[waiver\]\] has only the fields case, metric, tolerated, issue, owner, until "
    r"\(write dates without quotes: 2026-12-31\)"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / FILE


def write(file: Path, **changes: str | None) -> None:
    """Write a file with one good waiver, and a second one with these fields changed or left out."""
    second = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    fields = ("\n".join(f"{name} = {value}" for name, value in table.items()) for table in (GOOD, second))
    file.write_text("".join(f"[[waiver]]\n{waiver_fields}\n" for waiver_fields in fields))


def test_no_waivers_without_a_file_or_entries(file: Path) -> None:
    assert read(file) == (), "there is no file"
    file.write_text("# none now\n")
    assert read(file) == ()


def test_reads_each_waiver_and_its_tolerance(file: Path) -> None:
    write(file, tolerated="24", until="2026-12-30")
    first, second = read(file)
    fields = {"case": "fsdp2-*", "metric": "tokens_per_s", "issue": "https://example.org/1", "owner": "@me"}
    assert first == Waiver(**fields, tolerated="22%", until=date(2026, 12, 31))
    assert first.terms == "22% tolerated until 2026-12-31, owner @me, issue https://example.org/1"
    assert (second.tolerated, second.until) == (24, date(2026, 12, 30))


SHARE = 'give a share, such as "22%", or the growth of a count in calls, bytes or FLOP, such as 24'
DAY = "Input should be a valid date"
UNKNOWN = "unknown field; remove it or correct its name, got 'x'"


def test_bad_entry_says_what_is_allowed(file: Path) -> None:
    for field, value, said in (
        ("case", None, "Field required"),
        ("owner", None, "Field required"),
        ("owner", '""', "String should have at least 1 character, got ''"),
        ("metrics", '"x"', UNKNOWN),
        ("why", '"x"', UNKNOWN),
        ("until", '"soon"', f"{DAY}, got 'soon'"),
        ("until", '"2026-12-31"', f"{DAY}, got '2026-12-31'"),
        ("until", "20261231", f"{DAY}, got 20261231"),
        ("until", "2026-12-31T10:00:00", f"{DAY}, got datetime.datetime.*"),
        *(("tolerated", bad, f"{SHARE}, got {bad}") for bad in ("0.22", "0", "-3", "1.5")),
        ("tolerated", "true", f"{SHARE}, got True"),
        *(("tolerated", f'"{bad}"', f"{SHARE}, got '{bad}'") for bad in ("0%", "22", "any")),
        ("issue", '"#1"', "String should match pattern .*, got '#1'"),
    ):
        write(file, **{field: value})
        with pytest.raises(FileError, match=rf"^{file}: waiver\.1\.{field}: {said}; {ALL}"):
            read(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[waiver", r" cannot be read: Expected .*; it must be TOML, with a \[\[waiver\]\] for each waiver"),
        ("[[waiver]]\nuntil = 2026-02-30", " cannot be read: .*; it must be TOML"),
        (f"[[waiver]]\ntolerated = {'9' * 5000}", " cannot be read: Exceeds the limit .*; it must be TOML"),
        ("[[waivers]]\ncase = 'x'", ": waivers: unknown field"),
        ("[waiver]\ncase = 'x'", ": waiver: Input should be a valid tuple"),
        ("waiver = [1]", ": waiver.0: Input should be a mapping or a"),
        ("", " cannot be read: .*Is a directory"),
    ],
)
def test_names_a_file_of_another_kind(file: Path, text: str, said: str) -> None:
    if text:
        file.write_text(text)
    else:
        file.mkdir()
    with pytest.raises(FileError, match=f"^{file}{said}"):
        read(file)
