"""Damages files that perfsuite reads, and looks for tracebacks, hangs and verdicts that got better by it.

Each file is damaged in many ways: bits are flipped, it is cut short, keys are lost or doubled, types are
swapped, numbers are huge or NaN, the encoding is another one, or it is a FIFO, a device or a directory. Each
command that reads that file runs in a process of its own. Its exit status and verdict are compared with those
of the undamaged file, which are bad on purpose: whatever is better then is a wrong green. Where the damage is
another valid file (a digit that became another digit) nobody could know: these rows are counted apart.

    python -m tests.benchmarks.damaged              # 2,000 files and 300 command lines
    python -m tests.benchmarks.damaged 200 30 7     # fewer, with another seed
"""

import contextlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perfsuite import documents
from perfsuite.cli.app import app
from perfsuite.errors import PerfsuiteError
from perfsuite.history import store
from perfsuite.launch.lock import LOCK_FILE
from perfsuite.results.baseline import Acceptance, Baseline
from tests import samples, simulated
from tests.suite import CASES, ID, waiver

LIMIT_S = 60  # seconds after which a command hangs; the longest takes two on an idle machine
MEMORY = 4 * 2**30  # bytes that a command may add to those of this process
ORDER = ("failed", "regressed", "inconclusive", "unhealthy", "waived", "recorded", "passed", "improved")
"""Verdicts, the worst first."""
INI = "[pytest]\nperf_missing_baseline = fail\nperf_max_launches = 4\nperf_strict = inconclusive\n"

NO_END = ("fifo", "device", "sparse")  # which pytest reads without end, if its ini file is one

Damage = Callable[[random.Random, bytes], bytes | str]


@dataclass(frozen=True)
class Said:
    """What a command left."""

    status: int
    verdict: str | None
    output: str

    @property
    def is_of_pytest(self) -> bool:
        """Whether pytest itself broke down, which reads its ini file before it loads any plugin."""
        return "in determine_setup" in self.output and "/perfsuite/perfsuite/" not in self.output

    @property
    def is_traceback(self) -> bool:
        """Whether an error reached the user that nobody meant to show."""
        return "Traceback (most recent call last)" in self.output or "INTERNALERROR" in self.output

    def is_better_than(self, other: "Said") -> bool:
        """Whether it is greener: by its exit status, or by its verdict."""
        if self.status == 0 and other.status != 0:
            return True
        if self.verdict is None or other.verdict is None:
            return self.status == 0 and other.verdict is not None
        return self.status in (0, other.status) and ORDER.index(self.verdict) > ORDER.index(other.verdict)


@dataclass(frozen=True)
class Target:
    """A file that is damaged, and the commands that read it."""

    file: str
    commands: Sequence[Sequence[str]]


