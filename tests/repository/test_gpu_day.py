"""Tests that the parts of the first day on a GPU name things that exist. The day itself cannot run here."""

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfsuite import FSDP2, documents
from perfsuite.results.outcome import Verdict
from tests.gpu import held
from tests.gpu.held import AGENT, main
from tests.gpu.test_day import BASE
from tests.processes import executable, output_of
from tests.samples import (
    make_figures,
    make_launches,
    make_result,
    make_run,
    make_session_file,
    metric_check,
)
from tests.twin_counts import counts, launch

DAY = Path(__file__).parents[1] / "gpu" / "day.sh"
PAGE = Path(__file__).parents[2] / "docs" / "develop" / "gpu-day.md"
SELECTIONS = sorted(set(re.findall(r"-k (\w+)", DAY.read_text())))
OPTIONS = sorted(set(re.findall(r"--perf-[\w-]+(?:=[\w%.=]+)?", DAY.read_text())))


@pytest.mark.launch
def test_each_part_selects_cases() -> None:
    words = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu/test_day.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    shown = output_of([sys.executable, *words], env=environment, stderr=None)
    assert [name for name in SELECTIONS if f"test_{name}[" not in shown] == []
    written = re.findall(r"`-k (\w+)`: (\d+) cases", PAGE.read_text())
    assert [name for name, _ in written] == ["wide", "libraries"]
    assert written == [(name, str(shown.count(f"test_{name}["))) for name, _ in written]


def test_its_options_are_those_of_pytest(pytestconfig: pytest.Config) -> None:
    names = {option: option.partition("=")[0][2:].replace("-", "_") for option in OPTIONS}
    assert [option for option, name in names.items() if name not in vars(pytestconfig.option)] == []


@pytest.mark.parametrize("part", ["", "8"])
def test_lists_its_parts(part: str) -> None:
    printed = output_of(f"'{DAY}' '{part}' 2>&1 >/dev/null", shell=True, status=2)
    assert f"name a part, dry or 1 to 7; got '{part}'" in printed


def parts_of_the_day() -> list[tuple[str, str, str]]:
    """Return the number, the minutes and the commands of each part."""
    return re.findall(r"^(\d)\)\n    begin (\d+)\n(.*?)^    ;;", DAY.read_text(), re.MULTILINE | re.DOTALL)


def test_its_first_parts_end_within_45_minutes() -> None:
    parts = parts_of_the_day()
    assert [part for part, _, _ in parts] == [*"1234567"]
    together = sum(int(minutes) for _, minutes, _ in parts[:6])
    assert together <= 45
    assert f"parts 1 to 6 take at most {together} minutes" in DAY.read_text().replace("\n# ", " ")


