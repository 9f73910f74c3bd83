from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.analysis.collect import newest_profile
from perfsuite.case.case import Case, CaseFile, Topology
from perfsuite.errors import FileError
from perfsuite.results.baseline import Baseline
from perfsuite.results.profile import Profile, RankProfileFile, of_baseline
from perfsuite.results.run_dir import RunDir
from perfsuite.results.store import BaselineStore, FoundBaseline, SessionDir, Store
from tests.samples import make_baseline, make_case, make_launches, make_machine, make_run
from tests.traces import EAGER, launch_profile, make_profile
from tests.twin_counts import baseline_of

CLASS = "cpu-test-2c"
H100 = "h100-80gb-sxm"
CASE, *OTHERS = (make_case(micro_batch=size) for size in (2, 3, 4))
NAME = f"{CLASS}/{CASE.id}.json"


def recorded(speed: float = 1, **changes: Any) -> Baseline:
    [run] = make_launches(speed)
    return make_baseline(run.replace(**changes))


def stored(directory: Path, speed: float = 1, **changes: Any) -> Path:
    return BaselineStore(directory).write_reviewed(recorded(speed, **changes))


REVIEWED = Path("reviewed")
LOCAL = Path("local")
BASELINES = BaselineStore(REVIEWED, LOCAL)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_finds_a_reviewed_baseline_first() -> None:
    assert BASELINES.write_local(recorded(2)) == BASELINES.local_file(CLASS, CASE.id) == LOCAL / NAME
    assert documents.read(LOCAL / NAME, Baseline) == recorded(2)
    assert BASELINES.find(CLASS, CASE) == (recorded(2), LOCAL / NAME)
    assert BaselineStore(REVIEWED).find(CLASS, CASE) is None
    assert BASELINES.write_reviewed(recorded(1)) == BASELINES.reviewed_file(CLASS, CASE.id) == REVIEWED / NAME
    assert BASELINES.find(CLASS, CASE) == (recorded(1), REVIEWED / NAME)
    assert BASELINES.find(H100, CASE) is BASELINES.find(CLASS, OTHERS[0]) is None


def test_a_store_is_named_by_its_directories() -> None:
    assert str(BaselineStore(Path("a"), Path("b/c"))) == "a or b/c"
    assert str(BaselineStore(Path("a"))) == "a"


@pytest.mark.parametrize(("folder", "case"), [(CLASS, OTHERS[0]), (H100, CASE)], ids=["case", "class"])
def test_misplaced_file_says_what_it_holds(folder: str, case: Case) -> None:
    wrong = BASELINES.reviewed_file(folder, case.id)
    wrong.parent.mkdir(parents=True)
    stored(REVIEWED).rename(wrong)
    message = f"^{wrong}: it holds the baseline of {CASE.id} on {CLASS}.* move the file or delete it"
    with pytest.raises(FileError, match=message):
        BASELINES.find(folder, case)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda file: file.write_text("{"), "{file}: not JSON"),
        (lambda file: file.mkdir(), "cannot read {file}: Is a directory"),
        (lambda file: file.symlink_to("nowhere"), "cannot read {file}: No such file"),
        (lambda file: file.symlink_to(file.name), "cannot read {file}: Too many levels"),
    ],
    ids=["cut short", "directory", "dangling", "looping"],
)
def test_bad_first_file_fails_despite_a_good_one(make: Callable[[Path], None], said: str) -> None:
    BASELINES.write_local(recorded())
    (REVIEWED / CLASS).mkdir(parents=True)
    make(REVIEWED / NAME)
    with pytest.raises(FileError, match=said.format(file=REVIEWED / NAME)):
        BASELINES.find(CLASS, CASE)


def speeds_of_class(*directories: Path) -> list[float | None]:
    return [held.median("tokens_per_s") for held in BaselineStore(*directories).of_class(CLASS)]


