"""Test in this process the functions of libraries that are recognised. `frameworks/` launches scripts."""

import ast
import io
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver

from perfsuite import extensions
from perfsuite.extensions import FRAMEWORKS
from perfsuite.results.counts import Counts
from perfsuite.worker.clock import loaders
from perfsuite.worker.hooks import libraries
from perfsuite.worker.spans import events, phases
from perfsuite.worker.spans.events import EVALUATE, LOAD, RECOGNISED, SAVE, Recognised
from perfsuite.worker.spans.recording import Spans
from tests.packages import Packages
from tests.samples import known
from tests.worker import motor

# Libraries warn of a missing process group, srun or too few workers.
pytestmark = pytest.mark.filterwarnings("ignore")
dcp: Any = torch.distributed.checkpoint
STATE = {"weight": torch.ones(1000)}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """Yield the spans of this thread. torch is watched like in a launch, and restored afterwards."""
    of_safetensors = [safetensors.torch, safetensors.numpy]
    owners = [torch, torch.serialization, *of_safetensors, dcp, state_dict_saver, state_dict_loader]
    for owner in owners:
        for name in ("save", "load", "async_save", "save_file", "load_file", "save_state_dict"):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, getattr(owner, name))
    kind: Any = filesystem._FileSystemWriter
    monkeypatch.setattr(kind, "_write_data", kind._write_data)
    events.watch()
    spans = known(phases.spans)
    spans.train(lambda: 0)
    yield spans
    assert spans.notes == []


def names(spans: Spans) -> dict[str, int]:
    return {name: times.occurrences for name, times in spans.times().items()}


def counts(spans: Spans) -> Counts:
    return known(spans.counts().get(SAVE))


def defined(package: Path, module: str, path: str) -> bool:
    """Return whether a module has this function or method. The module is not imported."""
    _, *parents, name = module.split(".")
    file = package.joinpath(*parents, f"{name}.py")
    kinds: list[ast.AST] = [ast.parse(file.read_text())] if file.exists() else []
    for part in path.split("."):
        inside = [child for definition in kinds for child in ast.walk(definition)]
        kinds = [definition for definition in inside if getattr(definition, "name", None) == part]
    return bool(kinds)


OF_FRAMEWORKS = [
    recognised
    for library in map(libraries.of, sorted(extensions.own(FRAMEWORKS)))
    if library is not None
    for recognised in events.of_library(library)
]


@pytest.mark.parametrize(
    ("module", "path"),
    [(entry.module, entry.path) for entry in [*RECOGNISED, *OF_FRAMEWORKS]],
    ids=str,
)
def test_libraries_still_have_the_names(module: str, path: str) -> None:
    """If a name is gone, the event is recognised by the functions that it calls, or not at all."""
    spec = find_spec(module.partition(".")[0])
    if spec is None:
        pytest.skip(f"{module} is not installed")
    assert defined(Path(known(spec.origin)).parent, module, path)