@pytest.mark.parametrize(("part", "minutes", "body"), parts_of_the_day(), ids=[*"1234567"])
def test_the_page_gives_the_minutes_of_a_part(part: str, minutes: str, body: str) -> None:
    (section,) = re.findall(rf"^## Part {part}: .*?(?=^\|)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert f"{minutes} minutes" in section


@pytest.mark.parametrize(("part", "minutes", "body"), parts_of_the_day(), ids=[*"1234567"])
def test_a_part_ends_within_its_minutes(part: str, minutes: str, body: str) -> None:
    """The length of a part is the sum of the time limits of its commands.

    The loop of part 5 runs three times.
    """
    loop = re.search(r"for launch in 1 2 3.*?done", body, re.DOTALL)
    repeated = loop[0] if loop else ""
    limits = [int(limit) for limit in re.findall(r"(?:timeout|sleep) (\d+)", body + 2 * repeated)]
    assert sum(limit for limit in limits if limit < 600) <= 60 * int(minutes)


A_GPU = "case $* in -L) echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'; exit ;; esac"
"""Line of a stand-in for nvidia-smi that lists a GPU."""


def on_machine(directory: Path, python: str, *nvidia_smi: str, **variables: str) -> dict[str, str]:
    """Return the environment of a machine with this interpreter, and with nvidia-smi if it has lines.

    All programs that the script needs are links, so that a real nvidia-smi is never in PATH.
    """
    for name in ("bash", "dirname", "env", "grep", "head", "mkdir", "mv", "tee", "timeout"):
        (directory / name).symlink_to(str(shutil.which(name)))
    executable(directory / "tar", "exit 0")
    executable(directory / "nproc", "echo 16")
    if nvidia_smi:
        executable(directory / "nvidia-smi", *nvidia_smi)
    return {"PATH": str(directory), "PYTHON": str(executable(directory / "python", python)), **variables}


@pytest.mark.launch
@pytest.mark.parametrize(
    ("python", "nvidia_smi", "variables", "said"),
    [
        ("exit 1", (A_GPU,), {}, "perfsuite is not installed for {python}: run make .venv/installed"),
        ("exit 0", (), {}, "part 1 needs a GPU, and there is no nvidia-smi in PATH"),
        ("exit 0", ("echo No devices were found",), {}, "part 1 needs a GPU, and nvidia-smi -L lists none"),
        (
            "exit 0",
            (A_GPU,),
            {"CUDA_VISIBLE_DEVICES": ""},
            "part 1 needs a GPU, and CUDA_VISIBLE_DEVICES='' hides every GPU",
        ),
    ],
)
def test_a_part_that_cannot_run_is_one_sentence(
    tmp_path: Path, python: str, nvidia_smi: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    environment = on_machine(tmp_path, python, *nvidia_smi, **variables)
    printed = output_of([str(DAY), "1", str(tmp_path / "out")], env=environment, status=2)
    assert printed == f"tests/gpu/day.sh: {said.format(python=environment['PYTHON'])}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.launch
@pytest.mark.parametrize(("ended", "status"), [(0, 0), (1, 1), (2, 1)])
def test_part_dry_needs_no_gpu(tmp_path: Path, ended: int, status: int) -> None:
    """An interrupted part leaves no predictions, so that it is repeated."""
    out = tmp_path / "out"
    python = f'case "$*" in *pytest\\ -q*) echo "$@"; echo > {out}/dry-new.json; exit {ended} ;; esac'
    printed = output_of([str(DAY), "dry", str(out)], env=on_machine(tmp_path, python), status=status)
    assert "--perf-dry" in printed
    assert (out / "dry.json").exists() == (ended < 2)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("has_xdist", "said", "option"),
    [
        (True, "about 6 minutes, with 8 of the 16 cores, and uses no GPU", "--numprocesses=8"),
        (False, "about 36 minutes, with 1 of the 16 cores, and uses no GPU", ""),
    ],
)
def test_part_dry_says_how_long_it_takes(tmp_path: Path, has_xdist: bool, said: str, option: str) -> None:
    """Eighteen cases take about two minutes each."""
    python = f'case "$*" in *xdist*) exit {int(not has_xdist)} ;; *pytest\\ -q*) echo "$@" ;; esac'
    printed = output_of([str(DAY), "dry", str(tmp_path / "out")], env=on_machine(tmp_path, python))
    first, _, rest = printed.strip().partition("\n")
    assert first == f"=== part dry takes {said}"
    assert ("--numprocesses" in rest) == has_xdist
    assert option in rest


@pytest.mark.launch
@pytest.mark.parametrize(("exists", "parts"), [(True, "1 2 3 4 5 6 7"), (False, "dry 1 2 3 4 5 6 7")])
def test_gpu_day_makes_predictions_once(tmp_path: Path, exists: bool, parts: str) -> None:
    (tmp_path / "tests/gpu").mkdir(parents=True)
    executable(tmp_path / "tests/gpu/day.sh", 'echo "$1"')
    shutil.copy(DAY.parents[2] / "Makefile", tmp_path)
    (tmp_path / "out").mkdir()
    if exists:
        (tmp_path / "out/dry.json").touch()
    words = ["make", "--silent", "--old-file=.venv/installed", "gpu-day"]
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    assert output_of(words, env=environment, cwd=tmp_path).split() == parts.split()


@pytest.mark.launch
@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ("HELD", "HELD", 0),
        ("NOT HELD", "HELD", 1),
        ("HELD", "NOT HELD", 1),
        ("NOT HELD", "NOT SEEN", 1),
        ("NOT SEEN", "NOT HELD", 1),
        ("NOT SEEN", "HELD", 3),
    ],
)
def test_exit_status_is_the_worst_answers(tmp_path: Path, first: str, second: str, status: int) -> None:
    """Part 3 has two checks."""
    answers = f'case "$*" in *held\\ recorded*) echo "{first} (recorded)" ;; '
    answers += f'*held\\ graphs*) echo "{second} (graphs)" ;; esac'
    environment = on_machine(tmp_path, answers, A_GPU)
    output_of([str(DAY), "3", str(tmp_path / "out")], env=environment, status=status)
    assert (tmp_path / "out/held.txt").read_text() == f"{first} (recorded)\n{second} (graphs)\n"


