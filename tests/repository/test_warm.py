"""Tests of which launch processes are forked from a process that has imported torch."""

import json
import os
import sys
from pathlib import Path

import pytest

from perfsuite import DDP, Framework, Script, Topology
from perfsuite.case.case import CaseFile
from perfsuite.dry.driver import _environment
from perfsuite.launch import driving
from perfsuite.launch.arm import HERE
from perfsuite.launch.job import Job
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect
from perfsuite.results.run_dir import RunDir
from tests.packages import Packages
from tests.samples import known, make_case
from tests.warm import AGENT, DRY, FIRST, VARIABLES, Kind, kind_of

DRY_RUN = [sys.executable, "-m", DRY, "directory"]
ENVIRONMENT = {**FIRST, **VARIABLES}


def test_forks_a_dry_rank_in_the_tests_environment() -> None:
    assert kind_of(DRY_RUN, ENVIRONMENT)


def test_forks_a_dry_rank_with_torchrun_variables() -> None:
    environment = _environment(make_case(), 1, HERE)
    assert environment["TORCHELASTIC_RUN_ID"]
    assert kind_of(DRY_RUN, environment)


def test_forks_a_launch_after_torch_set_its_cache() -> None:
    """torch sets the variable in a process that imports as much of torch as most tests."""
    assert kind_of(DRY_RUN, {**ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": "of the test process"})


def test_starts_afresh_for_other_torch_variables() -> None:
    assert not kind_of(DRY_RUN, {**ENVIRONMENT, "TORCH_LOGS": "dynamo"})


def kind_of_agent(directory: Path, framework: Framework) -> Kind | None:
    """Return which server forks the agent of a launch, with the variables that the driver sets for it."""
    case = make_case(framework=framework, model="llama-tiny")
    (directory / "case.json").write_text(CaseFile(case=case, device="cpu").model_dump_json())
    job = Job(run_dir=RunDir(directory), case=case, machine=detect())
    return kind_of([sys.executable, "-m", AGENT, str(directory)], driving.environment(job))


def test_forks_a_launch_with_the_drivers_variables(tmp_path: Path) -> None:
    assert kind_of_agent(tmp_path, DDP()) == "cpu"


def test_forks_a_script_that_python_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert kind_of_agent(tmp_path, Script(path=script)) == "script"


def test_forks_a_launch_with_the_packages_of_a_test(packages: Packages, tmp_path: Path) -> None:
    packages.install("perf-mine", "")
    assert kind_of_agent(tmp_path, DDP()) == "cpu"


def test_starts_a_launch_with_another_python_path_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert kind_of_agent(tmp_path, DDP()) is None


def test_starts_the_script_of_a_command_afresh(tmp_path: Path) -> None:
    assert kind_of_agent(tmp_path, Script(command=("torchrun", "train.py"))) is None


LOOKS = """
import json, os, signal, sys, threading
facts = {
    "argv": sys.argv, "path": sys.path[:2],
    "main": [__name__, __file__, vars(sys.modules["__main__"]) is globals()],
    "directory": os.getcwd(), "input": sys.stdin.read(), "threads": threading.active_count(),
    "parent": os.getppid() == int(os.environ["PERFSUITE_ANCESTOR_PID"]),
    "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    "variables": {name: os.environ[name] for name in os.environ if name[:5] not in ("PERFS", "TORCH")},
}
json.dump(facts, open(sys.argv[1], "w"))
print("said")
raise SystemExit(7)
"""


@pytest.mark.launch
def test_forked_script_sees_what_a_fresh_one_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOKS)
    facts = []
    for name, env in (("forked", {}), ("started", {"TORCH_SHOW_CPP_STACKTRACES": "0"})):
        script = Script(path=tmp_path / "train.py", arguments=("facts.json",), cwd=tmp_path, env=env)
        case = make_case(framework=script, topology=Topology(processes_per_node=1))
        run = launch_once(case, detect(), tmp_path / name)
        assert "the script ended with exit code 7" in known(run.failure).message
        assert "said" in RunDir(tmp_path / name).rank_log(0).read_text()
        facts.append(json.loads((tmp_path / "facts.json").read_text()))
    assert facts[0] == facts[1]
