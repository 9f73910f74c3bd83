"""The table of all options.

pytest's options and ini keys, the options of perfsuite's commands and the table in `docs/options.md` are
generated from this table. To add an option, add a row here, and a field of `Options` if a session needs the
value. Then run `make samples`.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from perfsuite.analysis.step_time.links import network_bytes_per_s
from perfsuite.case.fault import Fault
from perfsuite.errors import CaseError, FileError
from perfsuite.inputs import files
from perfsuite.inputs.ini import BASELINES, STORE
from perfsuite.inputs.setting import Parse, Setting
from perfsuite.launch.lock import WAIT_S as LOCK_WAIT_S
from perfsuite.launch.quiet import WAIT_S
from perfsuite.results.counts import CONSECUTIVE
from perfsuite.session.canaries import CANARIES
from perfsuite.session.setup import Options
from perfsuite.verdict.paired_comparison import MAX_PAIRS, MIN_CHANGED
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES

STRICT = ("improved", "inconclusive")  # outcomes that fail a test only if the user asks for it


def whole(least: int, most: int = 10**9) -> Parse:
    """Return a parser for whole numbers within a range."""

    def parse(value: str) -> int:
        if re.fullmatch(r"[0-9]{1,10}", value) and least <= int(value) <= most:
            return int(value)
        raise ValueError(f"a whole number from {least} to {most}")

    return parse


def fraction(value: str) -> float:
    """Parse 90% or 0.9, and return NaN for anything else."""
    number = value.strip()
    try:
        return float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        return math.nan


def share(value: str) -> float:
    """Parse a share of a whole: 90% or 0.9."""
    number = fraction(value)
    if 0 <= number <= 1:
        return number
    raise ValueError("a share from 0% to 100%, or from 0 to 1")


# Maximum tolerance, as a fraction. `perfsuite bisect` does not need a larger tolerance, even if the bad arm
# is many times slower than the good arm.
MOST_TOLERANCE = 0.5


def tolerance(value: str) -> float:
    """Parse a tolerance: 1% or 0.01."""
    number = fraction(value)
    if 0 < number <= MOST_TOLERANCE:
        return number
    raise ValueError(f"more than 0% and up to {MOST_TOLERANCE:.0%}, such as 1% or 0.01")


def strict(value: str) -> frozenset[str]:
    """Parse a comma-separated list of outcomes."""
    outcomes = frozenset(outcome.strip() for outcome in value.split(",") if outcome.strip())
    if not outcomes or not outcomes <= set(STRICT):
        raise ValueError(f"{' or '.join(STRICT)}, or both, separated by a comma")
    return outcomes


def seconds(value: str) -> float:
    """Parse a duration, such as 40min, 2h or 90s, and return it in seconds."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?) ?(s|min|h)", value.strip())
    if match is None or not float(match[1]):
        raise ValueError("a time above 0 in s, min or h, such as 90s, 40min or 2.5h")
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


def shard(value: str) -> tuple[int, int]:
    """Parse the number of this job and the number of all jobs, such as 2/8."""
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", value.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError("the number of this job and the number of jobs: for 8 jobs, 1/8 to 8/8")
    return int(match[1]), int(match[2])


def canaries(value: str) -> int | tuple[str, ...]:
    """Parse the number of canaries, such as 5, or their ids, separated by commas."""
    if re.fullmatch(r"[0-9]{1,3}", value) and int(value) > 0:
        return int(value)
    ids = tuple(case_id.strip() for case_id in value.split(","))
    if all(ids) and not value[0].isdigit():
        return ids
    raise ValueError("a number from 1 to 999, or the ids of cases, separated by commas")


def interconnect(value: str) -> str:
    """Check the network ports of a machine, such as 8xib400, and return them unchanged."""
    if network_bytes_per_s(value) is None:
        raise ValueError("the ports of a machine and their Gbit/s, such as 8xib400 or eth100")
    return value


def path(value: str) -> Path:
    """Parse a path that is valid here, whether or not it exists."""
    try:
        os.stat(value)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # reported later, if writing there fails
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"a path that is valid here ({reason})") from None
    return Path(value)


