"""Tests that a whole night names the reviewed baselines that no case claims."""

from pathlib import Path

import pytest

from tests.suite import CASES, FAKE_DRY_RUNS, ID, batches, read_json, read_report, run, run_cpu, write_cases

pytestmark = pytest.mark.usefixtures("simulated")

LOST = ID.replace("b4", "b2")
ONE_LAUNCH = ("--perf-record-launches=1", "--perf-json=out.json", "--perf-report=out")
FAIL = "--perf-missing-baseline=fail"


@pytest.fixture
def reviewed(recorded: pytest.Pytester) -> pytest.Pytester:
    """Return `recorded` with its baseline reviewed, and with an empty baseline of a missing case."""
    local = recorded.path / ".perfsuite" / "baselines"
    local.rename(recorded.path / "baselines")
    (folder,) = (
        directory
        for directory in (recorded.path / "baselines").iterdir()
        if directory.name.startswith("cpu-")
    )
    (folder / f"{LOST}.json").write_text("{}")
    recorded.mkdir("bench_cases")
    return recorded


def unclaimed(suite: pytest.Pytester, *options: str, status: int = 0) -> list[str]:
    """Return the baselines without a case that a session reports. Every report must agree."""
    result = run(suite, "-p", "no:cacheprovider", *ONE_LAUNCH, *options, status=status)
    entries: list[str] = read_json(suite)["unclaimed"]
    has = "1 reviewed baseline has no case"
    assert (has in str(result.stdout)) == bool(entries)
    assert all(has in text for text in read_report(suite)) == bool(entries)
    return [entry.removeprefix("baselines/").partition("/")[2] for entry in entries]


def test_names_deleted_cases_and_fails_on_request(reviewed: pytest.Pytester) -> None:
    assert unclaimed(reviewed, "-m", "cpu") == [f"{LOST}.json: no case has this id"]
    assert unclaimed(reviewed, "-m", "cpu", FAIL, status=1) == [f"{LOST}.json: no case has this id"]
    assert unclaimed(reviewed, "-m", "cpu", FAIL, "--perf-shadow") == [f"{LOST}.json: no case has this id"]


@pytest.fixture
def only_counts(reviewed: pytest.Pytester) -> pytest.Pytester:
    """Return `reviewed`, but the missing case has a baseline of counts instead of times."""
    (times,) = reviewed.path.glob(f"baselines/cpu-*/{LOST}.json")
    counts = reviewed.path / "baselines" / "counts" / "cpu"
    counts.mkdir(parents=True, exist_ok=True)
    times.rename(counts / times.name)
    return reviewed


def test_names_a_lost_case_that_only_has_counts(only_counts: pytest.Pytester) -> None:
    assert unclaimed(only_counts, "-m", "cpu", FAIL, status=1) == [f"cpu/{LOST}.json: no case has this id"]


def test_names_counts_of_a_case_for_other_hardware(only_counts: pytest.Pytester) -> None:
    write_cases(only_counts, "[FAKE, FAKE.replace(micro_batch=2, hardware='a100-80gb')]")
    assert unclaimed(only_counts, "-m", "cpu") == [f"cpu/{LOST}.json: its case is now for a100-80gb"]


def test_names_a_lost_case_with_both_kinds_once(reviewed: pytest.Pytester) -> None:
    counts = reviewed.path / "baselines" / "counts" / "cpu"
    counts.mkdir(parents=True, exist_ok=True)
    (counts / f"{LOST}.json").write_text("{}")
    assert unclaimed(reviewed, "-m", "cpu") == [f"{LOST}.json: no case has this id"]


def test_a_case_for_other_hardware_is_named(reviewed: pytest.Pytester) -> None:
    write_cases(reviewed, "[FAKE, FAKE.replace(micro_batch=2, hardware='a100-80gb')]")
    assert unclaimed(reviewed, "-m", "cpu") == [f"{LOST}.json: its case is now for a100-80gb"]


