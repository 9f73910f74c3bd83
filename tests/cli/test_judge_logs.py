"""Logs of jobs that perfsuite did not launch: real event files, and lines as MLPerf submissions have them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from perfsuite.cli.judge_logs import MEGATRON_TAG, StepLog, check_comparable, read_log
from perfsuite.errors import CaseError, FileError, PackageError
from tests.cli import commands

run = partial(commands.run, "judge")


def write_events(directory: Path, scalars: Mapping[str, Sequence[float]], first_step: int = 1) -> Path:
    """An event file as Megatron's SummaryWriter writes it, with other scalars beside the times."""
    writer = EventFileWriter(str(directory))
    for tag, series in {"lm loss": [9.0] * 3, **scalars}.items():
        for step, value in enumerate(series, start=first_step):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=1.0, summary=summary))
    writer.close()
    return directory


def line(key: str, value: Any = None, *, time_ms: int = 0, **metadata: Any) -> str:
    content = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
        "metadata": {"file": "/workspace/code/callbacks.py", "lineno": 7, **metadata},
    }
    return f":::MLLOG {json.dumps(content)}"


def write_log(file: Path, *lines: str) -> Path:
    """An MLPerf log: its lines carry the rank, and other output stands between them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = ["NCCL version 2.28.3", line("cache_clear", True), line("run_start"), *lines, line("run_stop")]
    file.write_text("".join(f"0: {each}\n" for each in text))
    return file


def steps_of(seed: int, *, level: float = 0.5, count: int = 40) -> list[float]:
    random = Random(seed)
    return [level * random.gauss(1, 0.004) * (3 if step < 2 else 1) for step in range(count)]


def test_an_event_file_and_its_directory_are_read(tmp_path: Path) -> None:
    steps = [1.5, 0.25, 0.5]
    directory = write_events(tmp_path / "a", {MEGATRON_TAG: steps})
    (file,) = directory.iterdir()
    for path in (directory, file):
        assert read_log(path, None) == StepLog(path=path, what="iteration-time", series=steps)
    assert read_log(directory, "lm loss").series == [9.0, 9.0, 9.0]


@pytest.mark.parametrize("new_style", [False, True])
def test_what_torch_writes_is_read(tmp_path: Path, new_style: bool) -> None:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("args", "--micro-batch-size 4")
        writer.add_histogram("params", torch.ones(3))
        for step, seconds in enumerate([1.5, 0.25]):
            writer.add_scalar("train_step_timing in s", seconds, step, new_style=new_style)
    assert read_log(tmp_path, "train_step_timing in s").series == [1.5, 0.25]
    with pytest.raises(FileError, match=r"no scalar 'iteration-time': .* Its tags: 'args/text_summary', '"):
        read_log(tmp_path, None)
    for tag in ("args/text_summary", "params"):
        with pytest.raises(FileError, match=f"'{tag}' is no scalar"):
            read_log(tmp_path, tag)


def test_training_that_was_resumed_is_one_launch_and_two_in_one_directory_are_not(tmp_path: Path) -> None:
    write_events(tmp_path, {MEGATRON_TAG: [0.5, 0.25]})
    write_events(tmp_path, {MEGATRON_TAG: [0.125]}, first_step=3)
    assert read_log(tmp_path, None).series == [0.5, 0.25, 0.125]
    write_events(tmp_path, {MEGATRON_TAG: [0.25]})
    with pytest.raises(FileError, match="step 1 of 'iteration-time' stands there twice"):
        read_log(tmp_path, None)


def test_an_event_file_of_a_killed_job_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (file,) = write_events(tmp_path, {MEGATRON_TAG: [0.5, 0.25, 0.125]}).iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert read_log(tmp_path, None).series == [0.5, 0.25]


def test_what_is_no_event_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no event file \(\*tfevents\*\) in this directory"):
        read_log(tmp_path, None)
    (tmp_path / "events.out.tfevents.1.x").write_bytes(b"nothing of the kind" * 9)
    with pytest.raises(FileError, match="It has no tags at all"):
        read_log(tmp_path, None)
    with pytest.raises(FileError, match=r"cannot read .*: No such file"):
        read_log(tmp_path / "events.out.tfevents.2.x", None)


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PackageError, match=r"pip install 'perfsuite\[tensorboard\]'"):
        read_log(tmp_path, None)


def tracked(**statistics: float) -> str:
    return line("tracked_stats", statistics, time_ms=1721026805975, step=3072)


def test_the_step_times_of_an_mlperf_log_come_before_its_throughput(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "result_0.txt",
        line("tracked_stats", {"warmup_time": 99.0}, step=0),
        tracked(train_step_time=0.5, reduced_train_loss=4.2),
        tracked(throughput=8.0),
        tracked(train_step_time=0.25, throughput=4.0),
    )
    assert read_log(log, None) == StepLog(path=log, what="train_step_time", series=[0.5, 0.25])
    assert read_log(log, "throughput").series == [1 / 8, 1 / 4]


def test_two_ranks_may_write_into_one_line(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    one, other = tracked(train_step_time=0.5), tracked(train_step_time=0.25)
    log.write_text(f"0: {one}1: {other}\n0: {one[:-5]}\n0: {one[: one.index('},') + 2]}1: {other}\n")
    assert read_log(log, None).series == [0.5, 0.25, 0.25], "two lines are cut off"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step 1 took 0.5 s\n", "no line with :::MLLOG, and its name is no event file's"),
        (tracked(throughput=0.0), "value 1 of 1/throughput is inf, expected a time above 0"),
        (tracked(train_step_time=-1.0), "value 1 of train_step_time is -1.0"),
        (line("tracked_stats", {"train_step_time": 10**400}), "value 1 of train_step_time is inf"),
        (tracked(train_step_time=1e15), r"value 1 of train_step_time is 1000000000000000.0, .* below 1e\+15"),
        (line("tracked_stats", {"train_step_time": "fast"}), "no step times"),
        (line("tracked_stats", 3), "no step times"),
    ],
)
def test_a_bad_mlperf_log_is_named_with_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    log = tmp_path / "a.log"
    log.write_text(content)
    with pytest.raises(FileError, match=message) as raised:
        read_log(log, None)
    assert str(log) in str(raised.value)
    with pytest.raises(FileError, match="--tag may be train_step_time, throughput"):
        read_log(write_log(log, tracked(tokens_per_sec=3.0)), "tokens_per_sec")


def test_logs_that_tell_different_things_are_not_compared(tmp_path: Path) -> None:
    times = write_log(tmp_path / "a.log", tracked(train_step_time=0.5))
    speeds = write_log(tmp_path / "b.log", tracked(throughput=2.0))
    with pytest.raises(CaseError, match=r"a\.log tells 'train_step_time' and .*b\.log tells '1/throughput'"):
        check_comparable([read_log(times, None), read_log(speeds, None)])


def baseline_of(logs: Sequence[Path]) -> list[str | Path]:
    return [part for log in logs for part in ("--baseline", log)]


def test_a_megatron_job_is_judged_by_its_event_files(tmp_path: Path) -> None:
    before = [write_events(tmp_path / f"b{seed}", {MEGATRON_TAG: steps_of(seed)}) for seed in range(6)]
    for level, outcome, status in ((0.5, "passed", 0), (0.55, "regressed", 1), (0.45, "improved", 0)):
        launches = [
            write_events(tmp_path / f"{level}-{seed}", {MEGATRON_TAG: steps_of(seed, level=level)})
            for seed in range(10, 14)
        ]
        shown = run(*launches, *baseline_of(before), "--json", status=status)
        assert json.loads(shown.stdout)["outcome"] == outcome
    shown = run(*launches[:1], *baseline_of(before), "--tolerance", "5%")
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["values", "median", "iteration-time"]
    assert lines[1].split()[-1] == str(before[0])
    assert lines[7].split()[2] == "judged:"
    assert lines[-1].split()[0] == "passed"  # one launch is not enough to call it improved


def test_an_mlperf_job_is_judged_by_its_logs(tmp_path: Path) -> None:
    def log(name: str, seed: int, level: float) -> Path:
        rates = [tracked(throughput=64 / step) for step in steps_of(seed, level=level, count=9)]
        return write_log(tmp_path / name / f"result_{seed}.txt", *rates)

    before = [log("before", seed, 0.5) for seed in range(5)]
    slower = run(*(log("after", seed, 0.6) for seed in range(5, 9)), *baseline_of(before), status=1)
    outcome, change, *_ = slower.stdout.splitlines()[-1].split()
    assert outcome == "regressed"
    assert change.startswith("+20.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "without --baseline one file of traces is judged"),
        (["a", "--tag", "x"], "without --baseline one file of traces is judged"),
        (["a", "--tolerance", "3%"], "without --baseline one file of traces is judged"),
        (["a", "--baseline", "b", "--baseline", "c"], "--baseline is given 2 times, which does not tell"),
        (["a", *["--baseline", "b"] * 3], "cannot read b: No such file or directory"),
        (["log", *["--baseline", "log"] * 3], "log is named twice: name a log of its own for each launch"),
        (
            ["a", *["--baseline", "b"] * 3, "--tolerance", "much"],
            "for '--tolerance': 'much', expected above 0%",
        ),
    ],
)
def test_bad_arguments_are_errors_that_say_what_to_do(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log", tracked(train_step_time=0.5))
    assert message in run(*arguments, status=2).stderr