STAND_IN = """
case "$*" in
    *held\\ expect\\ quiet) exec {python} "$@" ;;
    *tests.gpu.held*) echo "$@" > {asked}; cat {answers} ;;
    *clock*) echo clock ;;
    *) echo "$@" ;;
esac
"""


@pytest.fixture
def python_of_held(tmp_path: Path) -> Iterator[Path]:
    """Return an interpreter for `python -m tests.gpu.held`. One call is real.

    The others are answered in this process, because each of them would import perfsuite.
    """
    asked = tmp_path / "asked"
    answers = tmp_path / "answers"
    for pipe in (asked, answers):
        os.mkfifo(pipe)

    def answer() -> None:
        for words in iter(lambda: asked.read_text().split(), []):
            try:
                said = main(words[2:])
            except Exception as error:
                said = repr(error)
            answers.write_text(f"{said}\n")

    thread = threading.Thread(target=answer)
    thread.start()
    text = STAND_IN.format(python=sys.executable, asked=asked, answers=answers)
    yield executable(tmp_path / "python", text)
    asked.write_text("")
    thread.join()


@pytest.mark.launch
def test_every_part_says_what_it_expects_and_saw(python_of_held: Path, tmp_path: Path) -> None:
    """Nothing is measured, so every answer is `NOT SEEN`."""
    for name in ("sleep", "pgrep"):
        executable(tmp_path / name, "exit 0")
    executable(tmp_path / "nvidia-smi", A_GPU, "case $* in *--lock-gpu-clocks*) exit 1 ;; esac")
    executable(tmp_path / "tar", "exit 0")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(python_of_held),
        "CUDA_VISIBLE_DEVICES": "0",
    }
    for part in ("dry", *"1234567"):
        out = tmp_path / f"out-{part}"
        printed = output_of([str(DAY), part, str(out)], env=environment, status=0 if part == "dry" else 3)
        assert re.match(rf"\n=== part {part} takes (about|at most) \d+ minutes", printed)
        expected = re.findall(r"^EXPECTED \((.*?)\): \S", printed, re.MULTILINE)
        answered = re.findall(r"^NOT SEEN \((.*?)\): \S", printed, re.MULTILINE)
        clocks = ["locked"] if part == "6" else []
        assert sorted([*expected, *clocks]) == sorted(answered), printed
        assert (part == "dry") == (not expected)


@pytest.mark.launch
@pytest.mark.parametrize("ending", ["true", "kill -TERM $PPID", "kill -INT $PPID"])
def test_locked_clocks_never_stay_locked(tmp_path: Path, ending: str) -> None:
    """The clocks are reset even if the script is ended. Only the first of the visible GPUs is touched."""
    log = tmp_path / "log"
    python = executable(
        tmp_path / "python", f'echo "python $*" >> {log}', 'case "$*" in *clock*) echo x ;; esac'
    )
    lock = f"case $* in *--lock-gpu*) {ending} ;; esac"
    executable(tmp_path / "nvidia-smi", A_GPU, f'echo "$*" >> {log}', lock)
    for name in ("sleep", "pgrep", "tar"):
        executable(tmp_path / name, "exit 0")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(python),
        "CUDA_VISIBLE_DEVICES": "3,4",
    }
    # Nothing was seen, because the stand-ins measure nothing.
    output_of([str(DAY), "6", str(tmp_path / "out")], env=environment, status=3 if ending == "true" else 130)
    lines = [line for line in log.read_text().splitlines() if " -c " not in line]
    locked = lines.index("-i 3 --lock-gpu-clocks=900")
    assert "-i 3 --reset-gpu-clocks" in lines[locked:]
    assert "-k noise --perf-record-launches=1" in lines[0], (
        "changed clocks are listed only if there is a baseline"
    )
    assert any("locked.json" in line for line in lines[locked:]) == (ending == "true")


