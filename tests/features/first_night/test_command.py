"""Tests of `perfsuite first-night`. Its steps are fake, except in the launch tests."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.doctor.rows import Row, failed, passed, unknown
from perfsuite.features.first_night import command
from perfsuite.features.first_night.night import Night
from perfsuite.features.first_night.record import FILE, FirstNight
from perfsuite.features.first_night.steps import NAMES, STEPS, Step
from tests.cli import commands
from tests.cli.commands import error_of, rows
from tests.doc_pages import ROOT
from tests.features.first_night.nights import make_step
from tests.processes import read_until
from tests.samples import make_gpu_machine, make_machine

OUT = Path("first-night")
GPUS = "0,1,2,3,4,5,6,7"
run = partial(commands.run, "first-night")


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "launch" not in request.keywords:
        monkeypatch.setattr(command, "detect", make_machine)


def stand_in(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> list[str]:
    """Replace each step with a fake step, or with the step in `changed`.

    Returns a list to which each step that begins adds its name.
    """
    begun: list[str] = []

    def made(name: str) -> Step:
        step = changed.get(name) or make_step(name)

        def run(night: Any) -> Any:
            begun.append(name)
            yield from step.run(night)

        return make_step(name, run=run, replaces_rows=step.replaces_rows)

    monkeypatch.setattr(command, "STEPS", [made(name) for name in NAMES])
    return begun


def test_runs_every_step_and_writes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = stand_in(monkeypatch)
    said = run()
    assert begun == [*NAMES]
    assert "pass     check of machine" in said.stdout
    assert "page: first-night/first-night.md" in said.stderr
    assert (OUT / "first-night.md").read_text().startswith("# First night\n")
    assert documents.read(OUT / FILE, FirstNight).size == "tiny"


@pytest.mark.parametrize(
    ("row", "status"), [(passed("a", ""), 0), (unknown("a", ""), 3), (failed("a", ""), 1)]
)
def test_exit_status_is_the_worst_checks(monkeypatch: pytest.MonkeyPatch, row: Row, status: int) -> None:
    stand_in(monkeypatch, spread=make_step("spread", row))
    run(status=status)


def test_goes_on_where_it_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = stand_in(monkeypatch, faults=make_step("faults", error=SystemExit(143)))
    run(status=143)
    assert begun == ["machine", "selftest", "spread", "faults"]
    page = (OUT / "first-night.md").read_text()
    assert "not run: the step was interrupted" in page
    assert "Not finished: faults, frameworks, container, cores, cases." in page
    begun = stand_in(monkeypatch)
    run()
    assert begun == ["faults", "frameworks", "container", "cores", "cases"]
    begun = stand_in(monkeypatch)
    run()
    assert begun == []
    run("spread", "machine")
    assert begun == ["machine", "spread"], "named steps are repeated, in their order"


def test_a_refused_repetition_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    run()
    refused = run("spread", "--budget", "1s", status=3)
    assert "the time is used up" in refused.stdout
    assert "the time is used up" in run("spread", "--budget", "1s", "--json", status=3).stdout
    result = documents.read(OUT / FILE, FirstNight).of("spread")
    assert result is not None
    assert result.is_complete


def test_a_plan_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = run("--plan").stdout
    assert "about 32 min on cpu-test-2c with tiny training" in said
    assert not OUT.exists()
    planned = rows(run("--plan", "--json", "spread").stdout)
    assert [row["step"] for row in planned] == [*NAMES]
    assert [row["state"] for row in planned if row["step"] == "spread"] == ["to run"]
    stand_in(monkeypatch)
    run("machine")
    monkeypatch.setattr(command, "STEPS", STEPS)
    states = [row["state"] for row in rows(run("--plan", "--json").stdout)]
    assert states == ["complete", *["to run"] * 7]
    monkeypatch.setattr(command, "detect", make_gpu_machine)
    assert (
        "(an estimate for eight GPUs) on 8 x h100-80gb-sxm with full training"
        in run("--plan", "--out", "other").stdout
    )


def test_a_simulated_night_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    said = "simulated on CPUs: nothing here says anything about GPUs"
    assert run("--size", "simulated").stderr.startswith(f"perfsuite first-night: {said}\n")
    assert said in run("--size", "simulated", "--plan").stdout
    assert said not in run("--out", "other").stderr


def test_a_plan_says_how_many_cases_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "number_of_cases", lambda night: 42)
    planned = rows(run("--size", "simulated", "--plan", "--json").stdout)
    (row,) = [row for row in planned if row["step"] == "cases"]
    assert (row["expected_min"], row["most_min"]) == (63, None)
    said = run("--size", "simulated", "--plan", "--cases", "mine", "--budget", "34min").stdout
    said = " ".join(said.split())
    assert "~63 the budget to run" in said
    assert "about 68 min on cpu-test-2c with simulated training" in said
    assert "launches 42 cases in mine for real, whatever the size: about 1.5 min for each" in said
    assert "About 19 of them fit into --budget; the same command continues with the others" in said
    assert "fit into" not in run("--size", "simulated", "--plan").stdout
    assert "for real" not in run("--size", "simulated", "--plan", "spread").stdout


def test_a_plan_counts_only_the_cases_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    continued: list[bool] = []

    def number_of_cases(night: Night) -> int:
        continued.append(night.is_continued)
        return 1

    monkeypatch.setattr(command, "number_of_cases", number_of_cases)
    run("--plan")
    stand_in(monkeypatch)
    run("cases")
    run("--plan", "cases")
    assert continued == [True, False]


def test_a_replaced_row_does_not_set_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step("cases", unknown("a", "not yet"), passed("a", "fit"), replaces_rows=True)
    stand_in(monkeypatch, cases=step)
    run(status=0)


def test_a_plan_never_takes_0_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    said = run("--size", "simulated", "--plan", "spread").stdout
    assert "less than a minute on cpu-test-2c with simulated training" in said
    stand_in(monkeypatch)
    run()
    assert "nothing to run: every step is complete" in run("--plan").stdout


def test_json_has_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, spread=make_step("spread", failed("noise", "3%", "be quiet")))
    said = rows(run("--json", status=1).stdout)
    expected = {"step": "spread", "check": "noise", "status": "fail", "found": "3%", "advice": "be quiet"}
    assert expected in said
    assert len(said) == len(NAMES)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("spred", "there is no step 'spred'. Did you mean 'spread'? The steps are machine, selftest, "),
        ("--budget soon", "--budget=soon: give a time above 0 in s, min or h"),
        ("--wait-quiet no", "--wait-quiet=no: give a whole number"),
        ("--out .", "--out .: it exists but contains no first night. Give a new directory"),
    ],
)
def test_what_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch, words: str, said: str) -> None:
    begun = stand_in(monkeypatch)
    Path("notes.txt").touch()
    assert said in error_of("first-night", *words.split())
    assert begun == []


def test_cases_between_its_own_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = stand_in(monkeypatch)
    mine = Path("steps/cases/test_mine.py")
    mine.parent.mkdir(parents=True)
    mine.touch()
    said = error_of("first-night", "--out", ".", "--cases", "steps/cases")
    assert "--cases steps/cases is in steps, whose files first-night removes. Move your cases" in said
    assert (begun, mine.exists()) == ([], True)


def started(*words: str, **variables: str) -> subprocess.Popen[str]:
    command_words = [sys.executable, "-m", "perfsuite.cli", "first-night", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command_words, env={**os.environ, **variables}, **pipes)


@pytest.mark.nightly
@pytest.mark.launch
@pytest.mark.smoke("fake")
def test_simulated_training_takes_every_step() -> None:
    Path("bench_cases").mkdir()
    Path("bench_cases/test_a.py").write_text(
        "import pytest\n"
        "from perfsuite import Case, Fake, Topology\n"
        "CASE = Case(model='llama-tiny', framework=Fake(), sequence_length=64, micro_batch=4,\n"
        "    topology=Topology(processes_per_node=2), hardware='cpu', max_warmup_steps=5, steps=20)\n"
        "@pytest.mark.parametrize('case', [CASE])\n"
        "def test_a(bench, case):\n"
        "    bench(case)\n"
    )
    process = started("--size", "simulated", "--wait-quiet", "0", CUDA_VISIBLE_DEVICES="")
    output, _ = process.communicate(timeout=600)
    record = documents.read(OUT / FILE, FirstNight)
    assert all(result.is_complete for result in record.results), output
    assert [result.step for result in record.results] == [*NAMES]
    found = {row.check: row for result in record.results for row in result.rows}
    assert [row for row in found.values() if row.status == "fail"] == [], output
    assert process.returncode == 3, "a CPU has no topology"
    for check in ("inject slowdown=60%", "noise", "inject hang", "fake", "one thread"):
        assert found[check].status == "pass", found[check]
    (fit,) = [row for row in found.values() if row.found.startswith("fit for a baseline")]
    assert fit.check.startswith("fake-llama-tiny")


@pytest.mark.launch
def test_an_allocation_that_expires_leaves_the_page() -> None:
    process = started("machine", "selftest", "--size", "simulated", CUDA_VISIBLE_DEVICES="")
    read_until("inject slowdown", process.stdout, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    page = (OUT / "first-night.md").read_text()
    assert "| baseline | pass |" in page
    assert "not run: the step was interrupted" in page
    assert json.loads((OUT / FILE).read_text())["results"][0]["is_complete"]


@pytest.mark.launch
def test_torch_for_another_driver_ends_every_later_step(tmp_path: Path) -> None:
    """NVML finds eight GPUs, but torch finds none.

    This happens if the driver is too old for torch.
    """
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\n"
        "from tests.node.fake_nvml import Nvml\n"
        "idle = {'nvmlDeviceGetName': ('NVIDIA H100 80GB HBM3',),\n"
        "        'nvmlDeviceGetComputeRunningProcesses': ([],)}\n"
        "sys.modules['pynvml'] = Nvml(*[idle] * 8)\n"
    )
    process = started("--size", "full", "--wait-quiet", "0", PYTHONPATH=str(site), CUDA_VISIBLE_DEVICES=GPUS)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1, output
    record = documents.read(OUT / FILE, FirstNight)
    (spread,) = [result for result in record.results if result.step == "spread"]
    (row,) = spread.rows
    assert row.found.startswith("not run: "), output
    assert not spread.is_complete
