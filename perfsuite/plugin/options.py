"""The plugin's options: what pytest accepts, and the checked `Options` of a session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from perfsuite.case.fault import Fault
from perfsuite.errors import PerfsuiteError
from perfsuite.launch.quiet import WAIT_S
from perfsuite.launch.slurm.settings import PREFIX, read_ini
from perfsuite.results.store import BASELINES, STORE
from perfsuite.session import Options, Session
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.paired_test import MAX_PAIRS, MIN_CHANGED
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES

SESSION = pytest.StashKey[Session]()
"""The session that the options describe."""
NO_BASELINE = ("record", "fail")
MOST_DIGITS = 9
"""Of a whole number: with more it is a slip, and with some thousands Python does not read it."""
SLURM_KEYS = ("options", "wait_start")
"""Ini keys, after `perf_slurm_`, that `perfsuite slurm submit` reads: pytest must know them, too."""
SLURM_STEP_KEYS = ("srun_options", "python")
"""Ini keys, after `perf_slurm_`, that the launcher slurm reads."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the `--perf-*` options; those that a repository may want to fix have an ini key, too."""
    group = parser.getgroup("perfsuite", "performance regression tests of distributed training")
    group.addoption("--perf-json", metavar="FILE", help="write every verdict and figure to FILE as JSON")
    group.addoption(
        "--perf-report", metavar="DIR", help="write a report to DIR: index.html, and summary.md for CI"
    )
    group.addoption(
        "--perf-no-baseline",
        choices=NO_BASELINE,
        help="a case without a baseline: record one in the store (default), or fail",
    )
    group.addoption("--perf-store", metavar="DIR", help="local baselines and run files (default: .perfsuite)")
    group.addoption("--perf-baselines", metavar="DIR", help="reviewed baselines (default: baselines)")
    group.addoption(
        "--perf-inject",
        metavar="FAULT",
        help="inject a fault to test the gate, for example slowdown=30%%; such runs are never recorded",
    )
    group.addoption(
        "--perf-against",
        metavar="ARM",
        help="compare with another environment in place of baselines: launches alternate between ARM and "
        "this one. ARM: NAME=VALUE, path/to/python, a git commit or COMMIT:LOCKFILE, or several with spaces "
        "between them",
    )
    group.addoption(
        "--perf-max-pairs",
        metavar="N",
        help=f"with --perf-against: most pairs of launches, {MIN_CHANGED} to {MAX_PAIRS} (the default)",
    )
    group.addoption(
        "--perf-dry",
        action="store_true",
        help="run every case dry instead of launching it: at its full size, in one process, without its "
        "hardware; what a step does is counted and judged, nothing is timed",
    )
    group.addoption(
        "--perf-cases", metavar="FILE", help="write the selected cases to FILE as JSON (with --collect-only)"
    )
    group.addoption(
        "--perf-no-counts",
        action="store_true",
        help="do not count what a step does (collectives, FLOPs, kernels, memory): nothing of it is judged",
    )
    group.addoption(
        "--perf-explain",
        action="store_true",
        help="launch a slower case once more, to profile some steps and say what they do differently; also a "
        "case whose launches may become a baseline, which is compared with then",
    )
    group.addoption(
        "--perf-max-launches",
        metavar="N",
        help=f"launches at the most until a case is inconclusive (default {MAX_LAUNCHES}); "
        "1 or 2 are a quick look, which never shows a regression by times",
    )
    group.addoption(
        "--perf-min-launches", metavar="N", help="launches at the least: 5 or more to accept as a baseline"
    )
    group.addoption(
        "--perf-record-launches",
        metavar="N",
        help="launches of a case without a baseline (default 3): 1 only shows that it runs",
    )
    group.addoption(
        "--perf-wait-quiet",
        metavar="SECONDS",
        help="where others used the machine in a launch, wait so long at the most until they end "
        f"(default {WAIT_S:.0f}; 0: launch again at once)",
    )
    group.addoption(
        "--perf-allow-shared",
        action="store_true",
        help="where others use the machine, do not wait but show the figures, marked: they are neither "
        "judged nor recorded",
    )
    group.addoption(
        "--perf-no-wait",
        action="store_true",
        help="fail where another session measures on this machine, instead of waiting until it ends",
    )
    group.addoption(
        "--perf-launcher",
        metavar="NAME",
        help="what starts the processes of a case: local, slurm (inside an allocation, on its nodes), or "
        "one of another package (default: slurm in an allocation of several nodes, else local)",
    )
    group.addoption(
        "--perf-resume",
        action="store_true",
        help="go on with the newest session of the store: cases that it decided, for the same commit, "
        "hardware, environment and options, are shown and not measured again",
    )
    group.addoption(
        "--perf-no-preflight",
        action="store_true",
        help="launch cases of several nodes without looking at the nodes before",
    )
    group.addoption("--perf-strict-improved", action="store_true", help="fail where a case improved")
    group.addoption("--perf-strict-inconclusive", action="store_true", help="fail where it is not known")
    group.addoption(
        "--perf-min-judged",
        metavar="SHARE",
        help="fail the session if fewer of its cases are judged, as 90%% or 0.9: inconclusive and unhealthy "
        "ones are not (default 0: one is enough)",
    )
    parser.addini("perf_min_judged", "as --perf-min-judged", default="0")
    parser.addini("perf_max_launches", "as --perf-max-launches", default=str(MAX_LAUNCHES))
    parser.addini("perf_min_launches", "as --perf-min-launches", default="1")
    parser.addini("perf_record_launches", "as --perf-record-launches", default="3")
    parser.addini("perf_wait_quiet", "as --perf-wait-quiet", default=f"{WAIT_S:.0f}")
    parser.addini("perf_explain", "as --perf-explain", type="bool", default=False)
    parser.addini("perf_no_baseline", "as --perf-no-baseline", default="record")
    parser.addini("perf_launcher", "as --perf-launcher", default="")
    for name in SLURM_KEYS:
        parser.addini(f"{PREFIX}{name}", "as that option of perfsuite slurm submit", default="")
    for name in SLURM_STEP_KEYS:
        parser.addini(f"{PREFIX}{name}", "how each launch is started on Slurm's nodes", default="")
    parser.addini("perf_store", "as --perf-store, from the root directory", default=str(STORE))
    parser.addini("perf_baselines", "as --perf-baselines, from the root directory", default=str(BASELINES))


