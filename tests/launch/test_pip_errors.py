"""Test which reasons are found in the output when pip fails."""

import pytest

from perfsuite.launch.pip_errors import missing, reason

FAILED = "ERROR: Could not find a version that satisfies the requirement {} (from versions: {})\n"


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("2.99.0", ("2.12.0", "2.13.0", "2.14.1")),
        ("2.13.5", ("2.11.0", "2.12.0", "2.13.0", "2.14.1")),
        ("1.0", ("2.9.0", "2.11.0", "2.12.0")),
    ],
)
def test_names_the_nearest_versions(version: str, nearest: tuple[str, ...]) -> None:
    problem = missing(FAILED.format(f"torch=={version}", "2.9.0, 2.11.0, 2.12.0, 2.13.0, 2.14.1"))
    assert problem is not None
    assert problem.nearest() == nearest


def test_an_index_without_the_package_has_no_nearest() -> None:
    problem = missing(FAILED.format("absent==1.0", "none"))
    assert problem is not None
    assert (
        problem.sentence("3.11.7")
        == "pip finds no absent 1.0, nor any other version of absent, for Python 3.11"
    )


def test_names_the_python_of_the_version_only() -> None:
    """pip lists all versions that it ignored, including versions that nobody asked for."""
    ignored = "ERROR: Ignored the following versions that require a different python version: "
    output = f"{ignored}2.0 Requires-Python >=3.13; 3.0 Requires-Python >=3.14\n"
    asked = missing(output + FAILED.format("a==2.0", "1.0"))
    other = missing(output + FAILED.format("a==1.5", "1.0"))
    assert asked is not None
    assert other is not None
    assert (asked.needs_python, other.needs_python) == (">=3.13", None)


def test_other_failures_have_no_missing_version() -> None:
    assert missing("ERROR: No space left on device") is None
    assert reason("ERROR: No space left on device") is None


def test_says_where_a_constraint_comes_from() -> None:
    """The version is limited by a file that pip's settings name. The user did not name it."""
    asked = "    The user requested torch==2.15.0\n"
    other = "    library 1.0 depends on torch<2\n"
    limit = "    The user requested (constraint) torch<=2.14.1\n"
    limited = str(reason(f"The conflict is caused by:\n{asked}{limit}"))
    assert limited.endswith(
        "(constraint) torch<=2.14.1. The constraint is in a file that pip's settings name: pip config list"
    )
    assert str(reason(f"The conflict is caused by:\n{asked}{other}")).endswith("depends on torch<2")
