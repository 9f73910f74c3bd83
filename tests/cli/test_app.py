import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from perfsuite import extensions
from perfsuite.cli.app import app
from perfsuite.results.store import BaselineStore
from tests.cli.commands import error_of, flat, rows, run
from tests.packages import Packages
from tests.processes import python
from tests.samples import make_baseline, make_case, make_run


@pytest.mark.parametrize("framework", ["nosuch", "fsdp", "script"])
def test_an_error_is_one_line_and_status_2(framework: str) -> None:
    result = run("selftest", "--framework", framework, status=2)
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("perfsuite selftest: Case: framework: ")


def test_commands_follow_pytests_ini_file() -> None:
    Path("pytest.ini").write_text("[pytest]\nperf_store = mine\nperf_baselines = perf/baselines\n")
    kept = BaselineStore(Path("perf/baselines"), Path("mine/baselines"))
    kept.write_reviewed(make_baseline(*[make_run()] * 3))
    kept.write_local(make_baseline(*[make_run(case=make_case(micro_batch=5))] * 3))
    shown = run("baseline", "list")
    assert make_case().id in shown.stdout
    assert make_case(micro_batch=5).id in shown.stdout
    shown = run("baseline", "list", "--baselines", "baselines", "--store", "other")
    assert make_case().id not in shown.stdout, "the option takes precedence"


@pytest.fixture
def listed_in_mine() -> str:
    """Keep a baseline in the directory `mine`, and return the id of its case."""
    BaselineStore(Path("mine"), Path("store/baselines")).write_reviewed(make_baseline(*[make_run()] * 3))
    return make_case().id


def test_a_shared_option_may_precede_the_command(listed_in_mine: str) -> None:
    assert listed_in_mine in run("--baselines", "mine", "baseline", "list").stdout


def test_an_option_in_front_overrides_the_ini_file(listed_in_mine: str) -> None:
    Path("pytest.ini").write_text("[pytest]\nperf_baselines = others\n")
    assert listed_in_mine in run("--baselines", "mine", "baseline", "list").stdout


def test_an_option_of_the_command_overrides_one_in_front(listed_in_mine: str) -> None:
    assert listed_in_mine in run("--baselines", "others", "baseline", "list", "--baselines", "mine").stdout


def test_json_may_precede_the_command(listed_in_mine: str) -> None:
    [row] = rows(run("--json", "--baselines", "mine", "baseline", "list").stdout)
    assert row["case"] == listed_in_mine