def world(root: Path) -> list[Target]:
    """Make a project in which all is well, but for the results: the code is slower than its baseline."""
    root.mkdir()
    (root / "test_cases.py").write_text(textwrap.dedent(CASES).replace("[FAKE, A100]", "[FAKE]"))
    (root / "pytest.ini").write_text("[pytest]\n")
    gate = ("pytest", "-q", "-p", "no:cacheprovider", "test_cases.py")
    first = in_process(root, (*gate, "--perf-record-launches=5", "--perf-min-launches=5"))
    assert first.status == 0, first.output
    (recorded,) = root.glob(".perfsuite/baselines/*/*.json")
    known = documents.read(recorded, Baseline)
    launches = (
        one.replace(
            figures=one.figures.replace(
                tokens_per_s=3 * samples.known(one.figures.tokens_per_s),
                tokens_per_s_mean=3 * samples.known(one.figures.tokens_per_s_mean),
            )
        )
        for one in known.launches
    )
    faster = known.replace(
        launches=tuple(launches),
        accepted=Acceptance(by="me", date="2026-01-02T03:04:05+00:00", commit=None),
    )
    reviewed = root / "baselines" / recorded.parent.name / recorded.name
    documents.write(reviewed, faster)
    shutil.rmtree(root / ".perfsuite")
    (root / "pytest.ini").write_text(INI)
    (root / "perf-waivers.toml").write_text(waiver(tolerated="1%", until="2020-01-01"))
    no_baseline = root / "without"  # a second project: its case lacks the baseline that it has to have
    no_baseline.mkdir()
    shutil.copy(root / "test_cases.py", no_baseline)
    (no_baseline / "pytest.ini").write_text(INI)
    bad = samples.make_launches(*(0.5,) * 5, step_s_p50=0.25, step_s_mean=0.25)
    result = samples.make_result(*bad, before=samples.make_run())
    samples.write_session(root / "results", result)
    store.add(root / "history", root / "results" / "results.json")
    (session,) = (root / "history").glob("cpu*/*/*.json")
    (case,) = (root / "history" / "cases").glob("*.json")
    slow = {"tolerance": 0.03, "baseline": [[0.1] * 20] * 5, "launches": [[0.2] * 20] * 5}
    (root / "traces.jsonl").write_text(
        f"{json.dumps({**slow, 'noise': {'sigma': 0.01, 'degrees_of_freedom': 30}})}\n"
    )
    launch = root / "launch"
    samples.write_launch(launch, samples.make_report(0), samples.make_report(1, loss=(math.nan,) * 25))
    collect = ("collect", "launch")
    of_history = [("history", name, "--history", "history") for name in ("list", "failures")]
    return [
        Target(str(reviewed.relative_to(root)), [gate, gate, ("baseline", "list"), ("baseline", "show", ID)]),
        Target("perf-waivers.toml", [gate]),
        Target("pytest.ini", [gate, ("baseline", "list")]),
        Target("without/pytest.ini", [("without", *gate)]),
        Target(
            "results/results.json",
            [
                ("report", "results/results.json"),
                ("report", "results/results.json", "--json"),
                ("report", "results/results.json", "--report", "out"),
                ("export", "results/results.json", "--format", "hud"),
                ("history", "add", "--history", "new", "results/results.json"),
            ],
        ),
        Target(str(session.relative_to(root)), of_history),
        Target(str(case.relative_to(root)), of_history),
        Target("traces.jsonl", [("judge", "traces.jsonl"), ("judge", "traces.jsonl", "--json")]),
        Target("launch/rank-1.json", [collect]),
        Target("launch/rank-0.json", [collect]),
        Target("launch/launch-0.json", [collect]),
    ]


def _flip(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 4, 30))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def _spliced(draw: random.Random, content: bytes) -> bytes:
    begin = draw.randrange(len(content))
    return content[:begin] + content[begin + draw.randrange(1, 40) :]


def _doubled(draw: random.Random, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    return b"".join([*lines[: at + 1], *lines[at:]])


def _encoded(draw: random.Random, content: bytes) -> bytes:
    text = content.decode()
    return draw.choice((
        lambda: text.encode("utf-16"),
        lambda: text.encode("utf-32"),
        lambda: b"\xef\xbb\xbf" + content,
        lambda: text.replace("\n", "\r\n").encode(),
        lambda: content + b"\xff\xfe\x80",
        lambda: content.replace(b"a", b"\xe9", 3),
        lambda: content.replace(b" ", b"\0", 2),
    ))()  # fmt: skip


def _whole(draw: random.Random, content: bytes) -> bytes | str:
    return draw.choice((
        b"", b"\n", b"{}", b"[]", b"null", b"0", b"{", b"[" * 100_000, b'{"a":' * 20_000, b"9" * 10_000,
        b"NaN", b"\0" * 1000, content * 2, "fifo", "device", "directory", "dangling", "loop", "sparse",
        "unreadable socket",
    ))  # fmt: skip


ODD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\ud800", "\x1b[31m", [], {}, [[]], -1, 0, 1e308, 5e-324, -1e308, 10**30),
    *(10**400, float("nan"), float("inf"), "NaN", "Infinity", "-Infinity", "1", 2**63, -(2**63), "9" * 5000),
)


def _value(draw: random.Random, content: bytes) -> bytes:
    """Change a value or a key of JSON, or a value of lines `key = value`."""
    try:
        data = json.loads(content)
    except ValueError:
        lines = content.decode().splitlines()
        at = draw.choice([number for number, line in enumerate(lines) if "=" in line])
        odd = draw.choice(("", '""', "nan", "-1", "1e999", "9" * 5000, "[]", "yes", "\x1b", "1979-05-27"))
        lines[at] = draw.choice((f"{lines[at].partition('=')[0]}= {odd}", "", f"x{lines[at]}"))
        return "\n".join([*lines, ""]).encode()
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(inner, dict | list):
                visit(inner)

    visit(data)
    holder, key = draw.choice(places)
    how = draw.random()
    if how < 0.35:
        del holder[key]
    elif how < 0.45 and isinstance(holder, dict):
        holder[str(draw.choice(ODD))[:50]] = holder.pop(key)
    elif how < 0.5 and isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[key] = draw.choice(ODD)
    sys.set_int_max_str_digits(0)
    return json.dumps(data, indent=1).encode()


DAMAGES: tuple[tuple[int, Damage], ...] = (
    (5, _flip),
    (2, _cut),
    (2, _spliced),
    (1, _doubled),
    (2, _encoded),
    (2, _whole),
    (7, _value),
)


def put(file: Path, damage: bytes | str) -> None:
    """Leave the damaged file in place of the file."""
    file.unlink()
    if isinstance(damage, bytes):
        file.write_bytes(damage)
    elif damage == "fifo":
        os.mkfifo(file)
    elif damage == "device":
        file.symlink_to("/dev/zero")
    elif damage == "directory":
        file.mkdir()
    elif damage == "dangling":
        file.symlink_to("nowhere")
    elif damage == "loop":
        file.symlink_to(file.name)
    elif damage == "sparse":
        with file.open("wb") as made:
            made.truncate(10**12)
    else:
        os.mknod(file, 0o140600)  # a socket that nobody made


def is_other_value(before: bytes, damage: bytes | str) -> bool:
    """Whether the damage is another valid file: JSON of the same shape, in which finite figures differ.

    Of settings: text whose lines are settings, as somebody could have written them.
    """
    if isinstance(damage, str):
        return False
    if not before.startswith(b"{"):
        return bool(
            re.fullmatch(
                r"(\[+\w+\]+\n|[A-Za-z_]+ ?= ?\S[^\x00-\x1f]*\n|\n)*", damage.decode(errors="replace")
            )
        )
    try:
        then, now = documents.parse(before.decode()), documents.parse(damage.decode())
    except (ValueError, RecursionError):
        return False

    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(alike, a, b))
        is_plausible = not isinstance(b, float | int) or 1e-12 < abs(b) < 1e15 or a == b or b == 0
        return type(a) is type(b) and is_plausible

    return alike(then, now)


