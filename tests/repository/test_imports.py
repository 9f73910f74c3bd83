"""Tests of what import-linter (`pyproject.toml`) cannot see: what an import loads, and where files are."""

import importlib
import tomllib
from pathlib import Path

import pytest

import perfsuite
from perfsuite.case import torch_build
from tests.processes import python

PACKAGE = Path(perfsuite.__file__).parent
TESTS = Path(__file__).parents[1]
FILES = {
    ".".join(("perfsuite", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}
"""All modules of perfsuite with their files."""

WORKER_ONLY = (
    "perfsuite.dry.attention",
    "perfsuite.dry.compilation",
    "perfsuite.dry.cuda",
    "perfsuite.dry.decisions",
    "perfsuite.dry.generation",
    "perfsuite.dry.operators",
    "perfsuite.dry.program",
    "perfsuite.dry.rank",
    "perfsuite.dry.script",
    "perfsuite.dry.storages",
    "perfsuite.dry.streams",
    "perfsuite.dry.values",
    "perfsuite.frameworks.common.",
    "perfsuite.frameworks.nanotron.compat",
    "perfsuite.frameworks.nanotron.trainer",
    "perfsuite.frameworks.torchtitan.configuration",
    "perfsuite.frameworks.torchtitan.llama",
    "perfsuite.frameworks.torchtitan.pretend",
    "perfsuite.frameworks.torchtitan.trainer",
    "perfsuite.node.preload",
    "perfsuite.worker.",
)
"""Prefixes of the names of modules that may load torch when they are imported."""

NO_TEST_FILE = {
    "perfsuite.cli.checks": "run by cli/test_doctor.py and cli/test_selftest.py",
    "perfsuite.doctor.rows": "its rows are read by the tests of the other modules of doctor",
    "perfsuite.session.by_command": "run by cli/test_compare.py and cli/test_dry_run.py",
    "perfsuite.session.comparison": "run by cli/test_compare.py",
    "perfsuite.session.review.since": "run by cli/test_baseline.py and session/review/test_counts.py",
    "perfsuite.launch.base": "an abstract class: launch/test_launchers.py and others have subclasses",
    "perfsuite.launch.job": "plain data: launch/test_local.py and others launch it",
    "perfsuite.plugin.ending": "run by plugin/test_sessions.py and plugin/test_resume.py, which run pytest",
    "perfsuite.plugin.terminal": "run by plugin/test_sessions.py and others, which run pytest",
    **dict.fromkeys(
        (f"perfsuite.frameworks.common.{name}" for name in ("llama", "sharding")),
        "what they refuse is in frameworks/test_refusals.py",
    ),
    "perfsuite.session.outputs": "run by tests of cli/test_compare.py and plugin/test_sessions.py",
    "perfsuite.plugin.settings": "run by plugin/test_options.py, which runs pytest",
    "perfsuite.session.mode": "its subclasses are tested",
    "perfsuite.worker.probes.doctor_facts": "fields without code: doctor/test_torch_checks.py makes them",
    "perfsuite.worker.startup.sitecustomize": "run by frameworks/test_script.py",
}
"""Modules without a test file at the mirrored place, with the reason or the place of their tests."""


def test_the_first_glance_is_short() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert len(entries) <= 24, sorted(entries)


def test_developer_page_shows_rooms_and_floors() -> None:
    page = (TESTS.parent / "CONTRIBUTING.md").read_text()
    rooms = [folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()]
    assert not [room for room in rooms if f"`perfsuite/{room}/`" not in page]
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]
    contracts = settings["importlinter"]["contracts"]
    floors = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    shown = " ".join(page.split("```text\nfeatures > ")[1].split("```")[0].split())
    assert f"features > {shown}" == " > ".join(floors).replace(" | ", ", ")


def test_developer_page_shows_a_ranks_rooms() -> None:
    page = (TESTS.parent / "CONTRIBUTING.md").read_text()
    rooms = [file.parent.name for file in (PACKAGE / "worker").glob("*/__init__.py")]
    assert not [room for room in rooms if f"`{room}/`" not in page]


@pytest.mark.parametrize("module", [name for name, file in FILES.items() if "__" not in file.name])
def test_tests_mirror_the_folders(module: str) -> None:
    _, *folders, name = module.split(".")
    has_file = TESTS.joinpath(*folders, f"test_{name}.py").exists()
    assert has_file or module in NO_TEST_FILE, "give the module its own test file"
    assert not (has_file and module in NO_TEST_FILE), "remove the module from NO_TEST_FILE"


def test_keeps_no_reason_for_a_deleted_module() -> None:
    assert not NO_TEST_FILE.keys() - FILES.keys()


IMPORT_ALL = """
import contextlib, importlib, sys, warnings
for library in "jinja2 psutil pydantic pytest rich torch torchtitan.trainer typer yaml".split():
    with contextlib.suppress(ImportError):
        importlib.import_module(library)
warnings.simplefilter("error")
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


@pytest.mark.launch
def test_imports_every_module_without_a_warning() -> None:
    """Each module is imported alone. Circular imports are left to a contract of import-linter."""
    modules = [module for module in FILES if not module.endswith("__main__")]
    titan = "perfsuite.frameworks.torchtitan"
    if titan in modules and torch_build.release() < importlib.import_module(titan).MIN_TORCH:
        for name in ("configuration", "trainer"):  # without them, torchtitan itself cannot be imported
            modules.remove(f"{titan}.{name}")
    python(IMPORT_ALL, *modules)


def modules_after(code: str) -> set[str]:
    return set(python(f"{code}\nimport sys; print(*sys.modules)").split())


@pytest.mark.launch
def test_the_driver_side_never_loads_torch() -> None:
    modules = [module for module in FILES if not module.startswith(WORKER_ONLY) and "__" not in module]
    modules += ["perfsuite.worker.leash", "perfsuite.worker.main"]
    loaded = modules_after(f"import {', '.join(modules)}")
    assert "perfsuite.plugin" in loaded
    assert not loaded & {"torch", "transformers", "accelerate", "numpy", "yaml"}


@pytest.mark.launch
def test_worker_loads_neither_pytest_nor_pretend() -> None:
    loaded = modules_after(
        "import perfsuite.worker.main, perfsuite.node.agent, perfsuite.node.preload\n"
        "import perfsuite.worker.observation.observe, perfsuite.worker.counting.steps"
    )
    assert "torch" in loaded
    assert not loaded & {"pytest", "_pytest", "perfsuite.plugin"}
    assert not {module for module in loaded if module.startswith("perfsuite.dry")}
