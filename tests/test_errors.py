import pytest

from perfsuite.errors import MAX_TEXT, CaseError, error_text, readable


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
    assert error_text(error) == expected


def test_cuts_the_middle_of_a_long_message() -> None:
    text = error_text(RuntimeError("A" * 10**6 + "Z"))
    assert len(text) <= MAX_TEXT
    assert text.startswith("RuntimeError: AAA")
    assert text.endswith("AZ")
    assert " characters left out ...]" in text
    assert readable("A" * MAX_TEXT) == "A" * MAX_TEXT
