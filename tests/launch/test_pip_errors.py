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


CONSTRAINED = (
    "The conflict is caused by:\n    The user requested torch=={}\n"
    "    The user requested (constraint) torch<=2.14.1\n"
)


def test_a_constraint_does_not_hide_a_missing_version() -> None:
    """If a package has a constraint, pip reports a version that it does not find as a conflict."""
    problem = missing(CONSTRAINED.format("1.12.0"))
    assert problem is not None
    assert (problem.requirement, problem.name, problem.version) == ("torch==1.12.0", "torch", "1.12.0")
    assert missing(CONSTRAINED.format("2.15.0")) is None
    assert missing(CONSTRAINED.format("1.12.0") + "    library 1.0 depends on torch<2\n") is None


RETRY = (
    "WARNING: Retrying (Retry(total={}, connect=None, read=None, redirect=None, status=None)) after "
    "connection broken by 'ReadTimeoutError(\"host='pypi.org'\")': /simple/torch/\n"
)


def test_an_unreachable_index_is_not_a_missing_version() -> None:
    output = RETRY.format(1) + RETRY.format(0) + FAILED.format("torch==2.12.0", "none")
    assert missing(output) is None
    assert reason(output) == "pip cannot reach the package index: ReadTimeoutError(\"host='pypi.org'\")"


def test_an_index_that_was_slow_once_was_reached() -> None:
    assert missing(RETRY.format(1) + FAILED.format("torch==2.99.0", "2.13.0")) is not None


INVALID = "ERROR: Invalid requirement: 'one ! two': Expected end"


@pytest.mark.parametrize(
    "where",
    ["\n    one ! two\n        ^ (from line 2 of a.txt)\n", " (from line 2 of a.txt)\n"],
    ids=["pip 26.3", "pip 23.0"],
)
def test_names_the_line_with_an_invalid_requirement(where: str) -> None:
    assert reason(INVALID + where) == "line 2 of a.txt is not a requirement: 'one ! two': Expected end"


NOT_BUILT = """
      ModuleNotFoundError: No module named 'distutils'
      [end of output]

  note: This error originates from a subprocess, and is likely not a problem with pip.
error: metadata-generation-failed

\N{MULTIPLICATION SIGN} Encountered error while generating package metadata.
╰─> numpy

hint: See above for details.
"""


def test_says_why_a_package_cannot_be_built() -> None:
    why = "pip cannot build numpy from source (ModuleNotFoundError: No module named 'distutils'). Name a"
    assert str(reason(NOT_BUILT)).startswith(why)


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
        "(constraint) torch<=2.14.1. The constraint is in a file that pip's settings name. To find the file, "
        "run pip config list"
    )
    assert str(reason(f"The conflict is caused by:\n{asked}{other}")).endswith("depends on torch<2")
