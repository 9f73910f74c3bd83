"""Tests of `perfsuite first-night`. Its steps are fake, except those that the command line starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite import __version__, documents
from perfsuite.case.case import CollectedTest, Topology
from perfsuite.doctor.rows import Row, failed, passed, unknown
from perfsuite.features.first_night.command import carry_out, chosen, plan_total
from perfsuite.features.first_night.record import FILE, FirstNight, StepResult, resumed
from perfsuite.features.first_night.sessions import store_in
from perfsuite.features.first_night.steps import NAMES, Step
from perfsuite.node.machine import detect
from tests.cli import commands
from tests.cli.commands import error_of, rows
from tests.doc_pages import ROOT
from tests.features.first_night.nights import (
    collects,
    make_night,
    make_record,
    make_result,
    make_step,
    measurement,
)
from tests.processes import read_until
from tests.samples import make_case, make_gpu_machine, make_session_file

OUT = Path("first-night")
GPUS = "0,1,2,3,4,5,6,7"
NO_CASES = ("cases", "--cases", "nowhere")  # the one step that ends at once, without a result
run = partial(commands.run, "first-night")


def stand_ins(begun: list[str], **changed: Step) -> list[Step]:
    """Return a fake step for each step, or the step in `changed`. Each adds its name to `begun`."""

    def made(name: str) -> Step:
        step = changed.get(name) or make_step(name)

        def run(night: Any) -> Any:
            begun.append(name)
            yield from step.run(night)

        return make_step(name, run=run, replaces_rows=step.replaces_rows)

    return [made(name) for name in NAMES]


def carried_out(steps: Sequence[Step], *names: str, seconds: float = 7200.0, as_json: bool = False) -> int:
    """Run the named steps, or continue the night in `OUT`. Returns the exit status."""
    record = resumed(OUT, make_record())
    night = make_night(size="tiny", out=OUT)
    return carry_out(night, record, chosen(steps, record, names), seconds, as_json=as_json)


def write_record(*results: StepResult) -> None:
    """Write the record of a night on this machine, which the command can continue."""
    documents.write(OUT / FILE, make_record(*results, machine=detect(), perfsuite=__version__))


def one_core_cases(number: int) -> list[CollectedTest]:
    """Return the tests of cases that run on any machine."""
    one_core = Topology(processes_per_node=1)
    cases = [make_case(micro_batch=size, topology=one_core) for size in range(1, number + 1)]
    return [CollectedTest(nodeid=case.id, case=case) for case in cases]


def test_runs_every_step_and_writes_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    begun: list[str] = []
    assert carried_out(stand_ins(begun)) == 0
    assert begun == [*NAMES]
    said = capsys.readouterr()
    assert "pass     check of machine" in said.out
    assert "page: first-night/first-night.md" in said.err
    assert (OUT / "first-night.md").read_text().startswith("# First night\n")
    assert documents.read(OUT / FILE, FirstNight).size == "tiny"


def test_the_command_runs_the_named_step() -> None:
    said = run(*NO_CASES, status=3)
    assert "not run: there is no directory nowhere" in said.stdout
    assert "page: first-night/first-night.md" in said.stderr
    record = documents.read(OUT / FILE, FirstNight)
    assert [result.step for result in record.results] == ["cases"]
    assert (record.size, record.machine) == ("tiny", detect())


def test_the_command_prints_json() -> None:
    (row,) = rows(run(*NO_CASES, "--json", status=3).stdout)
    assert (row["step"], row["check"], row["status"]) == ("cases", "cases", "unknown")


def test_the_command_stops_after_its_budget() -> None:
    assert "the time is used up" in run("spread", "--budget", "1s", status=3).stdout


@pytest.mark.parametrize(
    ("row", "status"), [(passed("a", ""), 0), (unknown("a", ""), 3), (failed("a", ""), 1)]
)
def test_exit_status_is_the_worst_checks(row: Row, status: int) -> None:
    assert carried_out(stand_ins([], spread=make_step("spread", row))) == status


@pytest.fixture
def interrupted() -> list[str]:
    """Interrupt the step `faults`. Return the steps that begin from then on."""
    begun: list[str] = []
    with pytest.raises(SystemExit) as ended:
        carried_out(stand_ins(begun, faults=make_step("faults", error=SystemExit(143))))
    assert ended.value.code == 143
    assert begun == ["machine", "selftest", "spread", "faults"]
    begun.clear()
    return begun


@pytest.mark.usefixtures("interrupted")
def test_a_page_names_steps_that_are_left() -> None:
    page = (OUT / "first-night.md").read_text()
    assert "not run: the step was interrupted" in page
    assert "Not finished: faults, frameworks, container, cores, cases." in page


def test_goes_on_where_it_was_interrupted(interrupted: list[str]) -> None:
    carried_out(stand_ins(interrupted))
    assert interrupted == ["faults", "frameworks", "container", "cores", "cases"]


def test_repeats_only_steps_that_are_named() -> None:
    begun: list[str] = []
    carried_out(stand_ins(begun))
    begun.clear()
    carried_out(stand_ins(begun))
    assert begun == []
    carried_out(stand_ins(begun), "spread", "machine")
    assert begun == ["machine", "spread"], "in their order"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_refused_repetition_fails(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    steps = stand_ins([])
    carried_out(steps)
    capsys.readouterr()
    assert carried_out(steps, "spread", seconds=1, as_json=as_json) == 3
    assert "the time is used up" in capsys.readouterr().out
    result = documents.read(OUT / FILE, FirstNight).of("spread")
    assert result is not None
    assert result.is_complete


def test_a_plan_runs_nothing() -> None:
    said = run("--plan").stdout
    assert f"about 32 min on {detect().hardware_class} with tiny training" in said
    assert not OUT.exists()
    planned = rows(run("--plan", "--json", "spread").stdout)
    assert [row["step"] for row in planned] == [*NAMES]
    assert [row["state"] for row in planned if row["step"] == "spread"] == ["to run"]
    write_record(make_result("machine"))
    states = [row["state"] for row in rows(run("--plan", "--json").stdout)]
    assert states == ["complete", *["to run"] * 7]


def test_a_plan_for_gpus_is_an_estimate_for_eight() -> None:
    record = make_record(machine=make_gpu_machine(), size="full")
    assert plan_total(record, NAMES, 65.4) == (
        "about 65 min (an estimate for eight GPUs) on 8 x h100-80gb-sxm with full training"
    )


def test_a_simulated_night_says_so_first() -> None:
    said = "simulated on CPUs: nothing here says anything about GPUs"
    begun = run(*NO_CASES, "--size", "simulated", status=3)
    assert begun.stderr.startswith(f"perfsuite first-night: {said}\n")
    assert said in run("--size", "simulated", "--plan").stdout
    assert said not in run(*NO_CASES, "--out", "other", status=3).stderr


@pytest.fixture
def forty_two_cases() -> None:
    Path("bench_cases").mkdir()
    Path("mine").mkdir()
    collects(*one_core_cases(42))


@pytest.mark.usefixtures("forty_two_cases")
def test_a_plan_gives_the_minutes_of_all_cases() -> None:
    planned = rows(run("--size", "simulated", "--plan", "--json").stdout)
    (row,) = [row for row in planned if row["step"] == "cases"]
    assert (row["expected_min"], row["most_min"]) == (63, None)


@pytest.mark.usefixtures("forty_two_cases")
def test_a_plan_says_how_many_cases_fit() -> None:
    printed = run("--size", "simulated", "--plan", "--cases", "mine", "--budget", "34min").stdout
    words = " ".join(printed.split())
    assert "~63 the budget to run" in words
    assert f"about 68 min on {detect().hardware_class} with simulated training" in words
    assert "launches 42 cases in mine for real, whatever the size: about 1.5 min for each" in words
    assert "About 19 of them fit into --budget. Run the same command again to measure the others" in words


@pytest.mark.usefixtures("forty_two_cases")
def test_a_plan_only_mentions_what_concerns_it() -> None:
    assert "fit into" not in run("--size", "simulated", "--plan").stdout
    assert "for real" not in run("--size", "simulated", "--plan", "spread").stdout


def test_a_plan_counts_only_the_cases_that_are_left() -> None:
    tests = one_core_cases(3)
    done = tests[0].case
    Path("bench_cases").mkdir()
    collects(*tests)
    write_record()
    measured_twice = make_session_file(measurement(done, "recorded"), measurement(done, "passed"))
    documents.write(store_in(OUT / "steps/cases").sessions / "a/results.json", measured_twice)
    assert planned_cases("--plan") == 2
    write_record(make_result("cases"))
    assert planned_cases("--plan", "cases") == 3, "a complete step begins anew"


def planned_cases(*words: str) -> float:
    """Return the number of cases in a plan, in which each case takes 1.5 minutes."""
    (row,) = [row for row in rows(run(*words, "--json").stdout) if row["step"] == "cases"]
    return float(row["expected_min"]) / 1.5


def test_a_replaced_row_does_not_set_the_exit_status() -> None:
    step = make_step("cases", unknown("a", "not yet"), passed("a", "fit"), replaces_rows=True)
    assert carried_out(stand_ins([], cases=step)) == 0


def test_a_plan_never_takes_0_minutes() -> None:
    said = run("--size", "simulated", "--plan", "spread").stdout
    assert f"less than a minute on {detect().hardware_class} with simulated training" in said
    write_record(*map(make_result, NAMES))
    assert "nothing to run: every step is complete" in run("--plan").stdout


def test_json_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    step = make_step("spread", failed("noise", "3%", "be quiet"))
    assert carried_out(stand_ins([], spread=step), as_json=True) == 1
    said = rows(capsys.readouterr().out)
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
def test_refuses_bad_options_before_any_step(words: str, said: str) -> None:
    notes = Path("notes.txt")
    notes.touch()
    assert said in error_of("first-night", *words.split())
    assert [*Path().iterdir()] == [notes], "no step has begun"


def test_cases_between_its_own_files_are_refused() -> None:
    mine = Path("steps/cases/test_mine.py")
    mine.parent.mkdir(parents=True)
    mine.touch()
    said = error_of("first-night", "--out", ".", "--cases", "steps/cases")
    assert "--cases steps/cases is in steps, whose files first-night removes. Move your cases" in said
    assert mine.exists()
    assert not Path(FILE).exists(), "no step has begun"


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
    rows_by_check = {row.check: row for result in record.results for row in result.rows}
    assert [row for row in rows_by_check.values() if row.status == "fail"] == [], output
    assert process.returncode == 3, "a CPU has no topology"
    for check in ("inject slowdown=60%", "noise", "inject hang", "fake", "one thread"):
        assert rows_by_check[check].status == "pass", rows_by_check[check]
    (fit,) = [row for row in rows_by_check.values() if row.found.startswith("fit for a baseline")]
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
