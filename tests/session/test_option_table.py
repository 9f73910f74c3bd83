from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from perfsuite.cli.shared import options
from perfsuite.errors import CaseError
from perfsuite.session.option_table import BY_NAME, OPTIONS, check_together, of_verdicts, options_of
from perfsuite.session.outputs import write_report
from perfsuite.session.setup import Options
from perfsuite.verdict.policy import Policy
from tests.samples import make_result, make_run, make_session_file


def made(**given: str) -> Options:
    values = {name.replace("_", "-"): value for name, value in given.items()}
    read = {name: BY_NAME[name].read(f"--perf-{name}", value) for name, value in values.items()}
    return options_of(Path("/repo"), read)


def test_every_option_has_its_default() -> None:
    store = Path("/repo/.perfsuite")
    baselines = Path("/repo/baselines")
    assert made() == Options(root=Path("/repo"), store=store, baselines=baselines, policy=Policy())


def test_one_option_sets_each_field() -> None:
    by_options = sorted(field for option in OPTIONS if (field := option.sets_field) and "." not in field)
    assert by_options == sorted({field.name for field in fields(Options)} - {"root", "policy"})


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("missing-baseline", "fail", "fail_without_baseline", True),
        ("strict", "improved, inconclusive", "strict", {"improved", "inconclusive"}),
        ("min-judged", "90%", "min_judged", 0.9),
        ("budget", "90s", "budget_s", 90),
        ("budget", "40 min", "budget_s", 2400),
        ("budget", "2.5h", "budget_s", 9000),
        ("shard", "2/8", "shard", (2, 8)),
        ("min-launches", "5", "policy.min_launches", 5),
        ("record-launches", "1", "policy.record_launches", 1),
        ("baselines", "/shared", "baselines", Path("/shared")),
        ("inject", "nan", "inject", "nan"),
        ("interconnect", "8xib400", "interconnect", "8xib400"),
    ],
)
def test_what_a_value_means(name: str, value: str, field: str, expected: Any) -> None:
    assert attrgetter(field)(made(**{name: value})) == expected


@pytest.mark.parametrize(("value", "canaries"), [("3", 3), ("a", ("a",)), ("a, b", ("a", "b"))])
def test_canaries_are_a_number_or_ids(value: str, canaries: Any) -> None:
    assert BY_NAME["canaries"].read("--perf-canaries", value) == canaries


@pytest.mark.parametrize("name", ["index.html", "summary.md", "results.json", "results-2.json"])
def test_a_report_replaces_no_file_of_others(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"accuracy": 1}')
    with pytest.raises(CaseError, match=rf"give another directory \(perfsuite did not write the file {name}"):
        BY_NAME["report"].read("--out", str(tmp_path))


def test_a_report_replaces_an_earlier_report(tmp_path: Path) -> None:
    write_report(tmp_path, make_session_file(make_result(make_run())))
    assert BY_NAME["report"].read("--out", str(tmp_path)) == tmp_path


def test_quick_look_allows_no_unhealthy_launch() -> None:
    assert made(**{"max-launches": "1"}).policy.max_unhealthy == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("missing-baseline", "no", "--perf-missing-baseline=no: give record or fail"),
        ("strict", ",", "--perf-strict=,: give improved or inconclusive, or both, separated by a comma"),
        ("strict", "all", "--perf-strict=all: give improved or inconclusive, or both, separated by a comma"),
        ("budget", "2", "--perf-budget=2: give a time above 0 in s, min or h, such as 90s, 40min or 2.5h"),
        ("budget", "0h", "--perf-budget=0h: give a time above 0"),
        (
            "shard",
            "9/8",
            "--perf-shard=9/8: give the number of this job and the number of jobs: for 8 jobs, 1/8",
        ),
        ("shard", "0/8", "--perf-shard=0/8: give the number of this job"),
        ("shard", "half", "--perf-shard=half: give the number of this job"),
        *(
            ("min-judged", text, f"--perf-min-judged={text}: give a share from 0% to 100%, or from 0 to 1")
            for text in ("1.1", "-1", "nan", "90%%", "all", "101%")
        ),
        ("max-launches", "0", "--perf-max-launches=0: give a whole number from 1 to"),
        *(
            (
                "canaries",
                text,
                f"--perf-canaries={text}: give a number from 1 to 999, or the ids of cases, separ",
            )
            for text in ("0", "1000", "2.5", "a,,b", "3,4")
        ),
        ("max-pairs", "13", "--perf-max-pairs=13: give a whole number from 5 to 12"),
        *(
            (
                "interconnect",
                text,
                f"--perf-interconnect={text}: give the ports of a machine and their Gbit/s, such as 8xib400",
            )
            for text in ("fast", "400", "0xib400")
        ),
        ("json", "/", "--perf-json=/: give a file (this is a directory)"),
        ("report", __file__, "give a directory (this is a file)"),
        *(
            (
                name,
                300 * "x",
                f"--perf-{name}={80 * 'x'}: give a path that is valid here (File name too long)",
            )
            for name in ("store", "baselines", "report", "json")
        ),
    ],
)
def test_bad_value_lists_what_is_allowed(name: str, value: str, said: str) -> None:
    with pytest.raises(CaseError) as caught:
        made(**{name: value})
    assert said in str(caught.value)


def test_a_command_names_its_own_option() -> None:
    with pytest.raises(CaseError, match="--wait-quiet=soon: give a whole number from 0 to"):
        options(wait_quiet="soon")


OF_LAUNCHES = ("inject", "no-counts", "explain")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"dry", name}, rf"--perf-dry excludes --perf-{name} \(a dry run only") for name in OF_LAUNCHES),
        ({"dry", "resume"}, r"--perf-dry excludes --perf-resume \(dry runs"),
        ({"against", "resume"}, r"--perf-against excludes --perf-resume \(comparisons"),
        ({"reference", "against"}, r"--perf-reference excludes --perf-against \(a reference is only useful"),
        ({"reference", "dry"}, r"--perf-reference excludes --perf-dry \(a reference is only useful"),
        ({"reference", "resume"}, r"--perf-reference excludes --perf-resume \(a reference only shows"),
        ({"canaries"}, r"--perf-canaries needs --perf-reference: add it"),
        ({"interconnect"}, r"--perf-interconnect needs --perf-dry: add it, or leave --perf-interconnect out"),
    ],
)
def test_names_options_that_conflict(given: set[str], said: str) -> None:
    with pytest.raises(CaseError, match=said):
        check_together(given)


def test_a_verdict_depends_on_these_alone() -> None:
    chosen = made(**{"missing-baseline": "fail", "inject": "nan", "strict": "improved"})
    assert of_verdicts(chosen) == {
        "--perf-max-launches": "15",
        "--perf-tolerance": "nothing",
        "--perf-min-launches": "1",
        "--perf-record-launches": "3",
        "--perf-missing-baseline": "fail",
        "--perf-shadow": "no",
        "--perf-no-counts": "no",
        "--perf-baselines": "/repo/baselines",
        "--perf-inject": "nan",
    }
