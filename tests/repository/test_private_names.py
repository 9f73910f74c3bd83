"""Tests that private names of other packages are used only in the modules for them, or have a reason here."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import perfsuite
from perfsuite.frameworks.common.private import NAMES
from tests.frameworks.removable import DELETED, needs_every_framework

PACKAGE = Path(perfsuite.__file__).parent
MODULE = "frameworks/common/private.py"

ALLOWED = {
    MODULE: "the module for torch, accelerate and transformers",
    "plugin/private.py": "the module for pytest",
    "frameworks/deepspeed/engine.py": "of DeepSpeed; without it, observation/engines.py refuses the launch",
    "worker/spans/events.py": "RECOGNISED is a table of places; a note names one that is missing",
}
"""Files and folders that may use any private name."""
OF_DELETED = tuple(f"frameworks/{name}/" for name in DELETED)

ALLOWED_NAMES = {
    # Names of Python
    **dict.fromkeys(("_asdict", "_replace"), "documented methods of named tuples"),
    **dict.fromkeys(("_exit", "_getframe", "_current_frames"), "documented functions of os and sys"),
    "_thread": "worker/flight_recorder.py: a documented module; its threads are not listed by `threading`",
    "_DummyThread": "clock/timers.py: a thread that Python did not start",
    "_bootstrap": "clock/startup_clock.py: without it, the time of imports is not known",
    "_find_and_load": "clock/startup_clock.py: the same",
    "_initializing": "hooks/imports.py: of a module's spec; without it, a module counts as loaded",
    "_forkserver": "node/ranks.py: without it, the message about a dead fork server is shorter",
    "_forkserver_pid": "node/ranks.py: the same",
    "_resource_tracker": "node/agent.py: without it, the tracker is ended with the job",
    "_pid": "node/agent.py: the same",
    "_resource_sharer": "counting/loader_workers.py: without it, objects that a worker keeps are unknown",
    "_cache": "counting/loader_workers.py: the same",
    "_slotnames": "dry/values.py: of copyreg, as torch.utils.swap_tensors uses it",
    # Names of torch
    "_torchdynamo_inline": "hooks/calls.py only sets it; hooks/test_dynamo.py notices if it has no effect",
    "_HYBRID_SHARD_ZERO2": "a documented member of ShardingStrategy",
    **dict.fromkeys(("_fused_rms_norm", "_fused_rms_norm_backward"), "dry/cuda.py: operators"),
    **dict.fromkeys(("_to_copy", "_unsafe_view"), "dry/values.py: operators"),
    **dict.fromkeys(
        ("_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
        "counting/counter.py: operators, where torch has them",
    ),
    # Names of perfsuite
    "_base": "worker/flight_recorder.py: the end of names of collectives in torch's flight recorder",
    "_pattern": "case/case.py: the end of names of fields",
}
"""Names that any file may use, each with its reason."""

OF_FRAMEWORKS = {
    "nanotron": {"_contiguous_fp32_grad_buffer": "of nanotron 0.4, the only supported version"},
    "torchtitan": {
        **dict.fromkeys(
            ("_EMBEDDING_SKIP_INIT", "_build_llama3_layers", "_output_linear_init", "_owner"),
            "of torchtitan 0.3, the only supported version",
        ),
        "_dispatch_token_exchange": "replaced by `patches`, which says if it is gone",
        "_degree": "configuration.py: the end of names of fields",
    },
}
"""Names that any file may use unless the folder of the framework was deleted."""
for _framework in OF_FRAMEWORKS.keys() - {*DELETED}:
    ALLOWED_NAMES.update(OF_FRAMEWORKS[_framework])

OPERATORS = re.compile(r"(aten|torch\.ops|c10d|_c10d_functional(_autograd)?|_dtensor|prim|profiler)\.")
"""Prefixes of the names of torch's operators. These names are data in traces and counts. A separate test
(`tests/worker/counting/test_counter.py`) notices when an operator is gone."""
NAME = re.compile(r"\w+(\.\w+)*")


def is_private(part: str) -> bool:
    return re.match("_[A-Za-z]", part) is not None


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the private names that a file uses and does not define, each with its line."""
    own = defined(tree)
    nodes = [*ast.walk(tree)]
    of_texts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    node: Any
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("perfsuite"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and not of_itself(node) and node.attr not in own:
            names = [] if OPERATORS.match(ast.unparse(node)) else [node.attr]
        elif isinstance(node, ast.Constant) and id(node) not in of_texts:
            names = parts_of(node.value)
        yield from ((node.lineno, name) for name in names if is_private(name))


def defined(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, variables, attributes of its own objects."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node):
            names.add(node.attr)
    return names


def parts_of(value: object) -> list[str]:
    """Return the parts between the dots of a text if the text is a name in another package."""
    if not isinstance(value, str) or not NAME.fullmatch(value) or OPERATORS.match(value):
        return []
    return [] if value in functions() else value.split(".")


def of_itself(node: ast.Attribute) -> bool:
    return ast.unparse(node.value) in ("self", "cls", "super()")


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules of perfsuite, by path."""
    files = PACKAGE.rglob("*.py")
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text()) for file in files}


@pytest.fixture(scope="module", autouse=True)
def _trees_are_freed() -> Iterator[None]:
    """Free the trees after the last test here. Full collections would visit their 600,000 objects."""
    yield
    trees.cache_clear()


@cache
def all_uses() -> tuple[tuple[str, int, str], ...]:
    """Return the file, line and name of every use."""
    return tuple((file, line, name) for file, tree in trees().items() for line, name in uses(tree))


@cache
def functions() -> frozenset[str]:
    """Return the names of all functions of perfsuite. A dry run replaces some of them by name."""
    return frozenset(
        node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.FunctionDef)
    )


def test_private_names_are_in_one_module() -> None:
    others = [
        f"{file}:{line}: {name}"
        for file, line, name in all_uses()
        if not file.startswith(tuple(ALLOWED)) and name not in ALLOWED_NAMES
    ]
    assert others == [], f"add them to {MODULE}, with their versions and what is lost without them"


@pytest.mark.parametrize("place", [place for place in ALLOWED if not place.startswith(OF_DELETED)])
def test_every_allowed_place_needs_to_be_allowed(place: str) -> None:
    assert [name for file, _, name in all_uses() if file.startswith(place)]


def test_every_allowed_name_is_used() -> None:
    used = {name for _, _, name in all_uses()}
    assert ALLOWED_NAMES.keys() - used == set()


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch._guards import active_fake_mode", ["_guards"]),
        ("import torch._dynamo", ["_dynamo"]),
        ("from torch import _C", ["_C"]),
        ("parameters = module._parameters", ["_parameters"]),
        ("getattr(tensor, '_local_tensor', tensor)", ["_local_tensor"]),
        ("sys.modules.get('torch._dynamo.utils')", ["_dynamo"]),
        ("self._parameters", []),
        ("self._parts = []\nclock._parts", []),
        ("def _own(): ...\nother._own", []),
        ("from perfsuite.worker import _own", []),
        ("aten._scaled_mm, torch.ops.aten._scaled_mm, 'aten._to_copy'", []),
        ("'a sentence about _guards', '__init__', tensor.__dict__", []),
    ],
)
def test_finds_private_names_of_others(code: str, names: list[str]) -> None:
    assert [name for _, name in uses(ast.parse(code))] == names


def looked_up(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file takes from the module `MODULE`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "perfsuite.frameworks.common.private":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "private":
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@needs_every_framework  # some entries are for one framework
def test_every_entry_of_the_module_is_used() -> None:
    others = [tree for file, tree in trees().items() if file != MODULE]
    used = {name for tree in others for name in looked_up(tree)}
    assert NAMES.keys() - used - {"local_tensor"} == set(), "`shard_of` uses local_tensor"


def test_every_imported_entry_exists() -> None:
    taken = {
        alias.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "perfsuite.frameworks.common.private"
        for alias in node.names
    }
    assert taken - NAMES.keys() == {"shard_of"}
