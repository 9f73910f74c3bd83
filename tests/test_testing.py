"""Tests that `check_framework` finds each broken promise and says what to do."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

import perfsuite.testing
from perfsuite.case.case import Case
from perfsuite.errors import CaseError
from perfsuite.frameworks import Framework
from perfsuite.frameworks.fake import Fake
from perfsuite.frameworks.script import Script
from perfsuite.results.rank_report import Observed
from perfsuite.testing import check_framework
from tests.packages import MINE, Packages
from tests.samples import make_case, make_run


@pytest.fixture
def mine(packages: Packages) -> Any:
    """Return a function that adds `body` to the class `Mine`, installs it, and returns an instance of it."""

    def install(body: str) -> Framework:
        packages.install("perf-mine", MINE + body, frameworks="mine = perf_mine:Mine")
        framework = make_case(framework="mine").framework
        assert isinstance(framework, Framework)
        return framework

    return install


@pytest.mark.launch
@pytest.mark.usefixtures("simulated")
def test_a_framework_that_keeps_its_promises(mine: Any) -> None:
    run = check_framework(mine("    level: int = 1\n"), case=make_case(steps=15))
    assert len(run.step_s) == len(run.loss) == 20
    assert run.case.framework.name == "mine"


def test_a_class_that_ranks_do_not_find() -> None:
    class Nowhere(Fake):
        name: ClassVar[str] = "nowhere"

    with pytest.raises(CaseError, match=r"Nowhere is defined in tests\.test_testing, but ranks"):
        check_framework(Nowhere())


SHARED_ID = """
    stage: int = 1

    def slug(self) -> str:
        return self.name
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "    seen: Any = (1, 2)\n",
            r"becomes Mine\(.*\[1, 2\].* when ranks read it back from JSON.*such as tuples",
        ),
        (SHARED_ID, r"both have the id mine-llama-tiny-.*let slug\(\) distinguish"),
    ],
)
def test_refuses_options_lost_in_json_or_in_ids(mine: Any, body: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_framework(mine(body))


@pytest.mark.launch
def test_torch_imported_too_early(mine: Any) -> None:
    body = """
    def plan(self, case: Any) -> LaunchPlan:
        import torch
        return LaunchPlan(needs_torch=False)
"""
    with pytest.raises(
        AssertionError, match=r"mine imports torch when .* torch inside load\(\) and build\(\)"
    ):
        check_framework(mine(body))


@pytest.mark.launch
def test_shows_errors_of_a_subprocess(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = mine("")
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(
        AssertionError, match=r"(?s)mine cannot be loaded in a process of its own:\n.*perf-mine"
    ):
        check_framework(framework)


def checked_launch(framework: Framework, directory: Path) -> None:
    """Make the launch of `check_framework`, without the checks that start other processes."""
    perfsuite.testing._checked_launch(perfsuite.testing._small_case(framework), directory / "launch")


def test_a_case_that_it_cannot_run(mine: Any, tmp_path: Path) -> None:
    body = """
    def unsupported(self, case: Any, machine: Any) -> str:
        return "it wants 8 GPUs"
"""
    with pytest.raises(AssertionError, match=r"mine cannot run .*: it wants 8 GPUs\. Give a case that it"):
        checked_launch(mine(body), tmp_path)


BUILD = """
    def build(self, case: Any, ranks: Any, clock: Any) -> Any:
        whole = super().build(case, ranks, clock)
        return Workload(run=lambda steps: {run}, data_parallel=ranks.world_size, memory=whole.memory)
"""


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("run", "said"),
    [
        (
            "whole.run(steps - 1)",
            r"12 losses were requested, but 11 were recorded\. run\(steps\) must return",
        ),
        (
            "whole.run(steps + 1)[:steps]",
            r"12 steps .*, but 13 were taken\. .* call clock\.boundary\(\) after",
        ),
        (
            "whole.run(steps)[1:]",
            r"12 losses .*, but 11 were recorded\. run\(steps\) must return one loss per",
        ),
        ("whole.run(steps)[::-1]", r"mine failed: loss: the loss does not fall.* of each step in order"),
        ("1 / 0", r"the launch with mine failed: crash: ZeroDivisionError: .*\nTraceback"),
    ],
)
def test_a_broken_run(mine: Any, tmp_path: Path, run: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        checked_launch(mine(BUILD.format(run=run)), tmp_path)


def test_an_expectation_that_says_nothing() -> None:
    case: Case = make_case()
    observed = Observed(settings={"wrapper": "FSDPModule"}, environment={})
    run = make_run(case=case, observed=observed, step_s=(0.1,) * 25)
    with pytest.raises(
        AssertionError, match=r"expected\(\) of fake does not return the wrapper.*\{'wrapper': 'FSDPModule'\}"
    ):
        perfsuite.testing._check_run(case, run)


def test_options_are_changed_one_by_one() -> None:
    variants = list(perfsuite.testing._variants(Script(path="a.py")))
    assert Script(path="a.py", loss="falls") not in variants  # `loss` can also be None
    assert Script(path="a.py", tokens="vary") in variants
    assert Script(path="a.py", replicas="differ") in variants
    assert Fake(memory_mb=200) in list(perfsuite.testing._variants(Fake()))