def session(tmp_path: Path, *measured: Any, name: str = "results.json", **changes: Any) -> str:
    """Return the file of a session with these results."""
    file = tmp_path / name
    documents.write(file, make_session_file(*measured, **changes))
    return str(file)


def of_runs(*runs: Any, **verdict: Any) -> Any:
    made = Verdict(**{"outcome": "recorded", "launches": len(runs), **verdict})
    return make_result(*runs, verdict=made)


def check_of(change: float) -> Any:
    check = metric_check(metric="tokens_per_s", change=change)
    return of_runs(make_run(), outcome="passed", checks=(check,))


SLOPE = {"name": "resident memory", "unit": "bytes", "per_step": 9.0}
WHOLE = {"spans_s": {"start-up": 9.0}, "data_wait_s": 0.1}
OOM = {"outcome": "failed", "failure": "out_of_memory"}
CLOCK = "SM clock in the measured window: 1980 -> 900 MHz (-55%)"
SHARED = {"outcome": "unhealthy", "reasons": ("other processes held 2 GiB",)}


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ("recorded", of_runs(make_run()), of_runs(make_run(), outcome="failed")),
        ("quiet", of_runs(*make_launches(1, 1.001, 1.002)), of_runs(*make_launches(1, 1.001, 1.01))),
        ("slower", check_of(-0.05), check_of(-0.03)),
        ("sampler", check_of(0.004), check_of(-0.01)),
        ("oom", of_runs(make_run(), **OOM), of_runs(make_run(), outcome="failed", failure="crash")),
        ("unhealthy", of_runs(make_run(), **SHARED), of_runs(make_run(), outcome="passed")),
        ("locked", of_runs(make_run(), changed=(CLOCK,)), of_runs(make_run(), **SHARED)),
        (
            "trends",
            of_runs(make_run(figures=make_figures(**WHOLE), slopes=({**SLOPE, "interval": (-1, 9)},))),
            of_runs(make_run(figures=make_figures(**WHOLE), slopes=({**SLOPE, "interval": (1, 9)},))),
        ),
    ],
)
def test_an_expectation_holds_or_not(tmp_path: Path, check: str, good: Any, bad: Any) -> None:
    assert main([check, session(tmp_path, good)]).startswith(f"HELD ({check}): ")
    assert main([check, session(tmp_path, bad)]).startswith(f"NOT HELD ({check}): ")
    assert main([check, str(tmp_path / "missing.json")]).startswith(f"NOT SEEN ({check}): ")
    assert main(["expect", check]).startswith(f"EXPECTED ({check}): ")


def wide(speed: float = 1.0, peak_gib: float = 20, mfu: float | None = None, **changes: Any) -> Any:
    """Return a recorded case of part 2."""
    figures = make_figures(tokens_per_s=speed, peak_memory_bytes=peak_gib * 2**30, mfu=mfu)
    case = BASE.replace(**changes)
    return of_runs(make_run(case=case, figures=figures, loss=(3.0,) * 30))


def checkpointed(*peaks: float) -> list[Any]:
    names = ("full", "every-2", "selective-op", "none")
    pairs = zip(peaks, names, strict=True)
    return [wide(peak_gib=peak, activation_checkpointing=name, framework=FSDP2()) for peak, name in pairs]


def losing(loss: float) -> Any:
    measured = wide(framework=FSDP2())
    return measured.replace(runs=(measured.runs[0].replace(loss=(3.0, loss, *(3.0,) * 6, 99.0)),))


