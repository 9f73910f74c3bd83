"""Provide `check_framework` for tests of a framework in another package.

    from perfsuite.testing import check_framework

    def test_it_trains_as_it_says() -> None:
        check_framework(Mine(stage=2))

Imports neither torch nor pytest.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from perfsuite import documents
from perfsuite.case.case import Case, CaseFile, Topology
from perfsuite.case.framework import FrameworkOptions
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import Framework, framework_of
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect_cpu
from perfsuite.results.rank_report import FailureKind
from perfsuite.results.run import Run

__all__ = ["check_framework"]


def check_framework(framework: Framework, *, case: Case | None = None) -> Run:
    """Train with `framework` on two CPU ranks, and check everything that a framework promises.

    By default, a tiny Llama is trained for 12 steps with the same launcher as in a benchmark. If `case` is
    given, this case is trained instead, with `framework` as its framework. Returns the launch. If a promise
    is broken, raises `AssertionError` with advice. The promises are:

    - ranks find the framework by its name
    - its options survive JSON
    - ids differ if options differ
    - `unsupported`, `check`, `plan` and `dry` do not import torch
    - the clock counts every optimizer step
    - ranks observe what `expected` returns
    - the loss falls
    """
    case = _small_case(framework) if case is None else case.replace(framework=framework)
    _check_json(case)
    _check_ids(case)
    with tempfile.TemporaryDirectory(prefix="perfsuite-check-") as directory:
        _check_without_torch(case, Path(directory))
        return _checked_launch(case, Path(directory) / "launch")


def _small_case(framework: Framework) -> Case:
    return Case(
        model="llama-tiny",
        framework=framework,
        sequence_length=32,
        micro_batch=2,
        learning_rate=1e-2,
        topology=Topology(processes_per_node=2),
        hardware="cpu",
        max_warmup_steps=2,
        steps=10,
        timeout_s=300,
    )


def _check_json(case: Case) -> None:
    text = case.model_dump_json()
    try:
        back = Case.model_validate_json(text)
    except ValueError as error:
        raise AssertionError(
            f"{case.framework!r} cannot be read back from its JSON {text}, which ranks read: {error}"
        ) from error
    assert back == case, (
        f"{case.framework!r} becomes {back.framework!r} when ranks read it back from JSON: declare its "
        "options with types that survive JSON, such as tuples instead of lists"
    )


def _check_ids(case: Case) -> None:
    ids = {case.id: case.framework}
    for variant in _variants(case.framework):
        name = case.replace(framework=variant).id
        assert name not in ids or ids[name] == variant, (
            f"{ids[name]!r} and {variant!r} both have the id {name}, so one would be compared with the "
            "baseline of the other: let slug() distinguish them"
        )
        ids[name] = variant


def _variants(options: FrameworkOptions) -> Iterator[FrameworkOptions]:
    for name, info in type(options).model_fields.items():
        value = getattr(options, name)
        alternatives: list[Any] = []
        if get_origin(info.annotation) is Literal:
            alternatives = [literal for literal in get_args(info.annotation) if literal != value]
        elif isinstance(value, int | float):
            alternatives = [not value] if isinstance(value, bool) else [value + 1, value * 2]
        for alternative in alternatives:
            with contextlib.suppress(CaseError):  # this option has limits, or requires other options
                yield options.replace(**{name: alternative})


_WITHOUT_TORCH = """
import sys
from pathlib import Path
from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.frameworks.base import framework_of
from perfsuite.node.machine import detect_cpu
case = documents.read(Path(sys.argv[1]), CaseFile).case
framework = framework_of(case)
framework.unsupported(case, detect_cpu("check_framework"))
framework.check(case), framework.plan(case), framework.dry(case)
sys.exit("torch" if "torch" in sys.modules else 0)
"""


def _check_without_torch(case: Case, directory: Path) -> None:
    file = directory / "case.json"
    documents.write(file, CaseFile(case=case, device="cpu"))
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr.strip() != "torch", (
        f"{case.framework.name} imports torch when it is loaded, or in unsupported(), check(), plan() or "
        "dry(). Thousands of cases are collected without torch: import torch inside load() and build()"
    )
    assert done.returncode == 0, (
        f"{case.framework.name} cannot be loaded in a process of its own:\n{done.stderr}"
    )


def _checked_launch(case: Case, directory: Path) -> Run:
    """Launch a case on this machine's CPU, and check the launch."""
    machine = detect_cpu("check_framework runs on the CPU")
    reason = unsupported(case, machine)
    if reason is not None:
        raise AssertionError(
            f"{case.framework.name} cannot run the case of this check: {reason}. "
            "Give a case that it can run on a CPU: check_framework(framework, case=...)"
        )
    run = launch_once(case, machine, directory)
    _check_run(case, run)
    return run


_ADVICE: Mapping[FailureKind, str] = {
    "ranks_disagree": "run(steps) must return one loss per step. perfsuite counts the steps of the first "
    "torch optimizer that is used: the count must equal `steps`. Without a torch optimizer, call "
    "clock.boundary() after each step",
    "mismatch": "correct what build() trains, or what expected() returns",
    "loss": "run(steps) must return the loss of each step in order, as seen on this rank",
}


def _check_run(case: Case, run: Run) -> None:
    name = case.framework.name
    failure = run.failure
    if failure is not None:
        advice = f". {_ADVICE[failure.kind]}" if failure.kind in _ADVICE else ""
        detail = f"\n{failure.traceback}" if failure.traceback else ""
        problem = f"{failure.kind}: {failure.message}{advice}{detail}"
        raise AssertionError(f"the launch with {name} failed: {problem}")
    if run.observed is not None and "wrapper" not in framework_of(case).expected(case):
        wrapper = run.observed.settings["wrapper"]
        raise AssertionError(
            f"expected() of {name} does not return the wrapper, so nobody would notice if the library fell "
            f"back to another wrapper: return {{'wrapper': {wrapper!r}}} if that is what should have run"
        )
