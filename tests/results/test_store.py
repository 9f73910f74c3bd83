from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.analysis.collect import newest_profile
from perfsuite.case.case import Case, CaseFile, Topology
from perfsuite.errors import FileError
from perfsuite.results.baseline import Baseline
from perfsuite.results.profile import RankProfileFile, of_baseline
from perfsuite.results.run_dir import RunDir
from perfsuite.results.store import BaselineStore, FoundBaseline, SessionDir, Store
from tests.samples import make_baseline, make_case, make_launches, make_machine, make_run
from tests.traces import EAGER, launch_profile, make_profile
from tests.twin_counts import baseline_of

CLASS = "cpu-test-2c"
CASE = make_case()


def recorded(speed: float = 1, **changes: Any) -> Baseline:
    [run] = make_launches(speed)
    return make_baseline(run.replace(**changes))


def stored(directory: Path, speed: float = 1, **changes: Any) -> Path:
    return BaselineStore(directory).write_reviewed(recorded(speed, **changes))


@pytest.fixture
def baselines(tmp_path: Path) -> BaselineStore:
    return BaselineStore(tmp_path / "reviewed", tmp_path / "local")


# Baselines


def test_a_file_is_named_by_class_and_id_and_stands_in_its_place(
    baselines: BaselineStore, tmp_path: Path
) -> None:
    name = f"{CLASS}/{CASE.id}.json"
    assert baselines.reviewed_file(CLASS, CASE.id) == tmp_path / "reviewed" / name
    assert baselines.local_file(CLASS, CASE.id) == tmp_path / "local" / name
    assert baselines.write_reviewed(recorded(1)) == baselines.reviewed_file(CLASS, CASE.id)
    assert baselines.write_local(recorded(2)) == baselines.local_file(CLASS, CASE.id)
    assert documents.read(baselines.local_file(CLASS, CASE.id), Baseline) == recorded(2)


def test_messages_name_the_directories_that_are_looked_at() -> None:
    assert str(BaselineStore(Path("a"), Path("b/c"))) == "a or b/c"
    assert str(BaselineStore(Path("a"))) == "a"


def test_a_reviewed_baseline_is_found_first_and_none_of_another_class_or_case(
    baselines: BaselineStore,
) -> None:
    file = baselines.write_local(recorded(2))
    assert baselines.find(CLASS, CASE) == (recorded(2), file)
    assert BaselineStore(baselines.reviewed).find(CLASS, CASE) is None
    file = baselines.write_reviewed(recorded(1))
    assert baselines.find(CLASS, CASE) == (recorded(1), file)
    assert baselines.find("h100-80gb-sxm", CASE) is None
    assert baselines.find(CLASS, make_case(micro_batch=3)) is None


@pytest.mark.parametrize(
    ("folder", "case"), [(CLASS, make_case(micro_batch=3)), ("h100-80gb-sxm", CASE)], ids=["case", "class"]
)
def test_a_file_in_the_wrong_place_is_an_error_that_says_what_it_holds(
    tmp_path: Path, folder: str, case: Case
) -> None:
    baselines = BaselineStore(tmp_path)
    wrong = baselines.reviewed_file(folder, case.id)
    wrong.parent.mkdir(exist_ok=True)
    stored(tmp_path).rename(wrong)
    with pytest.raises(FileError) as caught:
        baselines.find(folder, case)
    message = str(caught.value)
    assert message.startswith(f"{wrong}: it holds the baseline of {CASE.id} on {CLASS}.")
    assert "move it or delete it" in message


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("cut short", "{file}: not JSON"),
        ("directory", "cannot read {file}: Is a directory"),
        ("dangling", "cannot read {file}: No such file"),
        ("looping", "cannot read {file}: Too many levels"),
    ],
)
def test_a_bad_first_file_is_an_error_though_another_directory_has_a_good_one(
    baselines: BaselineStore, kind: str, said: str
) -> None:
    baselines.write_local(recorded())
    file = baselines.reviewed_file(CLASS, CASE.id)
    file.parent.mkdir(parents=True)
    if kind == "cut short":
        file.write_text("{")
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to(file if kind == "looping" else "nowhere")
    with pytest.raises(FileError, match=said.format(file=file)):
        baselines.find(CLASS, CASE)


