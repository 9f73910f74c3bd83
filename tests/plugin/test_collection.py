from types import SimpleNamespace
from typing import Any

import pytest

from perfsuite.plugin.collection import has_cases, names_without_a_test, selection_of
from tests.suite import CASES, ID, OTHER, run, write_cases

MADE_INSIDE = CASES.replace(
    '@pytest.mark.parametrize("case", [FAKE, A100])\n    def test_it(bench, case)', "def test_it(bench)"
)
WITHOUT_PARAMETER = MADE_INSIDE.replace("bench(case)", "bench(FAKE)")
NO_PARAMETER = (
    "ERROR: test_cases.py::test_it: bench measures a case that is a parameter of the test, so that -m and -k "
    'can select it. Write @pytest.mark.parametrize("case", [Case(...)]) above def test_it(bench, case)'
)


@pytest.mark.parametrize(
    ("content", "args", "said"),
    [
        (WITHOUT_PARAMETER, (), NO_PARAMETER),
        (WITHOUT_PARAMETER, ("-m", "cpu"), NO_PARAMETER),
        (CASES.replace("A100]", "None]"), (), "ERROR: test_cases.py::test_it[None]: bench measures a case"),
        (
            CASES + OTHER,
            (),
            f"ERROR: test_cases.py::test_it[{ID}] and test_cases.py::test_other[{ID}] measure the same "
            f"case, {ID}, and would share a baseline: leave one of them out",
        ),
        (
            CASES.replace("A100]", "FAKE.replace(may_run_out_of_memory=True)]"),
            (),
            f"two different cases have the id {ID}: they differ in may_run_out_of_memory",
        ),
        (CASES, ("-m", "h10"), "-m 'h10': no marker is named h10. Did you mean h100?"),
        (CASES, ("-m", "cpu or h10"), "-m 'cpu or h10': no marker is named h10. Did you mean h100?"),
        (CASES, ("-m", "a100-80gb"), "no marker is named a100-80gb. Did you mean a100?"),
        (CASES, ("-m", "xyzzy"), "no marker is named xyzzy. Hardware markers are cpu, gpu, a10, "),
    ],
    ids=["no parameter", "-m", "no case", "twice", "one id", "near", "one of two", "family", "unknown"],
)
def test_refuses_cases_that_would_be_mismeasured(
    suite: pytest.Pytester, content: str, args: tuple[str, ...], said: str
) -> None:
    suite.makepyfile(test_cases=content)
    result = run(suite, *args, status=pytest.ExitCode.USAGE_ERROR)
    assert said in str(result.stderr)
    assert "Traceback" not in str(result.stderr)
    result.stdout.no_fnmatch_line("*nothing was measured*")


def test_extra_keywords_of_a_test_are_matched() -> None:
    """A plug-in can add keywords to a test."""
    item: Any = SimpleNamespace(
        nodeid="a.py::test", keywords={"test": 1}, listextrakeywords=lambda: {"nightly"}
    )
    assert names_without_a_test("nightly or nosuch", [item]) == ("nosuch",)


def test_names_a_keyword_that_matches_no_test(suite: pytest.Pytester) -> None:
    said = run(suite, "--collect-only", "-k", "fake or typo").stdout
    said.fnmatch_lines(["perfsuite: -k 'fake or typo': no test matches typo"])
    run(suite, "--collect-only", "-k", "fake or test_it").stdout.no_fnmatch_line("*no test matches*")


@pytest.mark.parametrize(
    ("source", "is_in_cases", "expected"),
    [
        ("def test_it(bench, case): bench(case)", False, True),
        ("class TestIt:\n    def test_it(self, *, bench): ...", False, True),
        ("from perfsuite import DDP, Case\ndef test_it(measured, case): ...", True, True),
        ("from perfsuite import DDP, Case\ndef test_it(measured, case): ...", False, False),
        ("import bench\ndef test_it(case): bench.run(case)", True, False),
        ("def test_it(bench", True, False),
        ("\0", True, False),
    ],
)
def test_files_of_cases_are_known_by_their_text(source: str, is_in_cases: bool, expected: bool) -> None:
    assert has_cases(source, is_in_cases=is_in_cases) is expected


def test_comparison_asks_arm_a_for_the_same_tests(pytester: pytest.Pytester) -> None:
    pytester.mkdir("perf")
    pytester.makepyfile(test_a="", test_b="")
    top = pytester.path
    ids = ("test_a.py::test_a", "test_a.py::TestIt::test_b", "test_b.py::test_c", "test_b.py")
    selection = selection_of(pytester.parseconfigure(*ids))
    assert selection.names == {top / "test_a.py": ["test_a", "TestIt::test_b"]}
    assert {*selection.paths} == {top / "test_a.py", top / "test_b.py"}
    assert not selection.is_directory_of_cases


def test_comparison_finds_renamed_directory(pytester: pytest.Pytester) -> None:
    pytester.mkdir("perf")
    assert selection_of(pytester.parseconfigure("perf")).is_directory_of_cases


def test_accepts_a_fixture_with_case_parameters(suite: pytest.Pytester) -> None:
    fixture = """@pytest.fixture(params=[FAKE, A100])
    def case(request):
        return request.param

    def"""
    suite.makepyfile(
        test_cases=CASES.replace('@pytest.mark.parametrize("case", [FAKE, A100])\n    def', fixture)
    )
    result = run(suite, "--collect-only", "-q", "-m", "cpu")
    result.stdout.fnmatch_lines(["test_cases.py::test_it[[]fake-llama-tiny-*]", "1/2 tests collected*"])


def test_bench_unseen_at_collection_is_refused(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases="def test_it(request):\n    request.getfixturevalue('bench')\n")
    result = suite.runpytest("-W", "ignore")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*bench measures a case that is a parameter of the test*"])


MARKED = CASES.replace("@pytest", "@pytest.mark.mine\n    @pytest")


@pytest.mark.parametrize(
    "expression",
    ["h100 or (cpu and not slow)", "mine", "registered(name='h10', other=1) or cpu", "parametrize"],
)
def test_accepts_known_or_harmless_markers(suite: pytest.Pytester, expression: str) -> None:
    suite.makeini("[pytest]\nmarkers = registered(name, other): mine, too\n")
    suite.makepyfile(test_cases=MARKED)
    run(suite, "--collect-only", "-m", expression, "-W", "ignore")


def test_ignores_markers_without_a_case(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases="def test_it():\n    pass\n")
    run(suite, "-m", "h10", status=pytest.ExitCode.NO_TESTS_COLLECTED)


def test_bad_value_points_only_at_the_users_line(suite: pytest.Pytester) -> None:
    for wrong in ("FAKE.replace(micro_batchs=4)", "Topology(processes=2)"):
        write_cases(suite, f"[{wrong}]")
        result = run(suite, status=pytest.ExitCode.INTERRUPTED)
        result.stdout.fnmatch_lines(["test_cases.py:*: in <module>", f"*{wrong}*", "E   *: unknown field*"])
        result.stdout.no_fnmatch_line("*documents.py*")
