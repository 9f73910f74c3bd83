import shlex
from typing import Any

import pytest
import typer

from perfsuite import extensions
from perfsuite.cli.app import app
from perfsuite.extensions import COMMANDS
from perfsuite.launch.arm import Arm
from perfsuite.report.html.next_steps import next_steps
from perfsuite.results.session_file import ArmFacts, Measurement
from perfsuite.session.option_table import BY_NAME
from tests import counted
from tests.samples import COMMIT, judged, make_case, make_compared, make_result, make_session_file, now

AGAIN = "pytest 'bench_cases/test_x.py::test_x[a]'"
ID = make_case().id
BY_COUNTS = judged(make_result(now()), counts=counted.make_check(counted.make_finding()), outcome="regressed")


SLOWER = make_result(*[now(tokens_per_s=50_000.0, tokens_per_s_mean=49_000.0)] * 5)
COMPARED_SLOWER = judged(make_compared(), outcome="regressed")
EVERY_COMMAND = ("baseline", "bisect", "compare", "dry-run")


def commands(
    result: Measurement,
    arms: tuple[ArmFacts, ...] = (),
    *,
    names: tuple[str, ...] = EVERY_COMMAND,
    **changes: Any,
) -> list[str]:
    session = make_session_file(result, arms=arms, **changes)
    return [step.command for step in next_steps(result, session, commands=names)]


def facts(text: str, **changes: Any) -> ArmFacts:
    """Return the facts of an arm that the user named `text`. By default, the arm is a commit."""
    return ArmFacts(text=text, facts=Arm(**{"commit": COMMIT, **changes}).facts)


def bisections(good: ArmFacts, bad: ArmFacts) -> list[str]:
    suggested = commands(COMPARED_SLOWER, (good, bad))
    return [command for command in suggested if command.startswith("perfsuite bisect ")]


def test_a_slower_case_is_compared_bisected_or_accepted() -> None:
    assert SLOWER.outcome == "regressed"
    assert commands(SLOWER) == [
        f"perfsuite compare --against COMMIT {ID}",
        f"perfsuite bisect --good COMMIT {ID}",
        f"perfsuite baseline accept --reason WHY {ID}",
        AGAIN,
    ]


def test_more_work_of_a_step_is_searched_by_counts() -> None:
    assert commands(BY_COUNTS)[:3] == [
        f"perfsuite compare --against COMMIT --counts {ID}",
        f"perfsuite bisect --good COMMIT --counts {ID}",
        f"perfsuite baseline accept --only-counts --reason WHY {ID}",
    ]


def test_a_dry_run_is_searched_by_dry_runs() -> None:
    slower = judged(counted.make_dry(), outcome="regressed")
    again = f"perfsuite dry-run --device=cuda {slower.case_id}"
    assert commands(slower)[0] == f"perfsuite compare --against COMMIT --dry {slower.case_id}"
    assert commands(slower)[2:] == [
        f"perfsuite baseline accept --only-counts --reason WHY {slower.case_id}",
        again,
    ]


def test_dry_runs_keep_their_network() -> None:
    dry = judged(counted.make_dry(), outcome="regressed")
    on_ports = tuple(run.replace(machine=run.machine.replace(interconnect="8xib400")) for run in dry.runs)
    dry = dry.replace(runs=on_ports)
    compare, _, _, again = commands(dry)
    network = "--interconnect 8xib400"
    assert compare == f"perfsuite compare --against COMMIT --dry {network} {dry.case_id}"
    assert again == f"perfsuite dry-run --device=cuda {network} {dry.case_id}"
    launched = dry.replace(runs=tuple(run.replace(dry=False) for run in on_ports))
    assert not any("--interconnect" in command for command in commands(launched))
    arms = (facts("main"), facts("."))
    assert f"--dry {network}" in commands(dry.replace(before=on_ports), arms)[-1]


def test_a_case_that_passed_is_only_measured_again() -> None:
    assert commands(make_result(now())) == [AGAIN]
    assert commands(BY_COUNTS.replace(excused="waived")) == [AGAIN]


@pytest.mark.parametrize(
    ("outcome", "words"), [("improved", f"--reason WHY {ID}"), ("recorded", ID)], ids=["improved", "recorded"]
)
def test_new_levels_can_be_accepted(outcome: str, words: str) -> None:
    result = judged(make_result(*[now()] * 5), outcome=outcome)
    assert commands(result) == [f"perfsuite baseline accept {words}", AGAIN]


def test_a_baseline_of_times_first_needs_five_launches() -> None:
    few = judged(SLOWER, unhealthy_launches=(2,))
    assert commands(few)[2:4] == [
        f"{AGAIN} --perf-min-launches=5",
        f"perfsuite baseline accept --reason WHY {ID}",
    ]