@pytest.mark.parametrize(
    ("option", "command"),
    [
        (("--json",), ("baseline", "accept")),
        (("--cases", "mine"), ("baseline", "list")),
        (("--store", "mine"), ("doctor",)),
        (("--baselines", "mine"), ("report",)),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_command_refuses_an_option_it_lacks(option: tuple[str, ...], command: tuple[str, ...]) -> None:
    error = error_of(*option, *command)
    assert f"Invalid value for '{option[0]}': " in error
    assert " does not use it. Leave it out" in error


def test_an_option_in_front_is_given_once() -> None:
    assert "'--store': it is given 2 times" in error_of("--store", "a", "--store", "b", "baseline", "list")


def test_help_is_shown_beside_an_unused_option() -> None:
    assert "Usage: " in run("--json", "baseline", "accept", "--help").stdout


def commands_of(group: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command and every group of commands, with the words that call it."""
    yield words, group
    for name, subcommand in getattr(group, "commands", {}).items():
        yield from commands_of(subcommand, *words, name)


COMMANDS = dict(commands_of(typer.main.get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_shows_every_word_of_every_text(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would take `[labels]` for unknown markup and hide it."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 500)
    shown = re.sub(r"[\s│]+", "", run(*words, "--help").output)
    command = COMMANDS[words]
    texts = [parameter.help for parameter in command.params] + [command.help if words else None]
    assert any(texts)
    for text in filter(None, texts):
        assert re.sub(r"\s+", "", text.replace("\\[", "[")) in shown


@pytest.mark.parametrize("words", [words for words in COMMANDS if words], ids=" ".join)
def test_help_texts_are_sentences(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    texts = [command.help, *(parameter.help for parameter in command.params if parameter.name != "help")]
    assert [text for text in texts if not text[0].isupper() or text[-1] not in ".?"] == []
    assert [text for text in texts if "\n" in text.replace("\n\n", "")] == [], "each paragraph is one line"


def test_explains_a_bad_value_in_plain_words() -> None:
    said = flat(run("dry-run", "a", "--device", "tpu", status=2).stderr)
    assert ": 'tpu' is not one of '" in said
    assert "Value error" not in said


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("compare --against main --against=v1.2 a", "--against"),
        ("compare --against main --arm . --arm v2 a", "--arm"),
        ("baseline list --baselines one --baselines two", "--baselines"),
    ],
)
def test_an_option_given_twice_is_refused(words: str, name: str) -> None:
    said = flat(run(*words.split(), status=2).stderr)
    assert f"for '{name}': it is given 2 times, but takes one value. Give {name} once" in said


def test_completion_of_a_repeated_option_is_no_error() -> None:
    """A shell completes a line that is not valid yet."""
    words = "perfsuite compare --against a --against b --"
    completes = {"_PERFSUITE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "6"}
    result = CliRunner().invoke(app, [], prog_name="perfsuite", env=completes)
    assert "--counts" in result.output


def test_a_repeated_flag_is_accepted() -> None:
    run("baseline", "list", "--json", "--json")


def test_help_names_the_exit_statuses() -> None:
    assert "Exit status: 0; 1 for a finding" in flat(run("--help").stdout)


def test_prints_the_version_without_command() -> None:
    modules = python(
        "import sys\n"
        "from perfsuite.cli.app import app\n"
        "try: app(['--version'])\n"
        "except SystemExit: print(*[name for name in sys.modules if name.startswith('perfsuite')])"
    )
    version, loaded = modules.splitlines()
    assert version.startswith("perfsuite ")
    assert len(loaded.split()) <= 17, "few modules, since no command is imported"


def test_runs_a_command_of_another_package(packages: Packages) -> None:
    code = """
        import typer
        cost = typer.Typer(help="What do cases cost?")
        @cost.command()
        def night(hours: int) -> None:
            print(f"{hours} hours")
        @cost.command()
        def year() -> None:
            print("much")
    """
    packages.install("perf-cost", code, commands="cost = perf_cost:cost")
    assert run("cost", "night", "3").stdout == "3 hours\n"
    shown = run("--help").stdout
    assert shown.index("Commands of other packages") < shown.index("What do cases cost?")


def test_broken_command_stops_no_other(packages: Packages) -> None:
    packages.install("perf-broken", "1 / 0", commands="cost = perf_broken:cost")
    why = "cost = 'perf_broken:cost' of perf-broken 1.5 (perfsuite.commands) cannot be imported"
    assert f"Cannot be used: {why}" in flat(run("--help").stdout)
    assert why in flat(run("cost", "night", "--hours", "3", status=2).stderr)
    assert "doctor" in run("doctor", "--help").stdout


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("go = 3", "it is 3: name a function, or a typer.Typer for several"),
        (
            "def go(x: 'Foo') -> None: ...",
            "typer cannot turn it into a command (NameError: name 'Foo' is not",
        ),
        ("raise OSError('no [/usr/lib/libx.so]')", "cannot be imported: OSError: no [/usr/lib/libx.so]"),
        ("raise SystemExit(5)", "cannot be imported: SystemExit: 5"),
    ],
)
def test_a_broken_command_stops_no_other(packages: Packages, code: str, why: str) -> None:
    packages.install("perf-cost", code, commands="cost = perf_cost:go")
    shown = flat(run("--help").stdout)
    assert "Cannot be used: cost = 'perf_cost:go' of perf-cost 1.5 (perfsuite.commands)" in shown
    assert why in shown
    assert "baseline" in shown
    assert why in flat(run("cost", status=2).stderr)


def test_two_commands_of_one_name_stop_no_other(packages: Packages) -> None:
    for package in ("perf-one", "perf-two"):
        packages.install(package, "", commands="cost = perf_one:go")
    assert "the name 'cost' (perfsuite.commands) is used twice" in flat(run("--help").stdout)


def test_missing_metadata_is_one_line_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfsuite.extensions.distributions", lambda name: [])
    extensions.own.cache_clear()
    [line] = run("--help", status=2).stderr.splitlines()
    assert line.startswith("perfsuite: the metadata of perfsuite is missing, or older than its code")


def test_deleted_directory_is_one_line_status_2(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"mkdir '{gone}'; cd '{gone}'; rmdir '{gone}'; exec '{sys.executable}' -m perfsuite.cli report",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("perfsuite report: the current directory: No such file or directory")


@pytest.mark.parametrize("words", ["--version", "--help", "baseline list --store ."])
def test_a_full_disk_is_one_line_and_status_2(words: str) -> None:
    (Path() / "cases").mkdir()
    done = subprocess.run(
        ["bash", "-c", f"exec '{sys.executable}' -m perfsuite.cli {words} > /dev/full"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("perfsuite: No space left on device")


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (("compare",), " compare [OPTIONS] [CASE]..."),
        (("report",), " report [OPTIONS] [RESULTS.json]..."),
        (("baseline", "show"), " baseline show [OPTIONS] {CASE}"),
        (("baseline", "accept"), " baseline accept [OPTIONS] [CASE]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_names_arguments_in_capitals(words: tuple[str, ...], usage: str) -> None:
    assert usage in flat(run(*words, "--help").stdout)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_shows_no_type_of_a_flag(words: tuple[str, ...]) -> None:
    assert "<bool>" not in run(*words, "--help").stdout