def in_process(root: Path, command: Sequence[str]) -> Said:
    """Run a command in a fork of this process, which has imported everything."""
    with tempfile.TemporaryFile("w+b") as output:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os._exit(_run(root, command))
        end = time.monotonic() + LIMIT_S
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Said(-1, None, "hangs")
            time.sleep(0.01)
        output.seek(0)
        text = output.read().decode(errors="backslashreplace")
    said = re.findall(r"\b(?:" + "|".join(ORDER) + r")\b", text)
    if command[-1] == "test_cases.py":  # what is said of each case, and no message that has such a word
        said = re.findall(r"^VERDICT (\w+)$", text, re.MULTILINE)
    verdict = min(said, key=ORDER.index, default=None)
    return Said(os.waitstatus_to_exitcode(found[1]), verdict, text)


def _run(root: Path, command: Sequence[str]) -> int:
    """Run a command of perfsuite, pytest or the reader of rank reports; its exit status."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    os.chdir(root)
    name, *words = command
    try:
        if name == "without":
            os.chdir("without")
            name, *words = words
        if name == "pytest":
            status = int(pytest.main(words))
        elif name == "collect":
            status = _collect(Path(*words))
        else:
            result = CliRunner().invoke(app, command)
            print(result.output)
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                traceback.print_exception(result.exception)
            status = result.exit_code
        for file in Path().glob(".perfsuite/runs/*/results.json") if name == "pytest" else ():
            results = json.loads(file.read_text())["results"]
            for each in results:
                print(f"VERDICT {each['excused'] or each['outcome']}")
        return status
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _collect(directory: Path) -> int:
    """Make a launch of the files in a directory, as the driver does: exit status 1 if it failed."""
    from perfsuite.analysis.collect import collect
    from perfsuite.results.run_dir import RunDir

    try:
        run = collect(
            RunDir(directory),
            samples.make_machine(),
            failure=None,
            started_at="2026-01-02T03:04:05+00:00",
            duration_s=1.0,
        )
    except PerfsuiteError as error:
        print(error)
        return 1
    print(run.failure)
    return int(run.failure is not None)


def odd_command(draw: random.Random) -> list[str]:
    """Return a command line that nobody meant."""
    names = (
        *(
            "report",
            "export",
            "judge",
            "plan",
            "history list",
            "history add",
            "history trend",
            "history failures",
        ),
        *("baseline list", "baseline show", "baseline diff", "baseline accept", "init", "github comment"),
        *("github issue", "slurm", "refresh", "nothing", ""),
    )
    words = (
        *(
            "",
            "-",
            "--",
            "--json",
            "/dev/zero",
            "/dev/null",
            "/proc/self/mem",
            ".",
            "..",
            "/",
            "\udc80",
            "\x1b[2J",
        ),
        *(
            "a" * 5000,
            "--tolerance",
            "nan",
            "-1",
            "1e999",
            "99999999999999999999",
            "--history",
            "--store",
        ),
        *(
            "--cases",
            "--since",
            "0000-00-00",
            "9999-99-99",
            "*",
            "[",
            "%",
            "{}",
            "\u202e",
            "--help",
            "-k",
            "and",
        ),
        *(
            "--format",
            "hud",
            "openmetrics",
            "results/results.json",
            "traces.jsonl",
            "--report",
            "--baselines",
        ),
        *(
            "fifo",
            "--hardware",
            "--baseline",
            "--tag",
            "HEAD",
            "no-such",
            "🙂",
            "'",
            '"',
            "$(id)",
            "\n",
            "--reason",
        ),
    )
    return [*draw.choice(names).split(), *draw.choices(words, k=draw.randrange(4))]


def main(count: int = 2000, commands: int = 300, seed: int = 39) -> int:
    """Print every row that is a traceback, a hang or a wrong green, and how many of each there are."""
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    with (
        contextlib.suppress(KeyboardInterrupt),  # Ctrl-C ends it, and the numbers are printed
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        simulated.patch(patch)
        patch.setattr("cpuinfo.get_cpu_info", dict)
        patch.setenv(LOCK_FILE, f"{directory}/lock")
        patch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -W ignore")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        root = Path(directory) / "world"
        targets = world(root)
        usual = {
            (target.file, tuple(each)): in_process(root, each)
            for target in targets
            for each in target.commands
        }
        for (file, command), said in usual.items():
            print(f"undamaged {file}: {' '.join(command)}: {said.status} {said.verdict or ''}")
            assert not said.is_traceback, said.output
        shutil.rmtree(root / ".perfsuite", ignore_errors=True)
        for number in range(count):
            target = targets[number % len(targets)]
            command = tuple(target.commands[number // len(targets) % len(target.commands)])
            there = Path(directory) / "trial"
            shutil.copytree(root, there, symlinks=True)
            content = (there / target.file).read_bytes()
            (damage,) = draw.choices([each for _, each in DAMAGES], [weight for weight, _ in DAMAGES])
            damaged = damage(draw, content)
            put(there / target.file, damaged)
            said = in_process(there, command)
            before = usual[target.file, command]
            row = f"{number} {damage.__name__[1:]} of {target.file}: {' '.join(command)}: {before.status} "
            row += f"{before.verdict or ''} -> {said.status} {said.verdict or ''}"
            counts["files"] += 1
            counts["read like the undamaged one"] += said.status == before.status
            if said.is_of_pytest or (
                damaged in NO_END and target.file.endswith(".ini") and command[-1] == "test_cases.py"
            ):
                counts["where pytest itself breaks down"] += 1
            elif said.status < 0:
                counts["hangs or killed"] += 1
                print(f"HANG {row}")
            elif said.is_traceback:
                counts["tracebacks"] += 1
                print(f"TRACEBACK {row}\n{said.output[-1500:]}")
            if damaged != content and said.is_better_than(before):
                is_other = is_other_value(content, damaged)
                counts["other valid files" if is_other else "wrong greens"] += 1
                print(f"{'other valid file' if is_other else 'WRONG GREEN'} {row}")
                if not is_other and isinstance(damaged, bytes):
                    _show_difference(content, damaged)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(there)
        os.mkfifo(root / "fifo")
        for _ in range(commands):
            words = odd_command(draw)
            said = in_process(root, words)
            counts["command lines"] += 1
            counts["hangs or killed"] += said.status < 0
            counts["tracebacks"] += said.is_traceback
            if said.status < 0 or said.is_traceback:
                print(f"COMMAND {words}: {said.status}\n{said.output[-1500:]}")
    for name in ("tracebacks", "hangs or killed", "wrong greens"):
        counts[name] += 0
    print(", ".join(f"{number} {name}" for name, number in counts.items()))
    return int(any(counts[name] for name in ("tracebacks", "hangs or killed", "wrong greens")))


def _show_difference(before: bytes, after: bytes) -> None:
    at = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
    print(f"   {before[max(0, at - 40) : at + 40]!r}\n-> {after[max(0, at - 40) : at + 40]!r}")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