def test_of_class_prefers_the_first_directory() -> None:
    assert speeds_of_class(REVIEWED, LOCAL) == []
    stored(REVIEWED, 1)
    stored(REVIEWED, 2, case=OTHERS[0])
    stored(REVIEWED, 5, machine=make_machine(hardware_class=H100))
    stored(LOCAL, 10)
    stored(LOCAL, 30, case=OTHERS[1])
    assert speeds_of_class(REVIEWED, LOCAL) == [1000, 2000, 30000]
    assert speeds_of_class(LOCAL, REVIEWED) == [10000, 30000, 2000]
    assert speeds_of_class(Path("nowhere"), LOCAL) == [10000, 30000]
    (REVIEWED / NAME).write_text("{")  # this is an error only when the file's own case is judged
    (REVIEWED / CLASS / "notes.txt").write_text("not a baseline")
    (REVIEWED / CLASS / "directory.json").mkdir()
    assert speeds_of_class(REVIEWED, LOCAL) == [2000, 30000], "the other baselines are still there"


def test_lists_reviewed_files_first() -> None:
    local = BASELINES.write_local(recorded())
    other = BASELINES.write_local(recorded(machine=make_machine(hardware_class="a100-40gb-sxm")))
    reviewed = BASELINES.write_reviewed(recorded(case=OTHERS[0]))
    assert BASELINES.files() == [reviewed, other, local]
    assert BASELINES.files(CLASS) == BASELINES.files(CLASS, "*") == [reviewed, local]
    assert BASELINES.files(CLASS, CASE.id) == [local]
    assert BASELINES.files(H100) == []


@pytest.mark.parametrize("damage", [("1000.0", "9000.0"), ('"tokens_per_s_mean"', '"tokens_per_s_meen"')])
def test_a_damaged_recorded_baseline_is_refused(damage: tuple[str, str]) -> None:
    file = BASELINES.write_local(recorded())
    assert BASELINES.find(CLASS, CASE) == (recorded(), file)
    file.write_text(file.read_text().replace(*damage))
    with pytest.raises(FileError, match=f"^{file}: .*it was edited or damaged"):
        BASELINES.find(CLASS, CASE)


def test_refuses_a_baseline_without_digest() -> None:
    file = BASELINES.write_local(recorded())
    documents.write(file, recorded())
    with pytest.raises(FileError, match=f"^{file}: it has no digest: it was damaged, or an older perfsuite"):
        BASELINES.find(CLASS, CASE)
    assert BaselineStore(LOCAL).find(CLASS, CASE) == (recorded(), file), "people may edit a reviewed baseline"


def test_edited_baseline_says_what_to_do() -> None:
    BASELINES.write_local(recorded()).rename(LOCAL / "copied")
    (REVIEWED / CLASS).mkdir(parents=True)
    (REVIEWED / NAME).write_text((LOCAL / "copied").read_text().replace("1000.0", "900.0"))
    with pytest.raises(FileError, match="if the edit is intended, remove the digest"):
        BASELINES.find(CLASS, CASE)


def test_counts_have_a_folder_for_each_target() -> None:
    counts = BASELINES.counts
    name = f"{CASE.id}.json"
    assert counts.reviewed_file("sm90", CASE.id) == REVIEWED / "counts/sm90" / name
    assert counts.local_file("cpu", CASE.id) == LOCAL / "counts/cpu" / name
    assert BaselineStore(REVIEWED).counts.local is None
    file = counts.write_reviewed(baseline_of())
    assert (counts.find("cpu", CASE), counts.find("dry-cpu", CASE)) == ((baseline_of(), file), None)
    assert (BASELINES.files(), BASELINES.of_class("counts")) == ([], []), (
        "the directory of counts is not a hardware class"
    )


