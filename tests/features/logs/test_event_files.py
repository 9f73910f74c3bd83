"""Tests with real event files, which are the logs of jobs that perfsuite did not launch."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from perfsuite.errors import FileError, PackageError, PerfsuiteError
from perfsuite.features.logs.event_files import MEGATRON_TAG, StepLog, read_log
from perfsuite.features.logs.judge import RATE
from tests.cli import commands
from tests.inputs.test_files import ODD, within

run = partial(commands.run, "judge")


def write_events(directory: Path, scalars: Mapping[str, Sequence[float]], first_step: int = 1) -> Path:
    """Write an event file like Megatron's SummaryWriter, with these scalars."""
    writer = EventFileWriter(str(directory))
    for tag, series in {"lm loss": [9.0] * 3, **scalars}.items():
        for step, value in enumerate(series, start=first_step):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=1.0, summary=summary))
    writer.close()
    return directory


def steps_of(seed: int, *, level: float = 0.5, count: int = 40) -> list[float]:
    random = Random(seed)
    return [level * random.gauss(1, 0.004) * (3 if step < 2 else 1) for step in range(count)]


def test_reads_an_event_file_or_a_directory(tmp_path: Path) -> None:
    directory = write_events(tmp_path / "a", {MEGATRON_TAG: [1.5, 0.25, 0.5]})
    (file,) = directory.iterdir()
    logs = [read_log(path, MEGATRON_TAG) for path in (directory, file)]
    assert logs == [StepLog(path=path, series=[1.5, 0.25, 0.5]) for path in (directory, file)]


def test_reads_the_series_of_a_tag(tmp_path: Path) -> None:
    directory = write_events(tmp_path / "a", {MEGATRON_TAG: [1.5, 0.25, 0.5]})
    assert read_log(directory, "lm loss").series == [9.0, 9.0, 9.0]


def test_resumed_training_continues_a_series(tmp_path: Path) -> None:
    directory = write_events(tmp_path / "a", {MEGATRON_TAG: [1.5, 0.25, 0.5]})
    write_events(directory, {MEGATRON_TAG: [0.125]}, first_step=4)
    assert read_log(directory, MEGATRON_TAG).series == [1.5, 0.25, 0.5, 0.125]


def test_a_repeated_step_is_named(tmp_path: Path) -> None:
    directory = write_events(tmp_path / "a", {MEGATRON_TAG: [1.5, 0.25, 0.5]})
    write_events(directory, {MEGATRON_TAG: [0.25]})
    with pytest.raises(FileError, match="step 1 of 'iteration-time' appears twice"):
        read_log(directory, MEGATRON_TAG)


@pytest.mark.parametrize("lost", [1, 5, 20, 60])
def test_log_cut_in_a_record_is_unfinished(tmp_path: Path, lost: int) -> None:
    (file,) = write_events(tmp_path, {MEGATRON_TAG: [1.5, 0.25, 0.5]}).iterdir()
    file.write_bytes(file.read_bytes()[:-lost])
    with pytest.raises(
        FileError, match=r"the file ends in the middle of the record at byte .* still being written"
    ):
        read_log(file, MEGATRON_TAG)


def test_any_flipped_bit_of_a_log_is_an_error(tmp_path: Path) -> None:
    (file,) = write_events(tmp_path, {MEGATRON_TAG: [1.5, 0.25]}).iterdir()
    whole = file.read_bytes()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(FileError, match=r"the record at byte \d+ is damaged"):
            read_log(file, MEGATRON_TAG)


def test_log_of_other_records_is_damaged(tmp_path: Path) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = tmp_path / "events.tfevents.1"
    with file.open("wb") as stream:
        RecordWriter(stream).write(b"\xff no event")
    with pytest.raises(FileError, match="the record at byte 0 is damaged, or this is not a TensorBoard"):
        read_log(file, MEGATRON_TAG)


@pytest.mark.parametrize("new_style", [False, True])
def test_reads_files_that_torch_writes(tmp_path: Path, new_style: bool) -> None:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("args", "--micro-batch-size 4")
        writer.add_histogram("params", torch.ones(3))
        for step, seconds in enumerate([1.5, 0.25]):
            writer.add_scalar("train_step_timing in s", seconds, step, new_style=new_style)
    assert read_log(tmp_path, "train_step_timing in s").series == [1.5, 0.25]
    with pytest.raises(FileError, match=r"no scalar 'iteration-time'. .* Its tags: 'args/text_summary', '"):
        read_log(tmp_path, MEGATRON_TAG)
    for tag in ("args/text_summary", "params"):
        with pytest.raises(FileError, match=f"'{tag}' is not a scalar"):
            read_log(tmp_path, tag)


def test_names_why_a_file_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileError, match=r"no event file \(\*tfevents\*\) in this directory"):
        read_log(tmp_path, MEGATRON_TAG)
    (tmp_path / "events.out.tfevents.1.x").write_bytes(b"nothing of the kind" * 9)
    with pytest.raises(FileError, match="the record at byte 0 is damaged, or this is not a TensorBoard"):
        read_log(tmp_path, MEGATRON_TAG)
    (tmp_path / "events.out.tfevents.1.x").write_bytes(b"")
    with pytest.raises(FileError, match="It has no tags at all"):
        read_log(tmp_path, MEGATRON_TAG)
    with pytest.raises(FileError, match=r"cannot read .*: No such file"):
        read_log(tmp_path / "events.out.tfevents.2.x", MEGATRON_TAG)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PackageError, match=r"pip install 'perfsuite\[tensorboard\]'"):
        read_log(tmp_path, MEGATRON_TAG)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), 1e16])