def speeds_of_class(*directories: Path) -> list[float | None]:
    return [held.median("tokens_per_s") for held in BaselineStore(*directories).of_class(CLASS)]


OTHERS = [make_case(micro_batch=size) for size in (3, 4)]


def test_of_class_takes_each_case_of_that_class_from_the_first_directory_that_has_it(tmp_path: Path) -> None:
    reviewed, local, nowhere = tmp_path / "reviewed", tmp_path / "local", tmp_path / "nowhere"
    stored(reviewed, 1)
    stored(reviewed, 2, case=OTHERS[0])
    stored(reviewed, 5, machine=make_machine(hardware_class="h100-80gb-sxm"))
    stored(local, 10)
    stored(local, 30, case=OTHERS[1])
    assert speeds_of_class(reviewed, local) == [1000, 2000, 30000]
    assert speeds_of_class(local, reviewed) == [10000, 30000, 2000]
    assert speeds_of_class(nowhere, local) == [10000, 30000]


def test_of_class_leaves_out_a_case_that_cannot_be_read_and_no_other(tmp_path: Path) -> None:
    """It is an error where its own case is judged."""
    reviewed, local = tmp_path / "reviewed", tmp_path / "local"
    assert speeds_of_class(reviewed, local) == []
    stored(reviewed, 1).write_text("{")
    stored(local, 2)
    stored(local, 3, case=OTHERS[0])
    (reviewed / CLASS / "notes.txt").write_text("not a baseline")
    (reviewed / CLASS / "directory.json").mkdir()
    assert speeds_of_class(reviewed, local) == [3000]


def test_files_are_listed_by_class_and_pattern_the_reviewed_ones_first(baselines: BaselineStore) -> None:
    elsewhere = make_machine(hardware_class="a100-40gb-sxm")
    local = baselines.write_local(recorded())
    other = baselines.write_local(recorded(machine=elsewhere))
    reviewed = baselines.write_reviewed(recorded(case=OTHERS[0]))
    assert baselines.files() == [reviewed, other, local]
    assert baselines.files(CLASS) == [reviewed, local]
    assert baselines.files(CLASS, CASE.id) == [local]
    assert baselines.files(CLASS, "*") == [reviewed, local]
    assert baselines.files("h100-80gb-sxm") == []


# Baselines of counts


def test_counts_stand_in_a_folder_of_their_own_by_target(baselines: BaselineStore, tmp_path: Path) -> None:
    counts = baselines.counts
    assert counts.reviewed_file("sm90", CASE.id) == tmp_path / "reviewed/counts/sm90" / f"{CASE.id}.json"
    assert counts.local_file("cpu", CASE.id) == tmp_path / "local/counts/cpu" / f"{CASE.id}.json"
    assert BaselineStore(tmp_path).counts.local is None
    file = counts.write_reviewed(baseline_of())
    assert counts.find("cpu", CASE) == (baseline_of(), file)
    assert counts.find("dry-cpu", CASE) is None
    assert baselines.files() == [], "no hardware class"
    assert baselines.of_class("counts") == []


# The local store


def test_the_names_in_a_store_stay_as_they_are() -> None:
    """Stores that an earlier version wrote are read."""
    store = Store()
    assert store.path == Path(".perfsuite")
    assert (store.baselines, store.history) == (Path(".perfsuite/baselines"), Path(".perfsuite/history"))
    session = store.new_session()
    assert session.path == Path(".perfsuite/runs") / session.name
    assert session.results == session.path / "results.json"
    assert session.case("llama") == session.path / "llama"
    assert session.case("llama", 1) == session.path / "llama.2"


def test_sessions_that_begin_later_have_later_names(tmp_path: Path) -> None:
    names = [Store(tmp_path).new_session().name for _ in range(3)]
    assert names == sorted(set(names))
    assert not list(tmp_path.iterdir())


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    return path