@pytest.mark.parametrize("way", ["addopts", "hook", "ignore"])
def test_what_settings_leave_out_is_named(reviewed: pytest.Pytester, way: str) -> None:
    write_cases(reviewed, batches(4, 2))
    if way == "addopts":
        reviewed.makeini("[pytest]\naddopts = -k b4\n")
    elif way == "hook":
        reviewed.makeconftest("def pytest_collection_modifyitems(items):\n    items[:] = items[:1]\n")
    else:
        reviewed.makepyfile(test_more=CASES.replace("[FAKE, A100]", batches(2)))
        write_cases(reviewed)
        reviewed.makeini("[pytest]\naddopts = --ignore=test_more.py\n")
    (entry,) = unclaimed(reviewed, "-m", "cpu", FAIL, status=1)
    assert entry.startswith(f"{LOST}.json: ")


def test_mark_excluded_by_settings_is_fine(reviewed: pytest.Pytester) -> None:
    slow = "pytest.param(FAKE.replace(micro_batch=2), marks=pytest.mark.slow)"
    write_cases(reviewed, f"[FAKE, {slow}]")
    reviewed.makeini('[pytest]\nmarkers = slow\naddopts = -m "not slow"\n')
    result = run(reviewed, "-p", "no:cacheprovider", *ONE_LAUNCH, FAIL)
    result.stdout.fnmatch_lines(
        ["*1 reviewed baseline deselected*", f"  *{LOST}.json: deselected by the -m in pytest's settings"]
    )
    assert read_json(reviewed)["unclaimed"] == []


def test_a_mark_that_a_case_lacks_is_named(reviewed: pytest.Pytester) -> None:
    nightly = "pytest.param(FAKE, marks=pytest.mark.nightly)"
    write_cases(reviewed, f"[{nightly}, FAKE.replace(micro_batch=2)]")
    reviewed.makeini("[pytest]\nmarkers = nightly\naddopts = -m nightly\n")
    (entry,) = unclaimed(reviewed, FAIL, status=1)
    assert entry.startswith(f"{LOST}.json: its case was deselected")


