import pytest

from perfsuite.errors import MAX_TOLD, CaseError, readable, told


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (CaseError("steps: too few"), "steps: too few"),
        (OSError("no file \udcff"), "OSError: no file \\udcff"),
        (Unspeakable(), "Unspeakable: (its message cannot be shown: RuntimeError in __str__)"),
    ],
)
def test_reports_any_error_in_writable_words(error: Exception, expected: str) -> None:
    assert told(error) == expected


def test_cuts_the_middle_of_a_long_message() -> None:
    text = told(RuntimeError("A" * 10**6 + "Z"))
    assert len(text) <= MAX_TOLD
    assert text.startswith("RuntimeError: AAA")
    assert text.endswith("AZ")
    assert " characters left out ...]" in text
    assert readable("A" * MAX_TOLD) == "A" * MAX_TOLD