def file(value: str) -> Path:
    """Parse the path of a file to write."""
    if os.path.isdir(value):
        raise ValueError("a file (this is a directory)")
    return path(value)


_REPORT_FILES = {
    "index.html": (b"<title>perfsuite: ",),
    "summary.md": (b"## perfsuite: ", b"Nothing was measured: "),
    "results.json": (b'"perfsuite"',),
    "results-*.json": (b'"perfsuite"',),
}
"""File of a report -> texts. If perfsuite wrote the file, it has one of these texts near its beginning."""
_BEGINNING = 1_000_000  # number of bytes


def report(value: str) -> Path:
    """Parse the directory of a report.

    Raises `ValueError` if the report would replace a file that perfsuite did not write.
    """
    if os.path.isfile(value):
        raise ValueError("a directory (this is a file)")
    for pattern, words in _REPORT_FILES.items():
        for existing in path(value).glob(pattern):
            if not _begins_with(existing, words):
                name = existing.name
                raise ValueError(f"another directory (perfsuite did not write the file {name} in this one)")
    return Path(value)


def _begins_with(existing: Path, words: tuple[bytes, ...]) -> bool:
    """Return whether one of these words is near the beginning of a file."""
    try:
        with files.open_file(existing, files.LARGEST_DOCUMENT) as opened:
            beginning = opened.read(_BEGINNING)
    except (FileError, OSError):  # unreadable, or too large to be a file that perfsuite wrote
        return False
    return any(word in beginning for word in words)


def fault(value: str) -> str:
    """Check a fault to inject, and return it unchanged. Raises `CaseError` if it is unknown."""
    Fault.parse(value)
    return value


@dataclass(frozen=True, kw_only=True)
class Option(Setting):
    """An option of sessions: a setting of pytest, and `--NAME` in some commands."""

    # The field of `Options` or `Policy` that the option sets. Empty: the field has the same name as the
    # option. An option whose name begins with `no-` sets the field to False.
    sets: str = ""
    of_verdict: bool = False  # whether verdicts depend on the option, so that a resumed session must keep it

    @property
    def sets_field(self) -> str | None:
        """The field of `Options` that the option sets, or None. Fields of the policy begin with `policy.`."""
        own = self.sets or self.name.removeprefix("no-").replace("-", "_")
        if own in Policy.__dataclass_fields__:
            return f"policy.{own}"
        return own if own in Options.__dataclass_fields__ else None

    def shown(self, options: Options) -> str:
        """Return the value that the option has in a session, as text."""
        value = attrgetter(str(self.sets_field))(options)
        if self.is_flag:
            return "yes" if value != self.name.startswith("no-") else "no"
        if "|" in self.metavar:
            return self.metavar.split("|")[bool(value)]
        return "nothing" if value is None else str(value)