@pytest.mark.parametrize(
    ("check", "good", "bad", "unseen"),
    [
        ("losses", [wide(), losing(3.02)], [wide(), losing(3.04)], [wide()]),
        ("memory", checkpointed(20, 23, 22, 27), checkpointed(20, 23, 28, 27), checkpointed(1, 2, 2, 3)[:3]),
        ("compiled", [wide(), wide(1.2, compile=True)], [wide(), wide(1.3, compile=True)], [wide()]),
        ("fp32", [wide(mfu=0.6, precision="fp32")], [wide(mfu=1.1, precision="fp32")], [wide(mfu=0.4)]),
        ("llamas", [wide(mfu=0.4)], [wide(mfu=0.4), wide(mfu=0.3, compile=True)], [wide()]),
    ],
)
def test_cases_are_compared_with_each_other(
    tmp_path: Path, check: str, good: list[Any], bad: list[Any], unseen: list[Any]
) -> None:
    assert main([check, session(tmp_path, *good)]).startswith(f"HELD ({check}): ")
    assert main([check, session(tmp_path, *bad)]).startswith(f"NOT HELD ({check}): ")
    assert main([check, session(tmp_path, *unseen)]).startswith(f"NOT SEEN ({check}): ")


def test_losses_of_pure_bf16_may_differ(tmp_path: Path) -> None:
    pure = wide(precision="bf16")
    pure = pure.replace(runs=(pure.runs[0].replace(loss=(9.0,) * 30),))
    assert main(["losses", session(tmp_path, wide(), losing(3.0), pure)]).startswith("HELD")


def test_peaks_are_compared_with_the_dry_run(tmp_path: Path) -> None:
    dry = session(tmp_path, wide(peak_gib=20), name="dry.json")
    assert main(["peak-as-dry", session(tmp_path, wide(peak_gib=20.9)), dry]).startswith("HELD")
    assert main(["peak-as-dry", session(tmp_path, wide(peak_gib=21.1)), dry]).startswith("NOT HELD")
    assert main(["peak-as-dry", session(tmp_path), dry]).startswith("NOT SEEN")


CLOCK_LINES = """under the clock / bare: 1.00010  [0.999, 1.007]
sum of the steps / host's clock: 0.99997
profiler / clock: 1.01400
synchronised / clock: 1.01200
peak of torch / of perfsuite: 1.000000000
last peak / first peak: 1.000000000
outside the allocator, GiB: 1.31
attention and loss kernels: {'cudnn_generated_fort_native_sdpa_sm90'}
"""


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "", "HELD (clock): 8 lines"),
        ("1.00010", "1.00400", "NOT HELD (clock): under the clock / bare: 1.004"),
        ("first peak: 1.0", "first peak: 1.1", "NOT HELD (clock): last peak / first peak: 1.1"),
        ("cudnn_generated_fort_native_sdpa", "softmax", "NOT HELD (clock): kernels: "),
        ("outside the allocator, GiB: 1.31\n", "", "NOT SEEN (clock): no line with outside the allocator"),
    ],
)
def test_the_clock_must_agree(tmp_path: Path, before: str, after: str, said: str) -> None:
    file = tmp_path / "clock.txt"
    file.write_text(CLOCK_LINES.replace(before, after) if before else CLOCK_LINES)
    assert main(["clock", str(file)]).startswith(said)


def test_the_clock_prints_what_is_judged() -> None:
    printed = DAY.with_name("clock.py").read_text()
    assert [name for name in (*held.CLOCK, held.KERNELS) if f"{name}: {{" not in printed] == []


def test_counts_are_compared_with_the_dry_run(tmp_path: Path) -> None:
    dry = session(tmp_path, of_runs(launch(counts())), name="dry.json")
    assert main(["as-dry", session(tmp_path, of_runs(launch(counts()))), dry]) == (
        "HELD (as-dry): 1 cases alike"
    )
    other = session(tmp_path, of_runs(launch(counts(host_reads={"forward": 2}))))
    assert main(["as-dry", other, dry]).startswith("NOT HELD (as-dry): fake-")
    assert main(["as-dry", session(tmp_path), dry]).startswith("NOT SEEN")


