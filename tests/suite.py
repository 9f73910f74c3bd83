"""The case files of the fixture `suite` of `tests/conftest.py`, and a file with any cases."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

# pytester unloads modules that its sessions import, except those loaded before. So these are loaded only
# once.
import perfsuite.frameworks.fake
import perfsuite.frameworks.fsdp
import perfsuite.frameworks.script
import perfsuite.report.html.page
import perfsuite.report.markdown  # noqa: F401
from perfsuite.case.case import Case
from perfsuite.launch.base import Launcher
from perfsuite.plugin.collection import SESSION
from perfsuite.session.session import Session

FAKE = """
    import pytest
    from perfsuite import DDP, FSDP, Case, Fake, Script, Topology

    FAKE = Case(model="llama-tiny", framework=Fake(), sequence_length=64, micro_batch=4,
                topology=Topology(processes_per_node=2), hardware="cpu", timeout_s=60)
"""
CASES = f"""{FAKE}
    A100 = FAKE.replace(hardware="a100-80gb", micro_batch=8)

    @pytest.mark.parametrize("case", [FAKE, A100])
    def test_it(bench, case):
        bench(case)
"""
ID = "fake-llama-tiny-s64-b4-fp32-1x2"
"""The id of `FAKE`."""
OTHER = """
    @pytest.mark.parametrize("case", [FAKE])
    def test_other(bench, case):
        bench(case)
"""
"""Another test, which follows those of `CASES`."""
MEASURED = """
import pytest
from perfsuite import Case

@pytest.mark.parametrize("case", [Case.model_validate_json(text) for text in {texts}])
def test_it(bench, case):
    bench(case)
"""


FAKE_DRY_RUNS = """
    from perfsuite.plugin.collection import SESSION
    from tests.session.making import DryRuns

    def pytest_sessionstart(session):
        session.config.stash[SESSION].mode.dry_run = DryRuns()
"""
"""A `conftest.py` that replaces the dry runs of `--perf-dry`, also in processes of pytest-xdist."""


class OnSession:
    """A plugin of pytest that changes the session of perfsuite before any case is collected."""

    def __init__(self, change: Callable[[Session], None]) -> None:
        self._change = change

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._change(session.config.stash[SESSION])


def launching_with(launcher: Launcher) -> OnSession:
    """Return a plugin that makes a session use this launcher."""

    def change(session: Session) -> None:
        session.setup.host.launcher = launcher

    return OnSession(change)


def measuring(*cases: Case) -> str:
    """Return the content of a test file that measures these cases."""
    return MEASURED.format(texts=[case.model_dump_json() for case in cases])


def waiver(
    *, case: str = "fake-*", metric: str = "tokens/s", tolerated: str, until: str = "2999-12-31"
) -> str:
    """Return the content of a `perf-waivers.toml` with one waiver."""
    kept = f'case = "{case}"\nmetric = "{metric}"\ntolerated = "{tolerated}"\nuntil = {until}\n'
    return f'[[waiver]]\n{kept}issue = "https://example.org/1"\nowner = "@me"\n'


def write_cases(suite: pytest.Pytester, cases: str = "[FAKE]", body: str = "bench(case)") -> None:
    """Make the suite measure other cases than `CASES`, or measure in a test with another body."""
    suite.makepyfile(test_cases=CASES.replace("[FAKE, A100]", cases).replace("bench(case)", body))


def batches(*sizes: int) -> str:
    """Return variants of `FAKE` with these micro-batches, for `write_cases`."""
    return f"[FAKE.replace(micro_batch=size) for size in {sizes}]"


def local_baseline(suite: pytest.Pytester) -> Path:
    (file,) = suite.path.glob(".perfsuite/baselines/*/*.json")
    return file


def run(
    suite: pytest.Pytester, *args: str | Path, status: int = 0, plugins: Sequence[object] = ()
) -> pytest.RunResult:
    """Run pytest with plugins. It must end with this status. Return its result."""
    result = suite.runpytest(*args, plugins=plugins)
    assert result.ret == status, result.ret
    return result


def run_cpu(
    suite: pytest.Pytester, *args: str, status: int = 0, plugins: Sequence[object] = ()
) -> pytest.RunResult:
    """Run pytest with plugins on the cases for a CPU. It must end with this status."""
    return run(suite, "-m", "cpu", "--strict-markers", *args, status=status, plugins=plugins)


def read_json(suite: pytest.Pytester, name: str = "out.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((suite.path / name).read_text())
    return content


def read_report(suite: pytest.Pytester) -> tuple[str, str]:
    """Return the page and the summary of a report in `out`."""
    page, summary = ((suite.path / "out" / name).read_text() for name in ("index.html", "summary.md"))
    return page, summary


def read_junit(suite: pytest.Pytester) -> ElementTree.Element:
    """Return the only case in `j.xml`."""
    (case,) = ElementTree.parse(suite.path / "j.xml").iter("testcase")
    return case