def test_selection_by_environment_gets_no_remark(
    reviewed: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cases(reviewed, batches(4, 2))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k b4")
    assert unclaimed(reviewed, FAIL) == []


@pytest.mark.parametrize(
    "chosen", [("-k", "b4"), ("-qk", "b4"), ("test_cases.py",), ("-m", "not gpu"), ("--deselect", "nosuch")]
)
def test_who_chooses_cases_hears_nothing(reviewed: pytest.Pytester, chosen: tuple[str, ...]) -> None:
    assert unclaimed(reviewed, *chosen) == []


def test_a_shard_knows_the_cases_of_other_jobs(reviewed: pytest.Pytester) -> None:
    write_cases(reviewed, batches(4, 2))
    assert unclaimed(reviewed, "-m", "cpu", "--perf-shard=2/2") == []


@pytest.mark.parametrize(
    "option",
    ["--perf-shard=1/2", "--co", "--setup-plan", "--setup-only", "--fixtures", "--markers", "--help"],
)
def test_settings_may_not_reduce_sessions(
    suite: pytest.Pytester, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cases(suite, batches(4, 2))
    suite.makeini(f"[pytest]\naddopts = {option}\n")
    result = run(suite, "-m", "cpu", status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(["*is in addopts of *tox.ini*. Give it on the command line or *"])
    (suite.path / "tox.ini").unlink()
    monkeypatch.setenv("PYTEST_ADDOPTS", option, prepend=" ")
    assert suite.runpytest("-m", "cpu").ret != pytest.ExitCode.USAGE_ERROR
    monkeypatch.delenv("PYTEST_ADDOPTS")
    assert suite.runpytest("-m", "cpu", option).ret != pytest.ExitCode.USAGE_ERROR


def test_case_directory_counts_as_a_whole_night(reviewed: pytest.Pytester) -> None:
    (reviewed.path / "test_cases.py").rename(Path("bench_cases") / "test_cases.py")
    run_cpu(reviewed, "bench_cases", *ONE_LAUNCH)
    assert len(read_json(reviewed)["unclaimed"]) == 1
    assert unclaimed(reviewed, "bench_cases/test_cases.py") == []


def test_names_cases_that_moved_to_a_directory(reviewed: pytest.Pytester) -> None:
    reviewed.mkdir("cases2")
    (reviewed.path / "test_cases.py").rename(Path("bench_cases") / "test_cases.py")
    reviewed.makepyfile(**{"cases2/test_moved": CASES.replace("[FAKE, A100]", batches(2))})
    reviewed.makeini("[pytest]\nperf_cases = cases2\n")
    (entry,) = unclaimed(reviewed, "bench_cases", "-m", "cpu", FAIL, status=1)
    why = "no case in the directories of this session has this id. perf_cases names cases2 instead"
    assert entry == f"{LOST}.json: {why}"


def test_part_of_the_cases_says_nothing_of_others(reviewed: pytest.Pytester) -> None:
    part = reviewed.path / "bench_cases" / "llama"
    part.mkdir()
    (reviewed.path / "test_cases.py").rename(part / "test_cases.py")
    assert unclaimed(reviewed, "bench_cases/llama", "-m", "cpu", FAIL) == []


def test_other_tests_say_nothing_of_the_cases(reviewed: pytest.Pytester) -> None:
    reviewed.mkdir("tests")
    write_cases(reviewed, batches(8))
    (reviewed.path / "test_cases.py").rename(reviewed.path / "tests" / "test_cases.py")
    assert unclaimed(reviewed, "tests", "-m", "cpu") == []


@pytest.mark.nightly
def test_processes_of_xdist_tell_it(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    suite.makepyfile(test_cases=CASES.replace("Fake()", "DDP()"), conftest=FAKE_DRY_RUNS)
    folder = suite.path / "baselines" / "counts" / "dry-cpu"
    folder.mkdir(parents=True)
    (folder / "lost.json").write_text("{}")
    options = ("--perf-dry", "-m", "cpu", "-n", "1", "--benchmark-disable", "--perf-json=out.json")
    result = suite.runpytest_subprocess(*options)
    result.stdout.fnmatch_lines(["*perfsuite: 1 reviewed baseline has no case*"])
    assert read_json(suite)["unclaimed"] == ["baselines/counts/dry-cpu/lost.json: no case has this id"]


@pytest.mark.parametrize("way", ["hook", "moved", "addopts", "hardware"])
def test_no_case_beside_other_tests_is_no_pass(reviewed: pytest.Pytester, way: str) -> None:
    cases = reviewed.path / "bench_cases"
    (reviewed.path / "test_cases.py").rename(cases / "test_cases.py")
    (cases / "test_more.py").write_text("import pytest\n\n\n@pytest.mark.cpu\ndef test_more(): pass\n")
    if way == "hook":
        (cases / "conftest.py").write_text(
            "def pytest_collection_modifyitems(items):\n"
            "    items[:] = [item for item in items if item.name == 'test_more']\n"
        )
    elif way == "moved":
        (cases / "test_cases.py").rename(cases / "cases.py")
    elif way == "addopts":
        reviewed.makeini("[pytest]\naddopts = -k more\n")
    else:
        text = (cases / "test_cases.py").read_text()
        (cases / "test_cases.py").write_text(text.replace('hardware="cpu"', 'hardware="h100"'))
    result = run(reviewed, "-p", "no:cacheprovider", "bench_cases", "-m", "cpu", status=1)
    result.stdout.fnmatch_lines([f"*{ID}.json: no case is selected", "*nothing was measured*"])


def test_other_tests_alone_ask_for_no_case(reviewed: pytest.Pytester) -> None:
    (reviewed.path / "test_cases.py").unlink()
    reviewed.makepyfile(test_more="def test_more(): pass\n")
    result = run(reviewed, "-p", "no:cacheprovider", "test_more.py")
    result.stdout.no_fnmatch_line("*no case*")
    run(reviewed, "-p", "no:cacheprovider")
