"""Test real workers of a `DataLoader` in this process.

`frameworks/test_data_wait.py` tests the workers of scripts.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from perfsuite import documents
from perfsuite.results.counts import KeptObjects, PythonCalls, WorkerBatch
from perfsuite.results.rank_report import WorkerBatchFile
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.clock import loaders
from perfsuite.worker.counting import loader_workers
from perfsuite.worker.counting.counter import StepCounter
from perfsuite.worker.counting.growth import Growth
from perfsuite.worker.counting.loader_workers import (
    KEPT_BETWEEN,
    TOO_FEW,
    _counted,
    _Counting,
    _sum,
    batch_of,
)
from perfsuite.worker.counting.python_calls import PythonCounter
from perfsuite.worker.hooks.named import Search
from tests.processes import wait_until
from tests.samples import known
from tests.worker.loops import Loop, in_a_copy

pytestmark = pytest.mark.launch
BATCHES = 8


def tokenize(row: int) -> int:
    return row


class Rows:
    """A dataset. Loading a row makes `calls` Python calls and runs two kernels."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, row: int) -> torch.Tensor:
        for _ in range(self.calls):
            tokenize(row)
        return torch.ones(2).mul(row)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(Rows(3).__getitem__, range(2 * BATCHES))


class Failing(Rows):
    def __getitem__(self, row: int) -> torch.Tensor:
        if row >= 2:
            raise ValueError("bad row")
        return super().__getitem__(row)


class Keeping(Rows):
    """A dataset that keeps two objects for each row, a list and its tensor. It keeps more for one row."""

    def __init__(self) -> None:
        super().__init__(1)
        self.kept: list[list[torch.Tensor]] = []

    def __getitem__(self, row: int) -> torch.Tensor:
        self.kept += [[torch.ones(1)] for _ in range(99 if row == 9 else 1)]
        return super().__getitem__(row)


class WithThreads(Rows):
    """A dataset with two threads of its own. One of them is idle, and the other never waits."""

    def __getitem__(self, row: int) -> torch.Tensor:
        if row == 0:
            self.pool = ThreadPoolExecutor(1)
            self.pool.submit(tokenize, 1).result()
            threading.Thread(target=self._spin, daemon=True).start()
        return super().__getitem__(row)

    def _spin(self) -> None:
        while True:
            time.sleep(0.001)


@pytest.fixture(autouse=True)
def _original_fetchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
        monkeypatch.setattr(fetcher, "fetch", fetcher.fetch)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    loader_workers.watch(RunDir(tmp_path))
    return RunDir(tmp_path)


@pytest.fixture
def untimed(tmp_path: Path) -> RunDir:
    loader_workers.watch(RunDir(tmp_path), counts_objects=True)
    return RunDir(tmp_path)


def counted_with_notes(
    run_dir: RunDir, dataset: Any, **options: Any
) -> tuple[WorkerBatch | None, tuple[str, ...]]:
    """Return what the first worker did for a batch, after all batches were loaded, and notes about it."""
    options = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "fork", **options}
    batches: Any = iter(DataLoader(dataset, **options))
    pid = batches._workers[0].pid
    assert len(list(batches)) > 0
    return batch_of(run_dir, [pid])


def counted(run_dir: RunDir, dataset: Any, **options: Any) -> WorkerBatch | None:
    return counted_with_notes(run_dir, dataset, **options)[0]


def calls_of_tokenize(batch: WorkerBatch | None) -> int:
    return known(batch).python.functions.get(f"{__name__}.tokenize", 0)


def assert_alike(now: WorkerBatch, then: WorkerBatch) -> None:
    """Assert that batches are equal. If all threads are counted, calls of those that send batches vary."""
    assert calls_of_tokenize(now) == calls_of_tokenize(then)
    assert now.ops == then.ops
    assert now.python.all_threads or now == then