def _check_values(config: pytest.Config) -> None:
    """Raise `UsageError` for what is no value, and for a path that no file can have."""
    for name, value in vars(config.option).items():
        if name.startswith("perf_") and value == []:  # what argparse makes of two dashes
            raise pytest.UsageError(f"--{name.replace('_', '-')}=--: give a value, or leave the option out")
    for name in ("json", "report", "store", "baselines", "cases"):
        text = config.getoption(f"--perf-{name}")
        try:
            os.stat(text or ".")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", error)
            raise pytest.UsageError(f"--perf-{name}={text[:80]}: {reason}: give another path") from None


def options(config: pytest.Config) -> Options:
    """The options that the user chose. Raises `UsageError` for a bad one, which says what is allowed."""
    _check_values(config)

    def option(name: str) -> str:
        """The value of the command line, else that of the ini file."""
        value = config.getoption(f"--perf-{name}") or config.getini(f"perf_{name.replace('-', '_')}")
        return str(value)

    def number(name: str, least: int) -> int:
        text = option(name)
        if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < least:
            what = f"a whole number, {least} or more, of at most {MOST_DIGITS} digits"
            raise pytest.UsageError(f"--perf-{name}={text[:40]}: give {what}")
        return int(text)

    def share(name: str) -> float:
        text = option(name)
        with contextlib.suppress(ValueError):
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
            if 0 <= value <= 1:
                return value
        raise pytest.UsageError(f"--perf-{name}={text}: give a share from 0% to 100%, or from 0 to 1")

    if (no_baseline := option("no-baseline")) not in NO_BASELINE:
        raise pytest.UsageError(f"perf_no_baseline={no_baseline}: give {' or '.join(NO_BASELINE)}")
    inject = config.getoption("--perf-inject")
    for other in ("--perf-inject", "--perf-no-counts", "--perf-explain"):
        if config.getoption("--perf-dry") and config.getoption(other):
            raise pytest.UsageError(f"--perf-dry with {other}: a dry run only counts; leave one of them out")
    if config.getoption("--perf-dry") and config.getoption("--perf-resume"):
        raise pytest.UsageError(
            "--perf-dry with --perf-resume: only launches are resumed; leave one of them out"
        )
    if against := config.getoption("--perf-against"):
        for other in ("--perf-dry", "--perf-resume", "--perf-cases"):
            if config.getoption(other):
                raise pytest.UsageError(
                    f"--perf-against={against} with {other}: two arms can only be launched, in a session of "
                    "their own; leave one of them out"
                )
    with usage_error():
        if inject:
            Fault.parse(inject)
    if (file := config.getoption("--perf-json")) and Path(file).is_dir():
        raise pytest.UsageError(f"--perf-json {file} is a directory: give a file")
    if (directory := config.getoption("--perf-report")) and Path(directory).is_file():
        raise pytest.UsageError(f"--perf-report {directory} is a file: give a directory")
    policy = Policy(
        max_launches=number("max-launches", 1),
        min_launches=number("min-launches", 1),
        record_launches=number("record-launches", 1),
    )
    if policy.most < FEWEST_LAUNCHES:  # a quick look is one, whatever there is to see
        records = min(policy.record_launches, policy.most)
        policy = replace(policy, record_launches=records, max_unhealthy=policy.most)
    root = root_of(config)
    return Options(
        root=root,
        store=root / option("store"),
        baselines=root / option("baselines"),
        policy=policy,
        inject=inject,
        counts=not config.getoption("--perf-no-counts"),
        explain=config.getoption("--perf-explain") or config.getini("perf_explain"),
        fail_without_baseline=no_baseline == "fail",
        strict_improved=config.getoption("--perf-strict-improved"),
        strict_inconclusive=config.getoption("--perf-strict-inconclusive"),
        min_judged=share("min-judged"),
        wait_quiet_s=number("wait-quiet", 0),
        allow_shared=config.getoption("--perf-allow-shared"),
        no_wait=config.getoption("--perf-no-wait"),
        preflight=not config.getoption("--perf-no-preflight"),
    )