def test_file_checkpoint_has_the_files_bytes(spans: Spans, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    assert names(spans) == {SAVE: 1}
    assert counts(spans).bytes_written == (tmp_path / "model.pt").stat().st_size


def test_open_file_checkpoint_has_the_added_bytes(spans: Spans, tmp_path: Path) -> None:
    with (tmp_path / "model.pt").open("wb") as file:
        file.write(b"head")
        torch.save(STATE, f=file)
    assert counts(spans).bytes_written == (tmp_path / "model.pt").stat().st_size - 4


def test_a_file_that_is_loaded_is_an_event(spans: Spans, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    torch.load(tmp_path / "model.pt")
    assert names(spans) == {SAVE: 1, LOAD: 1}


def test_what_stays_in_memory_is_no_event(spans: Spans) -> None:
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    buffer.seek(0)
    torch.load(buffer)
    assert names(spans) == {}


def test_loader_data_is_not_a_checkpoint(spans: Spans, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "rows.pt")
    loaders.timed(lambda: torch.load(tmp_path / "rows.pt"))()
    assert names(spans) == {SAVE: 1}


def test_a_save_that_fails_raises_and_is_no_save(spans: Spans, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save(STATE, tmp_path / "nowhere" / "model.pt")
    assert (names(spans), spans.counts()) == ({}, {})
    assert spans.notes == ["save checkpoint: 1 ended with an exception (RuntimeError) and does not count"]
    spans.notes.clear()


def test_tensors_in_a_safe_file_are_a_checkpoint(spans: Spans, tmp_path: Path) -> None:
    safetensors.torch.save_file(STATE, tmp_path / "model.safetensors")
    safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert names(spans) == {SAVE: 1, LOAD: 1}
    assert counts(spans).bytes_written == (tmp_path / "model.safetensors").stat().st_size


def test_arrays_in_a_safe_file_are_a_checkpoint(spans: Spans, tmp_path: Path) -> None:
    arrays = {name: tensor.numpy() for name, tensor in STATE.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert names(spans) == {SAVE: 1, LOAD: 1}
    assert counts(spans).bytes_written == (tmp_path / "model.safetensors").stat().st_size


def shards(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.distcp"))


@pytest.mark.parametrize("threads", [1, 2])
def test_sharded_checkpoint_has_its_shards_bytes(spans: Spans, tmp_path: Path, threads: int) -> None:
    state = {**STATE, "bias": torch.ones(10), "step": 7}
    writer = dcp.FileSystemWriter(tmp_path, thread_count=threads)
    dcp.save(state, storage_writer=writer, no_dist=True)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert names(spans) == {SAVE: 1, LOAD: 1}
    assert counts(spans).bytes_written == shards(tmp_path) > 4000


def test_async_checkpoint_counts_later_writes(
    spans: Spans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    dcp.async_save(STATE, checkpoint_id=tmp_path, no_dist=True).result()
    assert names(spans) == {SAVE: 1}
    assert counts(spans).bytes_written == shards(tmp_path) > 4000


def test_a_name_that_a_library_lacks_is_told(spans: Spans) -> None:
    events._wrap(Recognised("torch.serialization", "keep", SAVE), torch.serialization)
    absent = "torch.serialization.keep does not exist in this version"
    assert spans.notes == [f"not all events are recognised: {absent} (save checkpoint)"]
    spans.notes.clear()


def test_unknown_bytes_of_sharded_checkpoints_are_a_note(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(filesystem, "_FileSystemWriter")
    events.watch()
    (note,) = known(phases.spans).notes
    assert note.startswith("not all events are recognised (torch ")
    assert "_FileSystemWriter._write_data, a private name" in note
    assert "Without it, the size of a sharded checkpoint is unknown" in note


def test_a_wrapped_function_is_wrapped_once(spans: Spans) -> None:
    wrapped = torch.save
    events.watch()
    assert torch.save is torch.serialization.save is wrapped


def test_functions_that_a_framework_names_are_events(spans: Spans, packages: Packages) -> None:
    motor.install(packages)
    events.watch()
    current = known(phases.spans)
    current.train(lambda: 0)
    driving = motor.driving()
    assert driving.save() == "saved"
    assert driving.Driver.check(None) == "checked"
    assert names(current) == {SAVE: 1, EVALUATE: 1}


class Engine:
    """A class of a library with each kind of method."""

    def save(self, path: str) -> tuple[type, str]:
        return type(self), path

    @classmethod
    def load(cls, path: str) -> tuple[type, str]:
        return cls, path

    @staticmethod
    def check(path: str) -> tuple[type, str]:
        return Engine, path


@pytest.mark.parametrize(("name", "event"), [("save", SAVE), ("load", LOAD), ("check", EVALUATE)])
def test_recognised_methods_are_called_as_before(
    spans: Spans, name: str, event: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, name, vars(Engine)[name])
    recognised = Recognised(__name__, f"Engine.{name}", event)
    for _ in range(2):  # the second time, the method is already watched
        events._wrap(recognised, sys.modules[__name__])
    assert getattr(Engine(), name)("x") == (Engine, "x")
    assert names(spans) == {event: 1}


def test_outermost_saver_names_the_event(spans: Spans, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    optimizer = None
    model = accelerator.prepare(model)
    assert optimizer is None
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    assert names(spans) == {SAVE: 1, LOAD: 1}


def test_trainer_saves_and_evaluates_in_one_event(spans: Spans, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            answer = self.layer(x)
            return {"loss": (answer - 1).square().mean(), "logits": answer}

    rows = [{"x": torch.ones(8), "labels": torch.ones(1)}] * 4
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert names(spans) == {SAVE: 2, EVALUATE: 1}
    files = tmp_path.glob("checkpoint-*/*")  # of both checkpoints, because no clock counts steps here
    size = sum(file.stat().st_size for file in files if file.suffix != ".json")
    assert counts(spans).bytes_written == size


def test_evaluation_of_lightning_is_an_event(spans: Spans, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch import LightningModule, Trainer

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def validation_step(self, batch: Any, number: int) -> None:
            self.layer(batch)

    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(Net(), torch.utils.data.DataLoader(torch.ones(4, 8)), verbose=False)  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    assert names(spans) == {EVALUATE: 1, SAVE: 1}
    assert counts(spans).bytes_written == (tmp_path / "model.ckpt").stat().st_size


def async_save(monkeypatch: pytest.MonkeyPatch, path: Path, may_write: threading.Event) -> Any:
    """Save in the background, once `may_write` is set."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)

    class Writer(filesystem.FileSystemWriter):
        def write_data(self, *args: Any) -> Any:
            may_write.wait(60)
            return super().write_data(*args)

    return dcp.async_save(STATE, storage_writer=Writer(path), no_dist=True)


@pytest.mark.parametrize("wait", ["result", "exception"])
def test_waiting_for_a_background_save_is_part_of_it(
    spans: Spans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    may_write = threading.Event()
    future = async_save(monkeypatch, tmp_path / "sharded", may_write)
    threading.Timer(0.2, may_write.set).start()
    getattr(future, wait)()
    times = spans.times()[SAVE]
    assert (len(times.seconds), times.occurrences, counts(spans).occurrences) == (2, 1, 1)
    assert times.mean_s == sum(times.seconds)


def test_a_background_save_that_ended_is_no_wait(
    spans: Spans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    may_write.set()
    future = async_save(monkeypatch, tmp_path / "sharded", may_write)
    futures.wait([future])
    future.result()
    assert spans.times()[SAVE].waits == 0