def test_a_batch_of_a_worker_is_counted(run_dir: RunDir) -> None:
    batch = known(counted(run_dir, Rows(50)))
    assert calls_of_tokenize(batch) == 2 * 50
    assert batch.ops["aten.mul"] == 2
    assert "aten.stack" in batch.ops


@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"num_workers": 2}, {"timeout": 60}])
def test_options_of_a_loader_change_no_count(run_dir: RunDir, options: dict[str, Any]) -> None:
    then = known(counted(run_dir, Rows(50)))
    now = known(counted(run_dir, Rows(50), **options))
    assert_alike(now, then)


def test_an_iterable_dataset_is_counted(run_dir: RunDir) -> None:
    assert calls_of_tokenize(counted(run_dir, Stream())) == 2 * 3


def test_without_batches_a_row_is_a_batch(run_dir: RunDir) -> None:
    assert calls_of_tokenize(counted(run_dir, Rows(3), batch_size=None)) == 3


def test_too_few_batches_are_unknown(run_dir: RunDir) -> None:
    assert counted(run_dir, Rows(3), batch_size=BATCHES) is None


def test_dataset_error_is_that_of_the_script(run_dir: RunDir) -> None:
    with pytest.raises(ValueError, match="bad row"):
        counted(run_dir, Failing(3))


def test_unwritable_directory_ends_no_training(run_dir: RunDir) -> None:
    run_dir.path.rmdir()
    run_dir.path.write_text("")
    assert counted(run_dir, Rows(3)) is None


def test_batches_of_this_process_are_not_counted(run_dir: RunDir) -> None:
    list(DataLoader(Rows(3), batch_size=2))  # type: ignore[arg-type]
    assert not list(run_dir.path.iterdir())


def test_training_threads_calls_count_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls() -> Any:
        batches = iter(DataLoader(Rows(3), batch_size=2))  # type: ignore[arg-type]
        counter = PythonCounter(lambda: "forward")
        counter.start()
        next(batches)
        counter.stop()
        return counter.result()

    before = calls()
    for owner, name in (
        *((_MapDatasetFetcher, "fetch"), (_IterableDatasetFetcher, "fetch")),
        *((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    loader_workers.watch(RunDir(tmp_path))
    loaders.watch()
    loaders.begin()
    assert calls() == before


def test_worker_forked_in_a_counted_step_is_alike(run_dir: RunDir) -> None:
    """The worker inherits the counter of its rank, and has to switch it off.

    Otherwise the counter would stay active in every batch.
    """
    alone = known(counted(run_dir, Rows(50)))
    counter = StepCounter([])
    with counter:
        assert_alike(known(counted(run_dir, Rows(50))), alone)


def of_this_process() -> tuple[bool, int, bool]:
    """Return whether garbage is collected, the number of dispatch modes, and whether calls are profiled."""
    collects = gc.isenabled() and gc.get_threshold()[0] > 0
    return collects, len(_get_current_dispatch_mode_stack()), sys.getprofile() is not None


def test_a_process_forked_in_a_counted_step_drops_the_counters() -> None:
    loader_workers._leave_after_forks()
    seen = []

    def train(loop: Loop) -> None:
        loop.backward()
        seen.append(in_a_copy(of_this_process))

    Loop().run(train)
    assert set(seen) == {(True, 0, False)}


def test_worker_forked_in_a_loader_search_is_alike(run_dir: RunDir) -> None:
    alone = known(counted(run_dir, Rows(50)))
    profiler = sys.getprofile()
    sys.setprofile(None)
    search = Search([loaders.NamedLoader("nowhere:nothing")])
    search.begin()
    try:
        assert_alike(known(counted(run_dir, Rows(50))), alone)
    finally:
        search.end()
        sys.setprofile(profiler)


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 4}])
def test_objects_that_a_worker_keeps_are_counted(untimed: RunDir, options: dict[str, Any]) -> None:
    kept = known(known(counted(untimed, Keeping(), **options)).kept)
    assert kept.by_type == {"list": 2, "Tensor": 2}
    assert kept.holders == ("`Keeping.kept`",)


