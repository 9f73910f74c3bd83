"""Find the reason for pip's failure in its output. Pure."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

NO_SPACE = "No space left on device"
NO_PIP = "No module named pip"
CONSTRAINED = ". The constraint is in a file that pip's settings name. To find the file, run pip config list"
NEAREST_SHOWN = 3  # number of versions to show on each side of a version that does not exist
_NOT_FOUND = re.compile(
    r"Could not find a version that satisfies the requirement (?P<requirement>.+?)"
    r"(?: \(from (?!versions)(?P<by>[^)]*)\))? \(from versions: (?P<versions>.*)\)"
)
_PINNED = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)")
_NEEDS_PYTHON = re.compile(r"Ignored the following versions that require a different python version: (.*)")
_OTHER_PYTHON = re.compile(r"Package '(.+?)' requires a different Python: (\S+) not in '(.+?)'")
_CONFLICT = re.compile(r"The conflict is caused by:\n((?: {4}.*\n)+)")
_REQUESTED = re.compile(r"The user requested ([A-Za-z0-9][\w.-]*==[\w.!+-]+)")
_CONSTRAINT = re.compile(r"The user requested \(constraint\) [A-Za-z0-9][\w.-]*?([<>=!~].*)")
_NO_REQUIREMENT = re.compile(r"Invalid requirement: (.+?)(?:\n[^(]*| )\(from (line \d+ of .+)\)")
# The last retry. pip prints this line before the retry, which might still succeed.
_UNREACHABLE = re.compile(r"Retry\(total=0,.*?\)\) after connection broken by '(.+)': ")
_NOT_BUILT = re.compile(
    r"error: (?:metadata-generation-failed|failed-wheel-build-for-install)\n\n.*\n\S+ (.+)"
)
_END_OF_BUILD = re.compile(r"(\S.*)\n +\[end of output\]")


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A requirement for which pip finds no package that it can install."""

    requirement: str
    name: str
    version: str | None  # None if the requirement is not of the form `NAME==VERSION`
    by: str | None  # the package that has this requirement; None: the user
    known: tuple[str, ...]  # versions of the package that pip finds for this Python
    needs_python: str | None  # the versions of Python that the missing version needs, if pip reports them

    def sentence(self, python: str, others: Sequence[str] = ()) -> str:
        """Explain why the requirement cannot be installed with the version `python` of Python.

        `others` are the versions of Python for which there are wheels.
        """
        if self.needs_python or others:
            needed = self.needs_python or " or ".join(others)
            return f"{self.name} {self.version} {_needs(needed, python)}"
        minor = ".".join(python.split(".")[:2])
        what = f"{self.name} {self.version}" if self.version else self.requirement
        by = f", which {self.by} needs" if self.by else ""
        nearest = self.nearest()
        if not nearest:
            return f"pip finds no {what}{by}, nor any other version of {self.name}, for Python {minor}"
        return f"pip finds no {what}{by} for Python {minor}. The nearest versions are {', '.join(nearest)}"

    def nearest(self) -> tuple[str, ...]:
        """Return the known versions just before and after the missing version, oldest first.

        If the requirement does not name a version, returns the newest versions.
        """
        ordered = sorted(Version(version) for version in self.known if _is_version(version))
        if self.version is None or not _is_version(self.version):
            return tuple(map(str, ordered[-2 * NEAREST_SHOWN :]))
        at = bisect_left(ordered, Version(self.version))
        return tuple(map(str, ordered[max(0, at - NEAREST_SHOWN) : at + NEAREST_SHOWN]))


def _needs(needed: str, python: str) -> str:
    return (
        f"needs Python {needed}, but this is {python}. Name the interpreter of an environment with "
        "such a Python"
    )


def missing(output: str) -> Missing | None:
    """Return the requirement for which pip found nothing, or None if pip failed for another reason."""
    match = _NOT_FOUND.search(output)
    finds_versions = match is not None and match["versions"] != "none"
    if _UNREACHABLE.search(output) and not finds_versions:
        return None
    if match is None:
        return _missing_despite_constraint(output)
    pinned = _PINNED.fullmatch(match["requirement"])
    name = pinned["name"] if pinned else re.split(r"[^\w.-]", match["requirement"])[0]
    version = pinned["version"] if pinned else None
    listed = [] if match["versions"] == "none" else match["versions"].split(", ")
    return Missing(
        requirement=match["requirement"],
        name=name,
        version=version,
        by=match["by"],
        known=tuple(listed),
        needs_python=None if version is None else _needed_python(output, version),
    )


def _missing_despite_constraint(output: str) -> Missing | None:
    """Return the missing version if pip reports a conflict with constraints that in fact allow this version.

    If a package has a constraint, pip reports a conflict for every version that it does not find.
    """
    match = _CONFLICT.search(output)
    if match is None:
        return None
    reasons = [line.strip() for line in match[1].splitlines()]
    requested = {pinned[1] for pinned in map(_REQUESTED.fullmatch, reasons) if pinned}
    constraints = [constraint[1] for constraint in map(_CONSTRAINT.fullmatch, reasons) if constraint]
    if len(requested) != 1 or not constraints or len(set(reasons)) != 1 + len(set(constraints)):
        return None
    (requirement,) = requested
    name, _, version = requirement.partition("==")
    try:
        if not SpecifierSet(",".join(constraints)).contains(version, prereleases=True):
            return None
    except (InvalidSpecifier, InvalidVersion):
        return None
    return Missing(requirement=requirement, name=name, version=version, by=None, known=(), needs_python=None)


def _needed_python(output: str, version: str) -> str | None:
    for line in _NEEDS_PYTHON.findall(output):
        for entry in line.split("; "):
            of, _, needs = entry.partition(" Requires-Python ")
            if needs and _is_version(of) and _is_version(version) and Version(of) == Version(version):
                return str(needs)
    return None


def reason(output: str) -> str | None:
    """Return the reason in one sentence.

    The sentence names, for example, the Python that is needed, or the requirements that contradict each
    other. Returns None if pip failed for another reason.
    """
    unreachable = _UNREACHABLE.search(output)
    if unreachable is not None:
        return f"pip cannot reach the package index: {unreachable[1]}"
    no_requirement = _NO_REQUIREMENT.search(output)
    if no_requirement is not None:
        return f"{no_requirement[2]} is not a requirement: {no_requirement[1]}"
    not_built = _NOT_BUILT.search(output)
    if not_built is not None:
        end = _END_OF_BUILD.search(output)
        why = f" ({end[1]})" if end else ""
        wheel = "Name a version that has a wheel for this Python"
        return f"pip cannot build {not_built[1]} from source{why}. {wheel}"
    other_python = _OTHER_PYTHON.search(output)
    if other_python is not None:
        name, python, needed = other_python.groups()
        return f"{name} {_needs(needed, python)}"
    match = _CONFLICT.search(output)
    if match is None:
        return None
    reasons = [line.strip() for line in match[1].splitlines()]
    where = CONSTRAINED if any("(constraint)" in line for line in reasons) else ""
    return f"these requirements contradict each other: {'; '.join(dict.fromkeys(reasons))}{where}"


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
