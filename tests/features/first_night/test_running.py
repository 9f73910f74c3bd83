"""Tests of the loop that runs steps one after another, even if one of them fails."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, failed, passed
from perfsuite.errors import MachineError
from perfsuite.features.first_night import running
from perfsuite.features.first_night.night import Night, not_reached, not_run
from perfsuite.features.first_night.record import FirstNight
from perfsuite.features.first_night.running import (
    Running,
    ends_with_results,
    machine_problem,
    run_steps,
    time_limit,
)
from perfsuite.features.first_night.steps import Step
from perfsuite.launch.quiet import gpu_users
from perfsuite.node.machine import detect_here
from tests.features.first_night.nights import make_night, make_record, make_result, make_step
from tests.node.fake_nvml import Nvml, NVMLError
from tests.samples import known, make_gpu_machine

GIB = 2**30
EMPTY = SimpleNamespace(total=80 * GIB, used=0)
IDLE = {
    "nvmlDeviceGetName": ("NVIDIA H100 80GB HBM3",),
    "nvmlDeviceGetComputeRunningProcesses": ([],),
    "nvmlDeviceGetMemoryInfo": (EMPTY,),
}


@dataclass
class Saved:
    """Records the saved records and the shown rows."""

    records: list[FirstNight] = field(default_factory=list)
    shown: list[tuple[str, Row]] = field(default_factory=list)

    def how(self, **changes: Any) -> Running:
        def show(step: Step, row: Row) -> None:
            self.shown.append((step.name, row))

        usual: dict[str, Any] = {"save": self.records.append, "show": show, "problem": lambda *_: None}
        return Running(**{**usual, **changes})


def run(*steps: Step, record: FirstNight | None = None, **changes: Any) -> FirstNight:
    return run_steps(make_night(), record or make_record(), steps, Saved().how(**changes))


def only_row(record: FirstNight, step: str) -> Row:
    result = record.of(step)
    assert result is not None
    (row,) = result.rows
    return row


def test_saves_and_shows_as_it_goes() -> None:
    saved = Saved()
    run_steps(make_night(), make_record(), [make_step("a"), make_step("b")], saved.how())
    names = [[result.step for result in record.results] for record in saved.records]
    assert names == [["a"], ["a"], ["a", "b"], ["a", "b"]], "saved after each row and each step"
    completed = [[result.is_complete for result in record.results] for record in saved.records]
    assert completed == [[False], [True], [True, False], [True, True]]
    assert [step for step, _ in saved.shown] == ["a", "b"]
    assert all(result.is_complete for result in saved.records[-1].results)


@pytest.mark.parametrize(
    ("error", "said"), [(MachineError("NVML is gone"), "NVML is gone"), (KeyError("x"), "KeyError: 'x'")]
)
def test_a_step_that_fails_does_not_stop_the_next(error: Exception, said: str) -> None:
    record = run(make_step("a", passed("one", ""), error=error), make_step("b"))
    first, second = record.results
    assert [row.status for row in first.rows] == ["pass", "fail"]
    assert first.rows[1].found == said
    assert second.is_complete
    assert Path("night/steps/a-traceback.txt").exists() == isinstance(error, KeyError)


def test_a_step_ends_at_its_limit() -> None:
    def endless(night: Night) -> Iterator[Row]:
        yield passed("one", "")
        try:
            time.sleep(60)
        except Exception:  # some code catches everything and continues
            time.sleep(60)

    slow = make_step("a", run=endless, minutes={"simulated": (0.001, 0.005)})
    assert slow.minutes["simulated"][1] * 60 < 1
    record = run(slow, make_step("b"))
    first, second = record.results
    assert [row.check for row in first.rows] == ["one", "the rest"]
    assert first.rows[1].found == "not run: the step was stopped after its limit of 0 min"
    assert not first.is_complete
    assert second.is_complete


def test_a_row_replaces_an_earlier_one_only_if_the_step_says_so() -> None:
    """In any other step, a failed row is kept even if a later row has the same name."""
    rows = (failed("one", "not yet"), passed("two", ""), passed("one", ""))
    record = run(make_step("a", *rows), make_step("b", *rows, replaces_rows=True))
    assert record.results[0].rows == rows
    assert record.results[1].rows == rows[1:]


def test_a_step_with_work_left_is_not_complete() -> None:
    record = run(make_step("a", passed("one", ""), not_reached("cases", "2 of 3")), make_step("b"))
    assert [result.is_complete for result in record.results] == [False, True]


def test_a_step_knows_whether_it_is_continued() -> None:
    continued: list[bool] = []

    def note(night: Night) -> Iterator[Row]:
        continued.append(night.is_continued)
        yield passed("one", "")

    for earlier in ((), (make_result("a"),), (make_result("a", is_complete=False),)):
        run(make_step("a", run=note), record=make_record(*earlier))
    assert continued == [True, False, True]


def test_a_step_without_time_waits_for_the_next_call() -> None:
    record = run(make_step("a"), until=100.0, clock=lambda: 80.0)
    assert only_row(record, "a").found == "not run: the time is used up"
    assert not record.results[0].is_complete


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_keeps_what_was_found(error: BaseException) -> None:
    saved = Saved()
    steps = [make_step("a", passed("one", ""), error=error), make_step("b")]
    with pytest.raises(type(error)):
        run_steps(make_night(), make_record(), steps, saved.how())
    (result,) = saved.records[-1].results
    assert [row.check for row in result.rows] == ["one", "the rest"]
    assert not result.is_complete


@pytest.mark.parametrize("check", running.BLOCKING)
def test_broken_torch_makes_later_steps_meaningless(check: str) -> None:
    """torch can be broken because, for example, the driver is too old for it."""
    machine = make_result("machine", failed(check, "the driver is too old"))
    record = run(make_step("spread"), make_step("machine"), record=make_record(machine))
    reason = f"the check {check!r} failed in the step `machine`"
    assert only_row(record, "spread") == not_run(
        "spread", reason, "repair it, then run the same command again to continue"
    )
    assert only_row(record, "machine").status == "pass", "a repetition shows whether it is repaired"
    again = run(make_step("machine", failed(check, "the driver is too old")))
    assert not again.results[0].is_complete, "the same command examines the machine again"
    others = make_record(make_result("machine", failed("GPU hardware", "a row could not be remapped")))
    assert only_row(run(make_step("spread"), record=others), "spread").status == "pass"


def on_machine(
    monkeypatch: pytest.MonkeyPatch, nvml: Nvml, *, needs_quiet: bool = True, **changes: Any
) -> Row | None:
    """Return the row about the problem of a machine that had two H100s, and now has the GPUs of `nvml`."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    functions: dict[str, Any] = {
        "detect": detect_here,
        "see_gpus": partial(gpu_users, nvml),
        "sleep": lambda seconds: None,
    }
    night = make_night(**{"machine": make_gpu_machine(count=2), **functions, **changes})
    return machine_problem(night, make_step("spread", needs_quiet=needs_quiet))


