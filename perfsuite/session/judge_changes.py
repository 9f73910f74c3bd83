"""Use git to find what a branch changes in the files that decide its own verdicts.

`verdict.judge_changes` describes the changes.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from perfsuite.errors import FileError, PerfsuiteError
from perfsuite.inputs.files import read_bytes
from perfsuite.inputs.git import blobs, git
from perfsuite.inputs.ini import CASES, read_ini
from perfsuite.launch.arm import Arm, merge_base
from perfsuite.results.session_file import JudgeChanges
from perfsuite.session.setup import Options
from perfsuite.verdict.judge_changes import UNREADABLE, FileChange, Places, is_of_judge, sentences

LARGEST = 16 * 2**20  # maximum size of a file that is read, in bytes
UNKNOWN = (
    "it is unknown whether this branch changes its own checks: {error}. Check out the base as well "
    "(actions/checkout with fetch-depth: 0)"
)


def judge_changes(options: Options, arms: Sequence[Arm]) -> JudgeChanges | None:
    """Return this branch's changes, since the base, to the files that judge it; None without a base.

    In a comparison, the base is the commit at which the branch diverged from arm A, because later changes on
    arm A are not changes of this branch. In the job of a pull request, the base is the commit that the pull
    request is merged into. Nightly runs have no base.
    """
    base_branch = os.environ.get("GITHUB_BASE_REF", "")
    if not base_branch and not (arms and arms[0].moved is not None):
        return None
    try:
        base = merge_base(arms[0], arms[1], options.root) if arms else None
        if base is None:
            base = _merged_into(options.root, base_branch)
        return JudgeChanges(base=base, sentences=tuple(_since(base, options)))
    except PerfsuiteError as error:
        message = str(error).splitlines()[0]
        return JudgeChanges(base=None, sentences=(UNKNOWN.format(error=message),))


def _merged_into(root: Path, branch: str) -> str:
    """Return a pull request's base.

    If GitHub's merge commit of the pull request is checked out, the base is the first parent of this commit.
    Otherwise, the base is the merge base.
    """
    here, *parents = git("rev-list", "--parents", "--max-count=1", "HEAD", cwd=root).split()
    if len(parents) == 2 and here == os.environ.get("GITHUB_SHA"):
        return git("rev-parse", "--verify", f"{parents[0]}^{{commit}}", cwd=root).strip()
    return git("merge-base", "HEAD", f"refs/remotes/origin/{branch}", cwd=root).strip()


def _since(base: str, options: Options) -> list[str]:
    top = Path(git("rev-parse", "--show-toplevel", cwd=options.root).strip())
    places = _places(options, top)
    listed = git(
        "diff",
        "--name-only",
        "-z",
        "--no-renames",
        "--no-ext-diff",
        "--ignore-submodules=dirty",
        base,
        cwd=top,
    )
    listed += git("ls-files", "-z", "--others", "--exclude-standard", cwd=top)
    places = places._replace(linked=_linked(top, listed, places))
    names = [name for name in sorted({*listed.split("\0")}) if name and is_of_judge(name, places)]
    before = blobs(base, names, cwd=top)
    changes = [
        FileChange(name, _text(before.get(name)), _now(top / name), _link(top / name)) for name in names
    ]
    return sentences(changes, places, base[:12])


def _linked(top: Path, listed: str, places: Places) -> frozenset[str]:
    """Return the targets of links in the repository.

    A link counts only if a file in its place could affect verdicts. Targets are relative to `top`. Targets
    outside of `top` are left out.
    """
    entries = (entry.partition("\t") for entry in git("ls-files", "--stage", "-z", cwd=top).split("\0"))
    names = {name for mode, _, name in entries if mode.startswith("120000 ")} | {*listed.split("\0")}
    links = [top / name for name in names if name and is_of_judge(name, places) and _link(top / name)]
    targets = [Path(os.path.realpath(link)) for link in links]
    real = top.resolve()
    return frozenset(target.relative_to(real).as_posix() for target in targets if target.is_relative_to(real))


def _link(file: Path) -> str | None:
    try:
        return os.readlink(file)
    except OSError:
        return None


def _places(options: Options, top: Path) -> Places:
    cases = read_ini(options.root).directories().get("cases", str(options.root / CASES))
    paths = [
        os.path.relpath(path, top) for path in (options.root.resolve(), options.baselines.resolve(), cases)
    ]
    root, baselines, of_cases = (Path(path).as_posix() for path in paths)
    return Places(root=root, baselines=baselines, cases=of_cases)


def _text(content: bytes | None) -> str | None:
    if content is None:
        return None
    return UNREADABLE if len(content) > LARGEST else content.decode(errors="backslashreplace")


def _now(file: Path) -> str | None:
    """Return the current text of a file, whether or not git tracks it; None if there is no file."""
    try:
        return _text(read_bytes(file, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return UNREADABLE if file.is_symlink() else None
    except (FileError, OSError):
        return UNREADABLE