OPTIONS = (
    Option(
        name="report",
        metavar="DIR",
        parse=report,
        help="write a report to DIR: index.html, summary.md for CI, and results.json",
        page="The report is also written if the session is interrupted",
    ),
    Option(
        name="json",
        metavar="FILE",
        parse=file,
        help="write every verdict and number to FILE as JSON",
        page="Each session also writes this file to the store, as `results.json`",
    ),
    Option(
        name="explain",
        ini=True,
        help="launch a regressed case once more, profile some of its steps, and report what changed; also "
        "profile each case whose launches can become a baseline",
        page="See [Explain](explain.md)",
    ),
    Option(
        name="max-launches",
        metavar="N",
        parse=whole(1),
        default=str(MAX_LAUNCHES),
        ini=True,
        of_verdict=True,
        help="maximum number of launches per case; with 1 or 2, a slowdown is never reported as a regression",
    ),
    Option(
        name="tolerance",
        metavar="SHARE",
        parse=tolerance,
        ini=True,
        of_verdict=True,
        help="largest allowed increase in the time per token, such as 2%; by default 3% on GPUs and 15% on "
        "CPUs",
        page="Without more launches, a smaller tolerance makes more cases inconclusive: see [A smaller "
        "change](your-repository.md#a-smaller-change)",
    ),
    Option(
        name="min-launches",
        metavar="N",
        parse=whole(1),
        default="1",
        ini=True,
        of_verdict=True,
        help="minimum number of healthy launches per case; a baseline needs 5 or more to be accepted",
    ),
    Option(
        name="record-launches",
        metavar="N",
        parse=whole(1),
        default="3",
        ini=True,
        of_verdict=True,
        help="number of healthy launches of a case without a baseline; 1 only shows that the case runs",
    ),
    Option(
        name="missing-baseline",
        metavar="record|fail",
        default="record",
        sets="fail_without_baseline",
        ini=True,
        of_verdict=True,
        help="what to do if a case has no baseline: record one in the store, or fail",
        page="With `fail`, a [reviewed baseline without a case](your-repository.md#4-the-night) also fails "
        "a complete nightly run",
    ),
    Option(
        name="strict",
        metavar="OUTCOMES",
        parse=strict,
        ini=True,
        help="outcomes that also fail a case: improved, inconclusive, or both, separated by a comma",
    ),
    Option(
        name="shadow",
        ini=True,
        of_verdict=True,
        help="measure and judge cases, but do not fail tests because of verdicts",
        page="See [Shadow mode](your-repository.md#shadow-mode)",
    ),
    Option(
        name="min-judged",
        metavar="SHARE",
        parse=share,
        default="0",
        ini=True,
        help="fail the session if less than this share of its cases was judged, for example 90% or 0.9",
    ),
    Option(
        name="budget",
        metavar="TIME",
        parse=seconds,
        sets="budget_s",
        help="end after about TIME (40min, 2h): launch every case once, and use the remaining time for more "
        "launches; durations are estimated from earlier launches",
        page="See [A budget](your-repository.md#a-budget)",
    ),
    Option(
        name="shard",
        metavar="K/N",
        parse=shard,
        help="divide the cases into N shards, and run only shard K, for example 2/8",
    ),
    Option(
        name="wait-quiet",
        metavar="SECONDS",
        parse=whole(0),
        default=f"{WAIT_S:.0f}",
        sets="wait_quiet_s",
        ini=True,
        help="maximum time to wait until other programs stop using the machine; with 0, a disturbed launch "
        "is repeated without waiting",
        page="This option only applies if cases run on this machine",
    ),
    Option(
        name="wait-lock",
        metavar="TIME",
        parse=seconds,
        default=f"{LOCK_WAIT_S / 3600:.0f}h",
        sets="wait_lock_s",
        ini=True,
        help="maximum time to wait for another session on this machine (90s, 40min, 12h); after "
        "this time, cases fail",
        page="See [A shared machine](not-judged.md#a-shared-machine)",
    ),
    Option(
        name="allow-shared",
        help="do not wait until other programs stop using the machine; judge and record only counts, and "
        "show times without judging them",
    ),
    Option(
        name="launcher",
        metavar="NAME",
        ini=True,
        help="launcher that starts the processes of a case: local, or another installed launcher (default: "
        "the launcher for the environment in which pytest runs, or local if there is none)",
        page="See [Launchers](#launchers)",
    ),
    Option(
        name="no-preflight",
        help="launch multi-node cases without checking the nodes first",
        page="See [Preflight](not-judged.md#a-preflight-of-several-nodes)",
    ),
    Option(
        name="resume",
        help="continue the newest session in the store, without repeating the cases that it decided",
        page="See [Go on with a session](#go-on-with-a-session)",
    ),
    Option(name="no-counts", of_verdict=True, help="do not count the work of a step, and judge no counts"),
    Option(
        name="counted-steps",
        metavar="N",
        parse=whole(1, 10_000),
        default=str(CONSECUTIVE),
        ini=True,
        help="number of consecutive steps to count in dry runs and comparisons of counts",
    ),
    Option(
        name="against",
        metavar="ARM",
        help="compare with another environment instead of baselines. ARM: NAME=VALUE, PACKAGE==VERSION, "
        "path/to/python, image:NAME, a git commit or COMMIT:LOCKFILE, or several of these, separated by "
        "spaces",
        page="See [Two environments](compare.md)",
    ),
    Option(
        name="max-pairs",
        metavar="N",
        parse=whole(MIN_CHANGED, MAX_PAIRS),
        default=str(MAX_PAIRS),
        help=f"maximum number of launch pairs in a comparison of environments: {MIN_CHANGED} to {MAX_PAIRS}",
    ),
    Option(
        name="reference",
        metavar="ARM",
        help="also launch a few cases with ARM, the environment and commit of the baselines, to distinguish "
        "changes of the machine from changes of the code. ARM has the same format as in --perf-against",
        page="See [A reference](verdicts.md#a-reference)",
    ),
    Option(
        name="canaries",
        metavar="CASES",
        parse=canaries,
        default=str(CANARIES),
        help="cases that are also launched with the reference: their number, or their ids, separated by "
        "commas",
    ),
    Option(
        name="dry",
        help="run every case dry: at full size, in one process, without its hardware. This counts and judges "
        "the work of a step, but does not time it",
        page="See [Dry runs](dry-run.md)",
    ),
    Option(
        name="interconnect",
        metavar="PORTS",
        parse=interconnect,
        ini=True,
        help="network ports of a simulated machine and their Gbit/s, such as 8xib400, to predict step times",
        page="Without it, [dry runs](dry-run.md#how-long-a-step-should-take) of cases on several machines "
        "predict no step times. On the command line, it needs `--perf-dry`",
    ),
    Option(
        name="store",
        metavar="DIR",
        parse=path,
        default=str(STORE),
        ini=True,
        help="directory for local baselines and the files of each launch, relative to the root directory",
    ),
    Option(
        name="baselines",
        metavar="DIR",
        parse=path,
        default=str(BASELINES),
        ini=True,
        of_verdict=True,
        help="directory of reviewed baselines, relative to the root directory",
    ),
    Option(
        name="inject",
        metavar="FAULT",
        parse=fault,
        of_verdict=True,
        help="inject a fault to test whether it is found, for example slowdown=30%; such launches are never "
        "recorded",
        page="See [Faults](#faults)",
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}
GIVEN_ONCE = ("against", "reference", "baselines")
"""Options that choose what is compared. If a command line has one of these twice, pytest would silently use
the last value."""
EXCLUDING = (  # an option, the options that it excludes, and why
    ("dry", ("inject", "no-counts", "explain"), "a dry run only counts"),
    ("dry", ("resume",), "dry runs cannot be resumed"),
    ("against", ("resume",), "comparisons cannot be resumed"),
    ("reference", ("against", "dry"), "a reference is only useful if cases are judged against baselines"),
    (
        "reference",
        ("resume",),
        "a reference only shows how fast the machine is now, and a part of a resumed session ran earlier",
    ),
)


def check_together(given: set[str]) -> None:
    """Raise `CaseError` if the given options exclude each other."""
    for name, others, why in EXCLUDING:
        for excluded in others:
            if {name, excluded} <= given:
                raise CaseError(f"--perf-{name} excludes --perf-{excluded} ({why}): leave one of them out")
    for name, needed in (("max-pairs", "against"), ("canaries", "reference"), ("interconnect", "dry")):
        if name in given and needed not in given:
            raise CaseError(f"--perf-{name} needs --perf-{needed}: add it, or leave --perf-{name} out")


def options_of(root: Path, values: Mapping[str, Any]) -> Options:
    """Return the options of a session from values by option name, with defaults for missing values."""
    fields = {
        option.sets_field: values.get(option.name, option.read(option.spelled, None))
        for option in OPTIONS
        if option.sets_field is not None
    }
    fields["strict"] = fields["strict"] or frozenset()
    chosen = {name.removeprefix("policy."): fields.pop(name) for name in list(fields) if "." in name}
    policy = Policy(**chosen)
    if policy.most < FEWEST_LAUNCHES:  # with so few launches, do not repeat unhealthy launches
        policy = replace(policy, max_unhealthy=policy.most)
    fields["store"] = root / fields["store"]
    fields["baselines"] = root / fields["baselines"]
    return Options(root=root, policy=policy, **fields)


def of_verdicts(options: Options) -> dict[str, str]:
    """Return the values of the options that verdicts depend on, as text, by the names that users type."""
    return {option.spelled: option.shown(options) for option in OPTIONS if option.of_verdict}