def test_a_gpu_that_falls_off_the_bus_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = known(on_machine(monkeypatch, Nvml(IDLE)))
    assert row.found == (
        "not run: the machine has changed: it had 2 x h100-80gb-sxm, and now has 1 x h100-80gb-sxm"
    )


def test_a_gpu_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {**IDLE, "nvmlDeviceGetName": NVMLError("GPU is lost")}
    row = known(on_machine(monkeypatch, Nvml(IDLE, lost)))
    assert row.found.startswith("not run: GPU 1 (00000000:1C:00.0) cannot be read: GPU is lost")


def test_a_machine_that_lost_its_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    row = known(on_machine(monkeypatch, Nvml(init=NVMLError("Driver Not Loaded"))))
    assert row.found.endswith("and now has no GPU")


def test_an_unchanged_machine_is_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_machine(monkeypatch, Nvml(IDLE, IDLE)) is None
    assert machine_problem(make_night(), make_step("spread")) is None, "a CPU machine has no GPUs to lose"


def test_a_step_is_not_run_without_an_answer_of_nvml() -> None:
    def silent() -> Machine:
        raise MachineError("NVML did not answer within 30 s")

    night = make_night(machine=make_gpu_machine(), detect=silent)
    row = machine_problem(night, make_step("spread"))
    assert row == not_run("spread", "NVML did not answer within 30 s")


