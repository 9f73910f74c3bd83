"""`perfsuite releases`: show how each release of a package changed a step, as a Markdown page."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.cli.shared import Expression, Ids, Launcher, Yes, asks, launcher_of
from perfsuite.cli.shared import options as options_of_session
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.dry.driver import dry_run, why_no_cuda
from perfsuite.dry.machine import Device
from perfsuite.errors import CaseError, PerfsuiteError
from perfsuite.features.search.releases_page import DRY, LAUNCH, Ran, ReleaseChanges, page
from perfsuite.inputs.files import read_text
from perfsuite.launch.arm import HERE, RELEASE, Arm, resolve
from perfsuite.launch.download import Consent
from perfsuite.launch.installer import versions
from perfsuite.measure import launch_once
from perfsuite.report.console import print_json, say
from perfsuite.report.markdown import text
from perfsuite.report.progress import Progress
from perfsuite.report.text import plural, relative
from perfsuite.results.environment import installed
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.session.against_arm import other_releases, used_version
from perfsuite.session.by_command import UNDECIDED, selected
from perfsuite.session.setup import DryHost, Host, Setup
from perfsuite.verdict.judge import why_failed


@shares("cases", "store", "as_json")
def releases(
    *,
    package: Annotated[str, typer.Argument(help="Name of the package in its index.")],
    case: Ids = None,
    k: Expression = None,
    first: Annotated[
        str | None, typer.Option("--from", help="Oldest release (default: the installed one).")
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", help="Newest release (default: the newest that exists).")
    ] = None,
    minors: Annotated[
        bool,
        typer.Option(
            "--minors",
            help="Run the oldest release, and then only the last patch release of each minor version.",
        ),
    ] = False,
    others: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="RELEASES",
            help="Install these releases of other packages with each release, such as setuptools==80.9.0.",
        ),
    ] = "",
    launch: Annotated[
        bool, typer.Option("--launch", help="Launch every case, even if a dry run is possible.")
    ] = False,
    launcher: Launcher = None,
    yes: Yes = False,
    shared: Shared,
) -> None:
    """Show how each release of a package changed a step, as a Markdown page.

    Each case runs once with each release: dry if possible, and launched otherwise. Only wheels are installed.
    Runs are kept: to continue after an interruption, run the same command again. The exit status is 3 if a
    release could not be installed, or if a case could not run with a release or no longer used the package.
    """
    os.environ.setdefault("PIP_ONLY_BINARY", ":all:")  # also applies to dependencies of a release
    options = options_of_session(store=shared.store)
    setup = Setup(options, Progress(line=say), Host(launcher_of(launcher), options.store))
    ways = (LAUNCH,) if launch else (DRY, LAUNCH)
    runs = ReleaseRuns(setup, package, ways, asks(yes=yes), others=_others(others, package))
    chosen = runs.possible(selected(shared.cases, case, k))
    names = runs.released(first, last, minors=minors)
    say(f"{plural(len(names), 'release')} of {package}: {', '.join(names)}")
    try:
        steps = list(runs.steps(chosen, names))
    finally:
        setup.lock.release()
    if shared.as_json:
        print_json([asdict(step) for step in steps])
    else:
        typer.echo(relative(page(package, steps, runs.ran, runs.others), Path.cwd()))
    raise typer.Exit(UNDECIDED if any(step.unknown for step in steps) else 0)


def _others(text: str, package: str) -> Sequence[str]:
    """Return the releases of other packages. Raises `CaseError` for other words, and for `package` itself."""
    words = text.split()
    for word in words:
        name = word.partition("==")[0]
        if not RELEASE.fullmatch(word) or canonicalize_name(name) == canonicalize_name(package):
            raise CaseError(
                f"--with {word!r}: give releases of packages other than {package}, such as setuptools==80.9.0"
            )
    return words


@dataclass
class ReleaseRuns:
    """Runs cases with the releases of a package, and keeps the runs."""

    setup: Setup
    package: str
    ways: Sequence[str]  # `DRY` and `LAUNCH`, or one of them, cheapest first
    consent: Consent
    others: Sequence[str] = ()  # releases of other packages, which are installed with each release
    # How the index of packages is asked, and how cases are run.
    versions: Callable[[str], Sequence[Version]] = versions
    resolve: Callable[..., Arm] = resolve
    dry: Callable[..., Run] = dry_run
    launch: Callable[..., Run] = launch_once
    why_no_cuda: Callable[[Arm], str | None] = why_no_cuda
    # Case id -> the first way in which the case ran. It is used for all releases as long as it works.
    way_of: dict[str, str] = field(default_factory=dict)
    # Text of an arm -> whether its torch can simulate CUDA.
    has_cuda: dict[str, bool] = field(default_factory=dict)
    # Case id -> the last run.
    last: dict[str, Run] = field(default_factory=dict)

    @property
    def ran(self) -> list[Ran]:
        """The way in which each case ran."""
        return [
            Ran(case=run.case, way=way, machine=run.machine, steps=_counted_steps(run))
            for run, way in ((self.last[name], way) for name, way in self.way_of.items())
        ]

    def released(self, first: str | None, last: str | None, *, minors: bool) -> list[str]:
        """Return the releases of the package from `first` to `last`, oldest first.

        `first` and `last` are included even if pip does not list them. Between them, only releases for this
        Python are included. Pre-releases and yanked releases are left out.

        Raises `PackageError` if pip does not find the package, and `CaseError` for a bad `first` or `last`,
        or if there are fewer than two releases.
        """
        package = self.package
        try:
            start = Version(first or version(package))
            end = Version(last) if last else None
        except PackageNotFoundError:
            raise CaseError(f"{package} is not installed here: give the oldest release with --from") from None
        except InvalidVersion as error:
            raise CaseError(f"--from or --to is not a version ({error}): give one such as 2.11.0") from None
        if end and start > end:
            raise CaseError(f"--from {start} is newer than --to {end}: swap them")
        listed = self.versions(package)
        newer = [release for release in listed if release > start and not release.is_prerelease]
        later = newer if end is None else [*(release for release in newer if release < end), end]
        if minors:
            later = list({release.release[:2]: release for release in later}.values())
        names = list(dict.fromkeys(map(str, (start, *later))))
        if len(names) < 2:
            raise CaseError(f"{package} has no release after {start}: give an older one with --from")
        return names

    def possible(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases for which a launch or dry run is possible here. For other cases, print why not.

        Raises `CaseError`, before anything is installed, if no case can be run.
        """
        usable = []
        refused = []
        for case in cases:
            reasons = [self._why_not(case, way) for way in self.ways]
            if None in reasons:
                usable.append(case)
            else:
                refused.append(f"{case.id}: {'; '.join(dict.fromkeys(filter(None, reasons)))}")
        if not usable:
            raise CaseError("\n".join(refused))
        for line in refused:
            self.setup.progress.say(f"left out: {line}")
        return usable

    def _why_not(self, case: Case, way: str) -> str | None:
        """Return why a case cannot be run here in this way, or None."""
        host = DryHost() if way == DRY else self.setup.host
        try:
            return host.why_not(case)
        except CaseError as error:
            return str(error)

    def steps(self, cases: Sequence[Case], names: Sequence[str]) -> Iterator[ReleaseChanges]:
        """Compare each release, case by case, with the last earlier release with which the case could run.

        Raises `CaseError` if no case uses the package.
        """
        left = [*cases]
        before = dict[str, tuple[str, Arm]]()
        options = self.setup.options
        last = ""
        for name in names:
            step = ReleaseChanges(f"{last} -> {name}" if last else name)
            yield step
            wanted = " ".join([f"{self.package}=={name}", *self.others])
            try:
                arm = self.resolve(
                    "",
                    wanted,
                    root=options.root,
                    store=options.store,
                    consent=self.consent,
                )
            except CaseError as error:
                why = str(error).rpartition("ERROR: ")[2].removeprefix(f" {wanted!r}: ")
                step.unknown.append(f"- not installed: {text(why)}")
                continue
            for case in tuple(left):
                since, *earlier = before.get(case.id, ("",))
                outcome = self._run(case, [*earlier, arm])
                if isinstance(outcome, str):
                    step.unknown.append(f"- {text(case.id)}: {text(outcome)}")
                elif used_version(outcome[-1], self.package) is None and earlier:
                    step.unknown.append(f"- {text(case.id)}: its run did not use {self.package}")
                elif used_version(outcome[-1], self.package) is None:
                    self.setup.progress.say(f"left out: {case.id} does not use {self.package}")
                    left.remove(case)
                else:
                    before[case.id] = name, arm
                    if earlier:
                        step.compare(outcome[0], outcome[1], since, name)
            if not left:
                raise CaseError(f"no case uses {self.package}: give a case that imports it")
            last = name

    def _run(self, case: Case, arms: Sequence[Arm]) -> list[Run] | str:
        """Return the runs (dry runs or launches) of a case in these arms, or why they are impossible.

        All arms are run in the same way: in the first way that works in all of them.
        """
        device = self._device(arms)
        why: list[str] = []
        for way in self.ways[self.ways.index(self.way_of.get(case.id, self.ways[0])) :]:
            if way == LAUNCH:
                reason = self.setup.host.why_not(case)
                if reason:
                    return "; ".join(why or [reason])
            try:
                runs = [self._kept(case, arm, way, device) for arm in arms]
            except PerfsuiteError as error:
                why.append(f"{way}: {error}")
                continue
            self.way_of[case.id] = way
            self.last[case.id] = runs[-1]
            return runs
        return "; ".join(why)

    def _device(self, arms: Sequence[Arm]) -> Device | None:
        """Return the device to simulate in a dry run.

        None stands for the device that the case is meant for, and is returned if torch can simulate CUDA in
        all arms. Otherwise, the result is "cpu".
        """
        has_own_torch = any(word.startswith("torch==") for arm in arms for word in arm.text.split())
        asked = arms if has_own_torch else (HERE,)
        for arm in asked:
            if arm.text not in self.has_cuda:
                self.has_cuda[arm.text] = self.why_no_cuda(arm) is None
        return None if all(self.has_cuda[arm.text] for arm in asked) else "cpu"

    def _kept(self, case: Case, arm: Arm, way: str, device: Device | None) -> Run:
        """Return the run of an earlier command, or a new run.

        Raises `PerfsuiteError` if the run failed, has no counts, or used another version of the package.
        """
        file: Path | None = getattr(case.framework, "file", None)  # only a script has this attribute
        scripts = sorted(file.parent.glob("*.py")) if file else []
        code = [read_text(script, errors="backslashreplace") for script in scripts]
        steps = self.setup.options.steps_to_count(case)
        key = [documents.plain(case), arm.text, arm.python, installed(), f"{way}{device or ''}", steps, code]
        machine = None if way == DRY else self.setup.host.machine_for(case)
        if machine is not None:  # several machines can share a store
            key.append(machine.hardware_class)
        run_dir = RunDir((self.setup.options.store / "releases" / documents.digest(key)).absolute())
        run = documents.read_or_none(run_dir.run, Run)
        if run is None or run.failure is not None:  # no run, an interrupted run, or a failed run
            shutil.rmtree(run_dir.path, ignore_errors=True)
            self.setup.progress.say(f"{arm.text}: {way} of {case.id}")
            if machine is None:
                run = self.dry(case, run_dir.path, device=device, arm=arm, counted_steps=steps)
            else:
                self.setup.lock.take(self.setup.progress.say)
                how = replace(self.setup.launching, arm=arm, counted_steps=steps)
                run = self.launch(case, machine, run_dir.path, how)
        if run.failure is not None or run.hidden or not run.counts:
            why = why_failed(run) if run.failure else run.hidden or ("nothing was counted",)
            raise CaseError(f"with {arm.text}: {'; '.join(why)}")
        for release, used in other_releases(arm, run):
            name = release.partition("==")[0]
            raise CaseError(f"with {arm.text}: the run used {name} {used}, which comes first on its path")
        return run


def _counted_steps(run: Run) -> int:
    """Return the largest number of steps that one rank counted. `run` must have counts."""
    return max(1 + len(entry.counts.also_counted) for entry in run.counts)
