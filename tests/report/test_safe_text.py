import pytest

from perfsuite.report.safe_text import printable, visible


def test_escapes_text_for_terminals() -> None:
    title = "\x1b]0;owned\x07"
    clear = "\x1b[2J\r\x9b2J"
    assert printable(f"{title}{clear}") == "\\x1b]0;owned\\x07\\x1b[2J\\x0d\\x9b2J"
    assert printable("\ud800") == "\\xd800"


def test_escapes_commands_of_github() -> None:
    text = "a::b\n  \t::add-mask::x\n::stop-commands::y\nlog: ##[error]z"
    assert printable(text) == "a::b\n  \t: :add-mask::x\n: :stop-commands::y\nlog: ## [error]z"
    assert printable("±0.5% · µs → 12 GiB\n\ttab") == "±0.5% · µs → 12 GiB\n\ttab"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("user\u202egnp.exe", "user\\u202egnp.exe"),
        ("a\u2066b\u2069", "a\\u2066b\\u2069"),
        ("a\u2028::error::b", "a\\u2028::error::b"),
        ("tag\U000e0041", "tag\\ue0041"),
        ("password=hunter2", "password=***"),
        ("שלום", "שלום"),  # right-to-left text needs no control characters
    ],
)
def test_text_looks_as_it_is(text: str, shown: str) -> None:
    assert printable(text) == visible(text) == shown