def test_busy_gpus_are_named_with_those_that_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = SimpleNamespace(pid=os.getpid(), usedGpuMemory=40 * GIB)
    busy = {**IDLE, "nvmlDeviceGetComputeRunningProcesses": ([holder],)}
    row = on_machine(monkeypatch, Nvml(busy, IDLE))
    assert row is not None
    assert row.found.startswith("not run: 40.0 GiB of GPU 0 held by ")
    advice = "To use only the idle GPUs, set CUDA_VISIBLE_DEVICES=1 and give another --out"
    assert advice in str(row.advice)
    both = on_machine(monkeypatch, Nvml(busy, busy))
    assert both is not None
    assert "idle" not in str(both.advice)
    assert on_machine(monkeypatch, Nvml(busy, busy), needs_quiet=False) is None


def test_idle_gpus_have_the_names_that_the_user_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8932f937,7")
    advice = running._instead(["2 GiB of GPU 0 held by x", "1 GiB of GPU 2 held by y"], 3)
    assert "CUDA_VISIBLE_DEVICES=GPU-8932f937 and" in advice
    assert "idle" not in running._instead(["2 GiB of GPU 0 held by x"], 1)


def test_a_step_is_not_run_if_nvml_falls_silent_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(devices: int) -> list[str]:
        raise MachineError("NVML did not answer within 30 s")

    row = on_machine(monkeypatch, Nvml(IDLE, IDLE), see_gpus=silent)
    assert row == not_run("spread", "NVML did not answer within 30 s")


BUSY = not_run("spread", "40.0 GiB of GPU 0 held by python (pid 7)")
LATE = make_result("spread", not_run("spread", "the time is used up"), is_complete=False)


def test_a_repeated_step_that_is_refused_keeps_its_result() -> None:
    earlier = make_result("spread", passed("noise", "1%"))
    saved = Saved()
    how = saved.how(problem=lambda *_: BUSY)
    record = run_steps(make_night(), make_record(earlier), [make_step("spread")], how)
    assert record.results == (earlier,)
    assert saved.shown == [("spread", BUSY)]


@pytest.mark.parametrize("before", [make_record(), make_record(LATE)], ids=["no result", "a refusal"])
def test_a_refusal_is_not_a_result_to_keep(before: FirstNight) -> None:
    again = run(make_step("spread"), record=before, problem=lambda *_: BUSY)
    assert only_row(again, "spread") == BUSY


def test_the_wait_for_others_is_a_part_of_the_budget() -> None:
    now = [0.0]
    limits: list[float] = []

    def wait(night: Night, step: Step) -> None:
        limits.append(night.wait_quiet_s)
        now[0] += 50

    def measured(night: Night) -> Iterator[Row]:
        yield passed("left", f"{night.left_s():.0f}")

    steps = [make_step("a", run=measured), make_step("b")]
    how = Saved().how(until=110.0, clock=lambda: now[0], problem=wait)
    record = run_steps(make_night(wait_quiet_s=100), make_record(), steps, how)
    assert only_row(record, "a").found == "60"
    assert only_row(record, "b").found == "not run: the time is used up"
    assert limits == [100, 60]


def test_nohup_still_ignores_a_lost_connection() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_with_results():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """Let signals end this process, even if the tests were started with `nohup`."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in running.ENDED_BY}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heeded_signals")
@pytest.mark.parametrize("number", running.ENDED_BY, ids=lambda number: signal.Signals(number).name)
def test_signals_that_end_a_job_become_exceptions(number: int) -> None:
    def receive() -> None:
        with ends_with_results():
            os.kill(os.getpid(), number)
            time.sleep(5)

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left:
        receive()
    assert left.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_no_limit_is_left_behind() -> None:
    with time_limit(60):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    with time_limit(float("inf")):
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