def test_sessions_are_found_oldest_first(tmp_path: Path) -> None:
    names = ("20260101-000000-000000", "20260102", "20260103")
    files = [write(tmp_path / "runs" / name / "results.json") for name in names]
    runs = [write(tmp_path / "runs" / name / "llama" / "launch-1" / "run.json") for name in names]
    now = write(Store(tmp_path).new_session().results)
    (tmp_path / "runs" / "20260104").mkdir()
    assert Store(tmp_path).results() == [*files, now]
    assert Store(tmp_path / "nowhere").results() == []
    assert [run_dir.run for _, run_dir in Store(tmp_path).launches()] == runs


def test_launches_of_a_store_are_found_by_session_case_and_number(tmp_path: Path) -> None:
    written = [
        write(tmp_path / "runs" / name / "run.json")
        for name in (
            "2/llama/launch-1",
            "1/llama/launch-10",
            "1/llama/launch-9",
            "1/llama.2/launch-1",
            "1/gpt2/launch-1",
        )
    ]
    write(tmp_path / "runs/1/llama/launch-11/case.json")  # interrupted
    write(tmp_path / "runs/1/llama/launch-old/run.json")
    launches = Store(tmp_path).launches()
    assert [run_dir.run for _, run_dir in launches] == [written[n] for n in (4, 2, 1, 3, 0)]
    assert [session for session, _ in launches] == ["1", "1", "1", "1", "2"]
    assert [run_dir.run for _, run_dir in Store(tmp_path).launches("g*")] == [written[4]]
    again = [run_dir.run for _, run_dir in Store(tmp_path).launches("llama")]
    assert again == [written[n] for n in (2, 1, 3, 0)], "also those of a case that was measured again"


def test_a_case_measured_again_and_each_preflight_has_a_directory_of_its_own(tmp_path: Path) -> None:
    session = SessionDir(tmp_path)
    makers: list[tuple[Callable[[], Path], tuple[str, ...]]] = [
        (lambda: session.new_case("llama"), ("llama", "llama.2", "llama.3")),
        (lambda: session.new_case("gpt2"), ("gpt2", "gpt2.2")),
        (session.new_preflight, ("preflight-1", "preflight-2")),
    ]
    for new, names in makers:
        for name in names:
            directory = new()
            assert directory == tmp_path / name
            directory.mkdir()


def test_a_profile_stands_beside_its_baseline_and_belongs_to_no_newer_one(
    baselines: BaselineStore, tmp_path: Path
) -> None:
    known = make_baseline()
    found = FoundBaseline(known, baselines.write_local(known))
    assert baselines.profile_of(found) is None
    file = baselines.profiles.write_local(of_baseline(known, launch_profile()))
    assert file.relative_to(found.file.parent.parent).parts == ("profiles", *found.file.parts[-2:])
    assert baselines.profile_of(found) == launch_profile()
    assert baselines.profile_of(FoundBaseline(known.replace(recorded_at="2027-01-01"), found.file)) is None
    reviewed = FoundBaseline(known, baselines.write_reviewed(known))
    assert baselines.profile_of(reviewed) is None
    assert baselines.profiles.write_reviewed(of_baseline(known, launch_profile())).exists()
    assert baselines.profile_of(reviewed) == launch_profile()


def test_the_profile_of_a_session_is_the_newest_that_has_no_fault(tmp_path: Path) -> None:
    store, case = Store(tmp_path), make_run().case
    assert newest_profile(store.profiled("1", case.id)) is None
    for name, inject, profile in (
        (case.id, None, make_profile()),
        (f"{case.id}.2", None, EAGER),
        (f"{case.id}.3", "host-read", make_profile()),
        (f"{case.id}-other", None, None),
    ):
        run_dir = RunDir.of_profile(store.sessions / "1" / name)
        one_rank = case.replace(topology=Topology(processes_per_node=1))
        documents.write(
            run_dir.case,
            CaseFile(case=case if profile else one_rank, device="cpu", inject=inject, profile=True),
        )
        for rank in range(case.topology.world_size if profile else 0):
            assert profile is not None
            documents.write(run_dir.profile(rank), RankProfileFile(profile=profile))
    assert newest_profile(store.profiled("1", case.id)) == launch_profile(*[EAGER] * case.topology.world_size)