def test_counts_are_accepted_from_a_single_launch() -> None:
    assert len(BY_COUNTS.runs) == 1
    assert not any("--perf-min-launches" in command for command in commands(BY_COUNTS))


def test_an_injected_fault_is_not_searched() -> None:
    assert commands(BY_COUNTS.replace(runs=(now().replace(inject="slowdown=30%"),))) == [
        f"{AGAIN} --perf-inject=slowdown=30%"
    ]


def test_arms_are_compared_again_in_the_same_way() -> None:
    arms = (facts("main X=1", given={"X": "1"}), facts("."))
    compared = make_compared(speed=0.93)
    again = f"perfsuite compare --against 'main X=1' --arm . {ID}"
    assert commands(compared, arms) == [again]
    by_counts = judged(compared.replace(verdict=counted.make_counted().verdict), checks=())
    assert commands(by_counts, arms) == [again.replace(" --arm .", " --arm . --counts")]


@pytest.mark.parametrize("good", ["v1.2", "feature/x"])
def test_a_commit_is_bisected_to_what_is_checked_out(good: str) -> None:
    assert bisections(facts(good), facts(".")) == [f"perfsuite bisect --good {good} {ID}"]


def test_two_commits_are_bisected() -> None:
    expected = [f"perfsuite bisect --good v1.2 --bad feature/x {ID}"]
    assert bisections(facts("v1.2"), facts("feature/x")) == expected


NOT_BISECTED = [
    facts("NCCL_ALGO=Ring", given={"NCCL_ALGO": "Ring"}),
    facts("v1.3 X=1", given={"X": "1"}),
    facts("torch==2.13.0", packages="arms/torch"),
    facts("image:a", python="arms/image/python"),
    facts("old/bin/python", python="/old/bin/python"),
    facts("v1.3:uv.lock", lock="uv.lock", python="arms/lock/python"),
]


@pytest.mark.parametrize("arm", NOT_BISECTED, ids=lambda arm: arm.text)
def test_bisects_only_between_arms_that_are_commits(arm: ArmFacts) -> None:
    assert bisections(arm, facts(".")) == []
    assert bisections(facts("v1.2"), arm) == []


def test_uncommitted_changes_are_not_bisected() -> None:
    assert bisections(facts("v1.2"), facts(".", dirty=True)) == []
    assert bisections(facts("."), facts("v1.2")) == []
    assert not any("bisect" in command for command in commands(SLOWER, dirty=True))


def test_nothing_is_searched_outside_of_git() -> None:
    assert bisections(facts("v1.2"), facts(".", commit=None)) == []
    assert not any("COMMIT" in command for command in commands(SLOWER, commit=None))


def test_bisect_is_suggested_only_where_it_exists() -> None:
    with_bisect = commands(SLOWER)
    without = commands(SLOWER, names=("baseline", "compare"))
    assert with_bisect[1].startswith("perfsuite bisect ")
    assert without == [with_bisect[0], *with_bisect[2:]]


SUGGESTING = {
    "slower": (SLOWER, ()),
    "few launches": (judged(SLOWER, unhealthy_launches=(2,)), ()),
    "more work": (BY_COUNTS, ()),
    "dry": (judged(counted.make_dry(), outcome="regressed"), ()),
    "recorded": (judged(make_result(now()), outcome="recorded"), ()),
    "injected": (BY_COUNTS.replace(runs=(now().replace(inject="slowdown=30%"),)), ()),
    "arms": (COMPARED_SLOWER, (facts("v1.2"), facts("v1.3"))),
    "arms by counts": (
        judged(make_compared().replace(verdict=counted.make_counted().verdict), checks=()),
        (facts("v1.2"), facts(".")),
    ),
}


@pytest.mark.parametrize("name", SUGGESTING)
def test_every_suggested_command_is_parsed(name: str) -> None:
    result, arms = SUGGESTING[name]
    suggested = commands(result, arms, names=tuple(extensions.names(COMMANDS)))
    assert suggested
    for command in suggested:
        parse(command)


def parse(command: str) -> None:
    """Parse a command line with its program's parser. Unknown options raise a usage error."""
    program, *words = shlex.split(command)
    if program == "pytest":
        for word in words[1:]:
            option, _, value = word.removeprefix("--perf-").partition("=")
            BY_NAME[option].read(word, value)
        return
    assert program == "perfsuite"
    parser: Any = typer.main.get_command(app)
    while hasattr(parser, "commands"):
        parser = parser.commands[words.pop(0)]
    parser.make_context(program, words)
