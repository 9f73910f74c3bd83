"""Makes traces and logs for `tests.benchmarks.damaged`, which damages their files."""

import json
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from perfsuite.features.logs.event_files import MEGATRON_TAG
from tests.benchmarks.damaged.world import Target


def targets(root: Path) -> list[Target]:
    """Write step times of jobs that perfsuite did not launch, as traces and as TensorBoard logs."""
    project = root / "judged"
    project.mkdir()
    noise = {"sigma": 0.01, "degrees_of_freedom": 30}
    slow = {"tolerance": 0.03, "baseline": [[0.1] * 20] * 5, "launches": [[0.2] * 20] * 5, "noise": noise}
    good = {**slow, "launches": slow["baseline"]}
    (project / "traces.jsonl").write_text("".join(f"{json.dumps(trace)}\n" for trace in (good, slow)))
    for name, level in (("old", 0.5), ("new", 0.7)):
        for number in (1, 2, 3):
            _write_log(project / f"{name}-{number}", level, number)
    against = [word for number in (1, 2, 3) for word in ("--baseline", f"old-{number}")]
    logs = ("judge", "new-1", "new-2", "new-3", *against)
    traces = ("judge", "traces.jsonl")
    both = [logs, (*logs, "--json")]
    return [
        Target("judged", "traces.jsonl", "traces", [traces, (*traces, "--json")]),
        Target("judged", "new-1/events.tfevents", "log", both),
        Target("judged", "old-1/events.tfevents", "log", both),
    ]


def _write_log(directory: Path, level: float, seed: int) -> None:
    """Write an event file like Megatron's SummaryWriter."""
    writer = EventFileWriter(str(directory))
    for step in range(40):
        seconds = level * (1 + 0.004 * ((7 * step + seed) % 5 - 2))
        summary = Summary(value=[Summary.Value(tag=MEGATRON_TAG, simple_value=seconds)])
        writer.add_event(Event(step=step, wall_time=1.0, summary=summary))
    writer.close()
    (file,) = directory.iterdir()
    file.rename(directory / "events.tfevents")
