import io
import sys
from pathlib import Path

import pytest
import typer

from perfsuite.cli.shared import asks, options, tolerance


def test_reads_a_tolerance_as_percent_or_fraction() -> None:
    assert [tolerance(text) for text in ("1%", "0.01", " 50 % ", "0.5")] == [0.01, 0.01, 0.5, 0.5]


@pytest.mark.parametrize("text", ["0", "0%", "-1%", "51%", "1", "nan", "inf", "1 percent", "", "%"])
def test_refuses_a_tolerance_beyond_its_bounds(text: str) -> None:
    with pytest.raises(typer.BadParameter) as raised:
        tolerance(text)
    assert str(raised.value) == f"{text!r}, expected more than 0% and up to 50%, such as 1% or 0.01"


class Terminal(io.StringIO):
    """Text that is typed or shown on a terminal, or the same without a terminal."""

    def __init__(self, text: str = "", *, is_terminal: bool = True) -> None:
        super().__init__(text)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("yes", "is_large", "has_terminal", "answer", "may"),
    [
        (False, False, False, "", True),
        (False, True, False, "y\n", False),
        (True, True, False, "", True),
        (True, True, True, "", True),
        (False, True, True, "y\n", True),
        (False, True, True, "n\n", False),
    ],
)
def test_asks_about_downloads_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, yes: bool, is_large: bool, has_terminal: bool, answer: str, may: bool
) -> None:
    shown = Terminal(is_terminal=has_terminal)
    monkeypatch.setattr(sys, "stdin", Terminal(answer, is_terminal=has_terminal))
    monkeypatch.setattr(sys, "stderr", shown)
    assert asks(yes=yes)("pip downloads 4.6 GB", is_large) == may
    assert ("Download that much?" in shown.getvalue()) == (is_large and has_terminal and not yes)


@pytest.mark.parametrize("closed", ["stdin", "stderr"])
def test_asks_nothing_unless_both_are_a_terminal(monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    for name in ("stdin", "stderr"):
        monkeypatch.setattr(sys, name, Terminal("y\n", is_terminal=name != closed))
    assert not asks(yes=False)("pip downloads 4.6 GB", True)


def test_an_option_without_a_value_is_that_of_the_ini_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nperf_tolerance = 5%\nperf_report = elsewhere\n")
    assert options(tolerance=None).policy.tolerance == 0.05
    assert options(tolerance=0.02).policy.tolerance == 0.02
    assert options(report=None).report is None, "a command writes a report only where it is told to"


def test_every_command_counts_as_many_steps_as_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nperf_counted_steps = 30\n")
    assert options(store=tmp_path).counted_steps == 30