def root_of(config: pytest.Config) -> Path:
    """The directory of the repository that holds the cases: pytest's root directory, if an ini file or the
    user chose it.

    Else pytest takes the value of an option for a test's path where there is such a path, and roots there.
    The root of a session is then that of the `perfsuite` commands in this directory.
    """
    if config.inipath is not None or config.getoption("rootdir") is not None:
        return config.rootpath
    with usage_error():
        return read_ini(config.invocation_params.dir).root


def check_root(config: pytest.Config) -> None:
    """Raise `UsageError` where an option's value keeps pytest from the settings or baselines of its tests."""
    here, root = config.invocation_params.dir, root_of(config)
    paths = [here / argument.partition("::")[0] for argument in config.args]
    why = "pytest takes an option's value that is an existing path for a test: write --option=PATH, with ="
    if config.inipath is None and config.getoption("inifilename") is None:
        with usage_error():
            ini = read_ini(here)
        if ini.values and any(path.is_relative_to(ini.root) for path in paths):
            raise pytest.UsageError(
                f"the settings of pytest in {ini.root} were not read. {why}, or use -c FILE"
            )
    is_chosen = config.getoption("--perf-baselines") or config.getini("perf_baselines") != str(BASELINES)
    if is_chosen or config.getoption("rootdir") or not any(path.is_relative_to(here) for path in paths):
        return
    if (here / BASELINES).is_dir() and not (root / BASELINES).is_dir():
        raise pytest.UsageError(
            f"there is {here / BASELINES}, but baselines would be looked for in {root / BASELINES}. {why}, "
            "or use --perf-baselines=DIR"
        )


def max_pairs(config: pytest.Config) -> int:
    """The most pairs of a comparison of two arms. Raises `UsageError` for a number out of range."""
    text = config.getoption("--perf-max-pairs")
    if text is None:
        return MAX_PAIRS
    if not config.getoption("--perf-against"):
        raise pytest.UsageError("--perf-max-pairs is for --perf-against: add that, or leave it out")
    if not text.isdecimal() or len(text) > MOST_DIGITS or not MIN_CHANGED <= int(text) <= MAX_PAIRS:
        raise pytest.UsageError(
            f"--perf-max-pairs={text[:40]}: give a whole number from {MIN_CHANGED} to {MAX_PAIRS}"
        )
    return int(text)


@contextlib.contextmanager
def usage_error() -> Iterator[None]:
    """Turn a `PerfsuiteError` into pytest's `UsageError`, which ends the session before anything runs."""
    try:
        yield
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None