def test_graphs_must_end_cleanly(tmp_path: Path) -> None:
    def graphs(**fields: Any) -> Any:
        return of_runs(make_run(**fields)).replace(case_id="torchtitan-no_disable_cuda_graphs")

    assert main(["graphs", session(tmp_path, graphs(hidden=("replayed",)))]).endswith("1 recorded; replayed")
    late = graphs(notes=("rank 0 died after its report was written",))
    assert main(["graphs", session(tmp_path, late)]).startswith("NOT HELD")
    assert main(["graphs", session(tmp_path, of_runs(make_run()))]).startswith("NOT SEEN")


def test_warm_caches_start_sooner(tmp_path: Path) -> None:
    def launched(directory: str, speed: float, start_s: float) -> None:
        figures = make_figures(tokens_per_s=speed, spans_s={"start-up": start_s})
        (tmp_path / directory).mkdir(exist_ok=True)
        session(tmp_path / directory, of_runs(make_run(figures=figures)), name="1.json")

    words = ["caches", str(tmp_path / "cold"), str(tmp_path / "warm")]
    launched("cold", 0, 30)
    launched("warm", 0, 10)
    assert main(words).startswith("NOT SEEN"), "no speed was measured"
    (tmp_path / "warm/1.json").unlink()
    launched("cold", 1000, 30)
    assert main(words).startswith("NOT SEEN")
    launched("warm", 1010, 10)
    assert main(words).startswith("HELD (caches): warm +1.00%")
    launched("warm", 1100, 10)
    assert main(words).startswith("NOT HELD")
    launched("warm", 1000, 40)
    assert main(words).startswith("NOT HELD")


AGENTS = (
    "python -m perfsuite.node.agent /home/x/.perfsuite/launch-1",
    "python -c from multiprocessing.forkserver import main; main(5, 6, ['perfsuite.node.preload'], **{})",
)
STRANGERS = (
    "tee /home/x/perfsuite/out/killed.txt",
    "/x/perfsuite/.venv/bin/python -m pytest",
    "vim -m perfsuite",
)


def test_it_looks_for_agents_only() -> None:
    (pattern,) = re.findall(r'pgrep .*-- "(.*)"', DAY.read_text())
    assert pattern == AGENT
    assert all(re.search(pattern, line) for line in AGENTS)
    assert not any(re.search(pattern, line) for line in STRANGERS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 MiB\n", "HELD (free): 0 MiB; no process"),
        ("39891 MiB\n", "NOT HELD (free): 39891 MiB"),
        (f"0 MiB\n77 {AGENTS[0]}\n", "NOT HELD (free): 0 MiB; 77 python"),
        (f"0 MiB\n78 {AGENTS[1]}\n", "NOT HELD (free): 0 MiB; 78 python"),
        ("0 MiB\n9 tee /home/x/perfsuite/out/killed.txt\n", "HELD (free): 0 MiB; no process"),
        ("", "NOT SEEN (free): nvidia-smi did not answer"),
    ],
)
def test_memory_must_be_free_after_sigkill(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "killed.txt"
    file.write_text(text)
    assert main(["free", str(file)]).startswith(said)


def test_a_failed_check_is_named(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    rows = [{"check": "noise", "status": "fail", "found": "9%"}, {"check": "x", "status": "unknown"}]
    file.write_text(json.dumps({"rows": rows}))
    assert main(["rows", str(file)]) == "NOT HELD (rows): noise: 9%"
    file.write_text(json.dumps({"rows": rows[1:]}))
    assert main(["rows", str(file)]) == "HELD (rows): 1 checks"
    file.write_text("")
    assert main(["rows", str(file)]).startswith("NOT SEEN")


@pytest.mark.launch
def test_one_arm_has_no_sampler() -> None:
    """The sampler is turned off only in agents, so ranks need not import it."""
    code = "from perfsuite.node import health_sampler; print(health_sampler.EVERY_S)"
    environment = {**os.environ, "PYTHONPATH": str(DAY.parent / "no_sampler")}
    assert (
        output_of([sys.executable, "-c", code, "perfsuite.node.agent"], env=environment) == "1000000000.0\n"
    )
    assert output_of([sys.executable, "-c", code], env=environment) == "0.25\n"
