import json
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from perfsuite.cli.shared_options import Shared, shares
from perfsuite.inputs.ini import STORE
from tests.cli.commands import error_of


def invoke(*words: str, declared: Any) -> dict[str, Any]:
    """Run a command that declares some shared options, and return what it printed as JSON."""
    app = typer.Typer()
    app.command()(declared)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


@shares("store", "as_json")
def shown(*, name: Annotated[str, typer.Option(help="Any name.")] = "a", shared: Shared) -> None:
    """Print the options that a command gets."""
    print(json.dumps({"name": name, **{key: str(value) for key, value in vars(shared).items()}}))


def test_shared_options_have_their_defaults() -> None:
    assert invoke(declared=shown) == {"name": "a", "store": str(STORE), "as_json": "False"}


def test_shared_options_follow_the_commands_name() -> None:
    words = ("--store", "mine", "--json", "--name", "b")
    assert invoke(*words, declared=shown) == {"name": "b", "store": "mine", "as_json": "True"}


def test_an_undeclared_option_has_no_value() -> None:
    @shares("store")
    def reads_others(*, shared: Shared) -> None:
        """Read an option that the command does not declare."""
        print(shared.baselines)

    app = typer.Typer()
    app.command()(reads_others)
    assert isinstance(CliRunner().invoke(app, []).exception, AttributeError)


@pytest.mark.parametrize("command", ["accept", "refresh"])
def test_json_is_refused_where_there_is_none(command: str) -> None:
    assert "No such option: --json" in error_of("baseline", command, "--json")