def test_names_a_value_that_is_not_a_time(tmp_path: Path, value: float) -> None:
    message = r"'iteration-time' is \S+ in step 2, expected a time above 0 and below 1e\+15"
    directory = write_events(tmp_path, {MEGATRON_TAG: [0.5, value]})
    with pytest.raises(FileError, match=message):
        read_log(directory, MEGATRON_TAG)


def against(*logs: Path | str) -> list[Path | str]:
    """Return the options that make these logs the launches of the baseline."""
    return [part for log in logs for part in ("--baseline", log)]


def test_judges_a_megatron_job_by_its_event_files(tmp_path: Path) -> None:
    before = [write_events(tmp_path / f"b{seed}", {MEGATRON_TAG: steps_of(seed)}) for seed in range(6)]
    for level, outcome, status in ((0.5, "passed", 0), (0.55, "regressed", 1), (0.45, "improved", 0)):
        launches = [
            write_events(tmp_path / f"{level}-{seed}", {MEGATRON_TAG: steps_of(seed, level=level)})
            for seed in range(10, 14)
        ]
        shown = run(*launches, *against(*before), "--json", status=status)
        assert json.loads(shown.stdout)["outcome"] == outcome
    lines = run(*launches[:1], *against(*before), "--tolerance", "5%").stdout.splitlines()
    assert lines[0].split() == ["values", "median", "iteration-time"]
    assert lines[1].split()[-1] == str(before[0])
    assert lines[7].split()[2] == "judged:"
    assert lines[-1].split()[0] == "passed"  # one launch is not enough for "improved"


def test_a_good_first_log_hides_no_slow_ones(tmp_path: Path) -> None:
    before = [write_events(tmp_path / f"b{seed}", {MEGATRON_TAG: steps_of(seed)}) for seed in range(6)]
    levels = (0.5, 0.75, 0.75, 0.75)
    now = [
        write_events(tmp_path / f"n{seed}", {MEGATRON_TAG: steps_of(seed, level=level)})
        for seed, level in enumerate(levels, 10)
    ]
    answer = json.loads(run(*now, *against(*before), "--json", status=3).stdout)
    assert (answer["outcome"], answer["launches_used"]) == ("inconclusive", 4), "they disagree"
    assert answer["estimate"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    "tag",
    [
        *("throughput", "tokens_per_sec", "samples/s", "train/MFU", "perf_tflops", "tps", "speed"),
        *(
            "tokens_per_second_per_gpu",
            "it/s/device",
            "perf/tokens_sec",
            "train_tps_avg",
            "throughput(img/s)",
        ),
    ],
)
def test_a_tag_of_a_rate_is_refused(tmp_path: Path, tag: str) -> None:
    logs = [write_events(tmp_path / str(number), {tag: [1000.0]}) for number in range(4)]
    words = (*logs[:1], *against(*logs[1:]), "--tag", tag)
    assert f"--tag {tag} is the name of a rate" in commands.error_of("judge", *map(str, words))


@pytest.mark.parametrize("tag", ["step_time_s", "sec_per_step", "time/step_seconds", "steps_time", "ops_s"])
def test_a_tag_of_a_time_is_no_rate(tag: str) -> None:
    assert RATE.search(tag) is None


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_inconclusive_has_its_own_status(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Two launches that are 40% slower neither regress nor pass."""
    before = [write_events(tmp_path / f"b{seed}", {MEGATRON_TAG: steps_of(seed)}) for seed in range(3)]
    now = [write_events(tmp_path / f"n{seed}", {MEGATRON_TAG: steps_of(seed, level=0.7)}) for seed in (7, 8)]
    assert "inconclusive" in run(*now, *against(*before), *words, status=3).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (["a", *more], "without --baseline, judge takes one file of traces")
            for more in (["b"], ["--tag", "x"], ["--tolerance", "3%"])
        ),
        (["a", *against("b", "c")], "--baseline is given 2 times, which is too few"),
        (["a", *against("b", "b", "b")], "cannot read b: No such file or directory"),
        (["log", *against("log", "log", "log")], "log is given twice: give a different log for each launch"),
        (["a", *against("b"), "--tolerance", "much"], "for '--tolerance': 'much', expected more than 0%"),
    ],
)
def test_bad_arguments_say_what_to_do(arguments: list[str], message: str) -> None:
    write_events(Path("log"), {MEGATRON_TAG: [0.5]})
    assert message in run(*arguments, status=2).stderr


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_log_of_tensorboard_is_a_regular_file(tmp_path: Path, kind: str) -> None:
    ODD[kind][0](tmp_path / "events.tfevents.1")
    error = within(30, lambda: read_log(tmp_path / "events.tfevents.1", "x"))
    assert isinstance(error, PerfsuiteError)
