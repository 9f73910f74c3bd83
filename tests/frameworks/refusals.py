"""Helpers: rows of test tables, for cases that a framework refuses before anything is launched."""

import re
from typing import Any

import pytest

from perfsuite import Case, Framework, Model, Topology
from perfsuite.case.catalog import MODELS
from perfsuite.case.hardware import Machine
from perfsuite.launch.requirements import unsupported
from tests.samples import make_case, make_gpu_machine, make_machine

CPU, H100, A100 = (
    machine.replace(nodes=8)
    for machine in (make_machine(devices=16), make_gpu_machine(), make_gpu_machine("NVIDIA A100-SXM4-80GB"))
)
TAKES = "{} supports precision {}, but the case asks for '{}'"


def row(framework: Framework, why: str | None, on: Machine = CPU, ranks: Any = 2, **changes: Any) -> Any:
    """Return a row with a case, a machine, and why the case cannot run there.

    In `why`, "..." matches any text. The case is a small Llama on `ranks` ranks of one node, or on (nodes,
    ranks on each node), with changes of the case or of the model's configuration.
    """
    fields = {name: value for name, value in changes.items() if name in Case.model_fields}
    config = {name: value for name, value in changes.items() if name not in fields}
    if config:
        fields["model"] = Model.from_config({**MODELS["llama-tiny"].config, **config}, name="odd")
    nodes, per_node = ranks if isinstance(ranks, tuple) else (1, ranks)
    usual = {"model": "llama-tiny", "hardware": ("cpu", "gpu"), "framework": framework}
    usual["topology"] = Topology(nodes=nodes, processes_per_node=per_node)
    name = f"{framework.slug()}: {why}"
    return pytest.param(make_case(**{**usual, **fields}), on, why, id=name)


def check_refusal(case: Case, machine: Machine, why: str | None) -> None:
    """Assert that a case cannot run on a machine for this reason, or that it can if `why` is None."""
    said = unsupported(case, machine)
    assert said is None if why is None else _matches(why, str(said)), said


def _matches(text: str, said: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, text.split("..."))), said) is not None