def test_a_worker_that_keeps_nothing_has_no_growth(untimed: RunDir) -> None:
    assert known(known(counted(untimed, Rows(3))).kept).by_type == {}


def test_timed_launches_count_no_kept_objects(run_dir: RunDir) -> None:
    assert known(counted(run_dir, Keeping())).kept is None


def test_other_threads_of_a_worker_are_not_waited_for(untimed: RunDir) -> None:
    batch = known(counted(untimed, WithThreads(3), timeout=60))
    assert known(batch.kept).by_type == {}


def test_kept_objects_are_unknown_if_batches_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)
    counting = _Counting(run_dir, Growth(*KEPT_BETWEEN), idle_s=0.1)
    monkeypatch.setattr(_MapDatasetFetcher, "fetch", _counted(_MapDatasetFetcher.fetch, counting))
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "multiprocessing_context": "fork"}
    batches: Any = iter(DataLoader(Rows(3), prefetch_factor=BATCHES, **options))  # type: ignore[arg-type]
    pid = batches._workers[0].pid

    def has_given_up() -> bool:
        return batch_of(run_dir, [pid])[1] not in ((), (TOO_FEW,))

    wait_until(has_given_up, "the end of the counting")
    batch, (note,) = batch_of(run_dir, [pid])
    assert (known(batch).kept, known(batch).ops["aten.mul"]) == (None, 2)
    assert note.endswith("is unknown: a loader's worker still sent earlier batches")
    assert len(list(batches)) == BATCHES


def test_few_batches_are_a_note(untimed: RunDir) -> None:
    batch, notes = counted_with_notes(untimed, Rows(3), batch_size=4)
    assert (known(batch).kept, notes) == (None, (TOO_FEW,))


def test_waits_for_a_worker_that_is_counting(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    batch = WorkerBatch(python=PythonCalls(version="3.11", calls={}, functions={}), ops={})
    write = partial(documents.write, run_dir.worker_batch(7))
    write(WorkerBatchFile(batch=batch, is_counting=True))
    later = threading.Timer(0.2, write, [WorkerBatchFile(batch=batch.replace(kept=KeptObjects()))])
    later.start()
    counted_batch, _ = batch_of(run_dir, [7])
    later.join()
    assert known(counted_batch).kept == KeptObjects()


def test_shared_files_are_not_taken_if_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no public name for the files that a worker shares."""
    assert loader_workers._are_files_taken()
    monkeypatch.setattr("multiprocessing.resource_sharer._resource_sharer", object())
    assert not loader_workers._are_files_taken()


def test_kept_objects_of_several_loaders_add_up() -> None:
    def batch(kept: KeptObjects | None) -> WorkerBatch:
        return WorkerBatch(python=PythonCalls(version="3.11", calls={}, functions={}), ops={}, kept=kept)

    one = batch(KeptObjects(by_type={"list": 2}, holders=("`a`",)))
    two = batch(KeptObjects(by_type={"list": 1, "dict": 1}, holders=("`a`", "`b`")))
    assert _sum([one, two]).kept == KeptObjects(by_type={"list": 3, "dict": 1}, holders=("`a`", "`b`"))
    assert _sum([one, batch(None)]).kept is None


def test_one_unknown_loader_makes_all_unknown(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    counting = _Counting(run_dir, None)
    for _ in range(3):
        counting.make(lambda: torch.ones(2).mul(tokenize(2)))
    mine = os.getpid()
    one = known(batch_of(run_dir, [mine])[0])
    two = known(batch_of(run_dir, [mine, mine])[0])
    assert (one.ops["aten.mul"], two.ops["aten.mul"]) == (1, 2)
    assert sum(two.python.calls.values()) == 2 * sum(one.python.calls.values()) > 0
    assert batch_of(run_dir, [mine, 0]) == (None, ())
    assert batch_of(run_dir, []) == (None, ())