def test_profile_belongs_to_its_baseline_alone() -> None:
    baseline = make_baseline()
    entry = FoundBaseline(baseline, BASELINES.write_local(baseline))
    assert BASELINES.profile_of(entry) is None
    file = BASELINES.profiles.write_local(of_baseline(baseline, launch_profile()))
    assert file.relative_to(entry.file.parent.parent).parts == ("profiles", *entry.file.parts[-2:])
    assert BASELINES.profile_of(entry) == launch_profile()
    assert BASELINES.profile_of(FoundBaseline(baseline.replace(recorded_at="2027-01-01"), entry.file)) is None
    reviewed = FoundBaseline(baseline, BASELINES.write_reviewed(baseline))
    assert BASELINES.profile_of(reviewed) is None
    assert BASELINES.profiles.write_reviewed(of_baseline(baseline, launch_profile())).exists()
    assert BASELINES.profile_of(reviewed) == launch_profile()


def test_the_names_in_a_store_stay_as_they_are() -> None:
    """Stores of earlier versions must stay readable."""
    store = Store()
    assert store.path == Path(".perfsuite")
    assert (store.baselines, store.history) == (Path(".perfsuite/baselines"), Path(".perfsuite/history"))
    session = store.new_session()
    assert session.path == Path(".perfsuite/runs") / session.name
    assert session.results == session.path / "results.json"
    assert session.case("llama") == session.path / "llama"
    assert session.case("llama", 1) == session.path / "llama.2"
    assert store.new_comparison().path.parent == Path(".perfsuite/compare")


def write(path: Path) -> Path:
    documents.write_text(path, "{}")
    return path


def test_finds_sessions_in_order() -> None:
    store = Store()
    names = [store.new_session().name for _ in range(3)]
    assert names == sorted(set(names))
    assert list(Path().iterdir()) == store.results() == [], "no directory is made yet"
    results = [
        write(store.sessions / name / "results.json") for name in ("20260101-000000-000000", "20260102")
    ]
    results.append(write(store.new_session().results))
    assert store.results() == results


def test_finds_launches_in_order() -> None:
    store = Store()
    runs = ("1/gpt2/launch-1", "1/llama/launch-9", "1/llama/launch-10", "1/llama.2/launch-1")
    gpt2, *llama = [write(store.sessions / name / "run.json") for name in (*runs, "2/llama/launch-1")]
    write(store.sessions / "1/llama/launch-11/case.json")  # an interrupted launch
    write(store.sessions / "1/llama/launch-old/run.json")
    assert [run_dir.run for _, run_dir in store.launches()] == [gpt2, *llama]
    assert [session for session, _ in store.launches()] == ["1", "1", "1", "1", "2"]
    assert [run_dir.run for _, run_dir in store.launches("g*")] == [gpt2]
    again = [run_dir.run for _, run_dir in store.launches("llama")]
    assert again == llama, "repeated measurements of a case are included"


def test_repeated_cases_have_their_own_directory() -> None:
    session = SessionDir(Path("1"))
    for name in ("llama", "llama.2", "llama.3", "gpt2", "gpt2.2", "preflight-1", "preflight-2"):
        is_case = not name.startswith("preflight")
        directory = session.new_case(name.partition(".")[0]) if is_case else session.new_preflight()
        assert directory == session.path / name
        directory.mkdir(parents=True)


def test_takes_the_newest_profile_without_a_fault() -> None:
    store = Store()
    case = make_run().case
    assert newest_profile(store.profiled("1", case.id)) is None

    def profiled(name: str, case: Case, profile: Profile, inject: str | None = None) -> None:
        run_dir = RunDir.of_profile(store.sessions / "1" / name)
        documents.write(run_dir.case, CaseFile(case=case, device="cpu", inject=inject, profile=True))
        for rank in range(case.topology.world_size):
            documents.write(run_dir.profile(rank), RankProfileFile(profile=profile))

    profiled(case.id, case, make_profile())
    profiled(f"{case.id}.2", case, EAGER)
    profiled(f"{case.id}.3", case, make_profile(), inject="host-read")
    one_rank = case.replace(topology=Topology(processes_per_node=1))
    profiled(f"{case.id}-other", one_rank, make_profile())
    profiled(f"{case.id}.4", one_rank, make_profile())  # a case with another id
    assert newest_profile(store.profiled("1", case.id)) == launch_profile(*[EAGER] * case.topology.world_size)
