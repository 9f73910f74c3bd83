"""Run git, and locate commits in their branch. Imports neither torch nor pytest.

The configuration of a repository can name programs that git then runs: filters, external diffs and many more.
If another person can write `.git/config`, that person's code could run when a user only wants a report. For
this reason:

- Commands that read do not run any program that the repository names.
- Commands that write, or contact a remote, run only if the user asks for them, in the user's own checkout.
  They keep the repository's settings, for example the ssh command of a deploy key.
- No command runs a file monitor or hooks.
- The user's own settings (--global) always apply.
"""

import contextlib
import hashlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from perfsuite.errors import GitError
from perfsuite.inputs.files import LARGEST

OF_A_HOOK = frozenset(
    ("GIT_COMMON_DIR", "GIT_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_WORK_TREE")
)
"""Variables that git sets when it runs a hook. If a git command inherited them, it would use the hook's
repository instead of the one in its working directory."""
COMMITTER = ("-c", "user.name=perfsuite", "-c", "user.email=perfsuite@users.noreply.github.com")
"""Options with which perfsuite makes commits if git knows no user name, for example in a CI job."""
READS = frozenset(
    [
        "cat-file",
        "diff",
        "log",
        "ls-files",
        "ls-tree",
        "merge-base",
        "rev-list",
        "rev-parse",
        "show",
        "status",
    ]
)
"""The commands that only read a repository."""
ALWAYS = {"core.fsmonitor": "", "core.hooksPath": os.devnull}
"""Settings for every git command that perfsuite runs."""
AS_COMMITTED = {"GIT_NO_REPLACE_OBJECTS": "1"}
"""Variables for every git command. Without them, commits that `git replace` has replaced in this clone would
differ from those in other clones."""
_OF_READING = {
    # With "diff", git would run programs that a submodule's own configuration names.
    "diff.submodule": "short",
    "log.showSignature": "false",  # True would run gpg.program
    "submodule.recurse": "false",
}
_RUNS_A_PROGRAM = {
    r"filter\..*\.(clean|smudge|process)": "",
    r"filter\..*\.required": "false",
    r"core\.askpass": "",
    r"credential\.(.*\.)?helper": "",
    r"diff\.(external|.*\.(command|textconv))": "",
    r"hook\..*\.command": "true",
}
"""Pattern of settings -> the value that replaces the repository's value. The repository could use these
settings to make git run a program, even in a command that only reads (`READS`). If the user has set such a
setting as well, git uses the user's value."""
_PROTOCOLS = "http:https"
"""Protocols with which git can fetch the missing parts of a partial clone. With other protocols, git could
run a program that the repository names."""
_OF_THE_USER = ("system", "global", "command")
_IN_CONTAINER = (Path("/.dockerenv"), Path("/run/.containerenv"), Path("/.singularity.d"))


def git(*arguments: str, cwd: Path) -> str:
    """Return the output of a git command. Raises `GitError` if git fails or is missing."""
    # Files and their names are not always in UTF-8.
    return output(*arguments, cwd=cwd).decode(errors="backslashreplace")


def output(*arguments: str, cwd: Path, text: bytes = b"") -> bytes:
    """Return the output of a git command that gets `text` on its standard input. Raises `GitError`."""
    name = f"git {' '.join(arguments)}"
    usual = {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}
    usual |= AS_COMMITTED
    try:
        done, replaced = _run(arguments, cwd, usual, text)
        is_refused = done.returncode != 0 and b"safe.directory" in done.stderr
        top = _trusted(cwd) if is_refused else None
        if top is not None:
            # Versions of git before 2.38 read `safe.directory` only from files.
            with tempfile.TemporaryDirectory() as home:
                escaped = re.sub(r'[\\"]', r"\\\g<0>", str(top)).replace("\n", "\\n")
                (Path(home) / "git").mkdir()
                (Path(home) / "git" / "config").write_text(f'[safe]\ndirectory = "{escaped}"\n')
                done, replaced = _run(arguments, cwd, usual | {"XDG_CONFIG_HOME": home}, text)
    except OSError as error:
        raise GitError(f"{name}: {error.strerror}") from error
    if done.returncode:
        message = done.stderr.decode(errors="backslashreplace").strip() or "failed"
        if replaced:
            message += (
                f" (git ran without the repository's own settings {', '.join(replaced)}, because such "
                "settings run programs. To use them, set them with --global)"
            )
        raise GitError(f"{name}: {message}")
    return done.stdout


def _run(
    arguments: Sequence[str], cwd: Path, usual: Mapping[str, str], text: bytes
) -> tuple[subprocess.CompletedProcess[bytes], list[str]]:
    """Run git. Returns its result, and the names of the repository's settings that were replaced."""
    command = _command(cwd)
    variables = dict(usual)
    replaced = list[tuple[str, str]]()
    if arguments[0] in READS:
        for name, fixed in _OF_READING.items():
            command += ["-c", f"{name}={fixed}"]
        variables.setdefault("GIT_ALLOW_PROTOCOL", _PROTOCOLS)
        replaced = _replaced(command, cwd, usual)
    for name, value in replaced:
        if "=" not in name:  # a name with "=" must be passed in variables, which git reads since version 2.31
            command += ["-c", f"{name}={value}"]
            continue
        count = int(variables.get("GIT_CONFIG_COUNT") or 0)
        variables |= {f"GIT_CONFIG_KEY_{count}": name, f"GIT_CONFIG_VALUE_{count}": value}
        variables["GIT_CONFIG_COUNT"] = str(count + 1)
    done = subprocess.run([*command, *arguments], cwd=cwd, env=variables, input=text, capture_output=True)
    return done, list(dict.fromkeys(name for name, _ in replaced))


def _command(cwd: Path) -> list[str]:
    top = _trusted(cwd)
    command = ["git", *([] if top is None else ["-c", f"safe.directory={top}"])]
    # Without this option, git could mistake a parent directory for a bare repository, and use its
    # configuration.
    if not _is_bare(cwd):
        command += ["-c", "safe.bareRepository=explicit"]
    for name, fixed in ALWAYS.items():
        command += ["-c", f"{name}={fixed}"]
    return command


def _replaced(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the repository's settings that make git run a program, as (name, replacement).

    If the user has also set this setting, an entry with the user's value follows the replacement, and git
    uses the last entry.
    """
    settings = [*_settings([*command, "config", "--null", "--list"], cwd, environment)]
    values = list[tuple[str, str]]()
    for name in sorted({name for scope, name, _ in settings if scope not in _OF_THE_USER}):
        instead = [value for keys, value in _RUNS_A_PROGRAM.items() if re.fullmatch(keys, name, re.DOTALL)]
        if instead:
            of_user = [value for scope, key, value in settings if key == name and scope in _OF_THE_USER]
            values += [(name, value) for value in (*instead, *of_user)]
    return values


def _without_filters(cwd: Path) -> list[str]:
    """Return a pathspec that excludes files with a git filter, if the repository's filters are not run.

    Without its filter (for example git-lfs), a file differs from the commit even if nobody has changed it.
    """
    try:
        values = dict(_replaced(_command(cwd), cwd, os.environ))
    except OSError:  # git is missing. The command for which the pathspec is meant will report that
        return []
    is_filtered = any(name.startswith("filter.") and value == "" for name, value in values.items())
    return ["--", ":(top,attr:!filter)"] if is_filtered else []


def _settings(
    listing: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield scope, name and value of each setting. Before git 2.26, the scope is an empty string."""
    done = subprocess.run([*listing, "--show-scope"], cwd=cwd, env=environment, capture_output=True)
    has_scopes = done.returncode == 0
    if not has_scopes:
        done = subprocess.run(listing, cwd=cwd, env=environment, capture_output=True)
    fields = [os.fsdecode(field) for field in done.stdout.split(b"\0")[:-1]]
    scopes = fields[::2] if has_scopes else [""] * len(fields)
    for scope, setting in zip(scopes, fields[1::2] if has_scopes else fields, strict=True):
        name, _, value = setting.partition("\n")
        yield scope, name, value


def _top(directory: Path) -> Path | None:
    """Return the top of the repository or worktree that contains a directory. None outside git."""
    here = directory.resolve()
    return next((place for place in (here, *here.parents) if os.path.lexists(place / ".git")), None)


def _trusted(cwd: Path) -> Path | None:
    """Return the top of the repository that contains a directory, or None if git must not treat it as safe.

    The current user must own the repository. There is an exception in containers, where a checkout can belong
    to the user who created it outside the container. There, root also trusts a repository that belongs
    entirely to one other user. The top of this repository must not be writable by everybody, because anybody
    can create a `.git` in a directory such as /tmp.
    """
    top = _top(cwd)
    if top is None:
        return None
    try:
        places = [top, top / ".git", _git_directory(top / ".git")]
        owners = {place.stat(follow_symlinks=follows).st_uid for place in places for follows in (True, False)}
        is_open = bool(top.stat().st_mode & stat.S_IWOTH)
    except (OSError, ValueError):
        return None
    if owners == {os.geteuid()}:
        return top
    return top if os.geteuid() == 0 and len(owners) == 1 and not is_open and _is_container() else None


def _git_directory(file: Path) -> Path:
    """Return git's directory. In a worktree or a submodule, `.git` is a file with the directory's path."""
    if not file.is_file():
        return file
    return file.parent / file.read_text(errors="surrogateescape").removeprefix("gitdir:").strip()


def _is_bare(directory: Path) -> bool:
    return (directory / "HEAD").is_file() and (directory / "objects").is_dir()


def _is_container() -> bool:
    return any(file.exists() for file in _IN_CONTAINER) or bool(
        {"container", "KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER"} & os.environ.keys()
    )


_OF_TRACKED = ("--untracked-files=no", "--ignore-submodules=dirty")


def _submodules(directory: Path) -> list[Path]:
    """Return the submodules that are checked out in a repository.

    perfsuite runs git in each of them, because each has its own settings that could run programs. If git
    itself entered a submodule, only the settings of the outer repository would be replaced (`_replaced`).
    """
    top = _top(directory)
    if top is None or not (top / ".gitmodules").is_file():
        return []
    entries = git("ls-files", "--stage", "-z", cwd=top).split("\0")
    modules = [
        top / name
        for entry in entries
        for mode, _, name in [entry.partition("\t")]
        if mode.startswith("160000 ")
    ]
    return [module for module in modules if os.path.lexists(module / ".git")]


class Revision(NamedTuple):
    """The state of a repository's checkout."""

    commit: str | None  # None outside git
    dirty: bool  # whether tracked files have uncommitted changes
    problem: str | None = None  # why git failed although the directory is in a repository


def revision(directory: Path) -> Revision:
    """Return the revision of the checkout that contains `directory`. Outside git, its commit is None."""
    try:
        asked = ("status", "--porcelain=v2", "--branch", *_OF_TRACKED, *_without_filters(directory))
        lines = git(*asked, cwd=directory).splitlines()
        modules = [revision(module) for module in _submodules(directory)]
    except GitError as error:
        here = directory.resolve()
        is_inside = _top(here) is not None
        workspace = os.environ.get("GITHUB_WORKSPACE")
        if workspace and not is_inside and here.is_relative_to(Path(workspace).resolve()):
            # If git is missing in a job's container image, actions/checkout downloads the files without a
            # `.git` directory.
            return Revision(os.environ.get("GITHUB_SHA"), False)
        return Revision(None, False, str(error) if is_inside else None)
    commit = next(line.split()[2] for line in lines if line.startswith("# branch.oid "))
    if commit == "(initial)":
        return Revision(None, False, "there is no commit yet")
    # A submodule in which git fails counts as changed.
    is_dirty_below = any(module.dirty or module.commit is None for module in modules)
    return Revision(commit, any(not line.startswith("# ") for line in lines) or is_dirty_below)


def changes(directory: Path) -> str | None:
    """Return a digest of the uncommitted changes to tracked files. None without changes, and outside git.

    For a file larger than `LARGEST`, the digest covers only the size and the modification time.
    """
    try:
        filtered = _without_filters(directory)
        large = _large_changes(directory, filtered)
        outside = [f":(top,exclude,literal){name}" for name in large]
        diff = git(
            "diff",
            "--binary",
            *_OF_DIFF,
            "HEAD",
            *(filtered or (["--", ":(top)"] if outside else [])),
            *outside,
            cwd=directory,
        )
        diff += "".join(f"{name}: {size} bytes of {time}\n" for name, (size, time) in large.items())
        in_submodules = [(submodule, changes(submodule)) for submodule in _submodules(directory)]
        diff += "".join(f"{submodule}: {changed}\n" for submodule, changed in in_submodules if changed)
    except GitError:
        return None
    return hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else None


_OF_DIFF = ("--no-relative", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")


def _large_changes(directory: Path, pathspec: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return size and modification time of the changed files that git might need hours to read."""
    top = _top(directory)
    if top is None:
        return {}
    large: dict[str, tuple[int, int]] = {}
    for name in git("diff", "--name-only", "-z", *_OF_DIFF, "HEAD", *pathspec, cwd=directory).split("\0"):
        with contextlib.suppress(OSError):  # the file was deleted
            status = (top / name).lstat()
            if name and status.st_size > LARGEST:
                large[name] = status.st_size, status.st_mtime_ns
    return large


def commit_of(ref: str, *, cwd: Path) -> str:
    """Return the commit to which a branch, a tag or the name of a commit refers.

    Raises `GitError` if there is no such commit. Names that begin with a dash are refused, because git would
    take them for options.
    """
    try:
        return git("rev-parse", "--verify", f"{no_option(ref)}^{{commit}}", cwd=cwd).strip()
    except GitError as error:
        raise GitError(f"{ref!r} is not a commit, a branch or a tag of {cwd} ({error})") from None


def no_option(name: str) -> str:
    """Return `name` unchanged. Raises `GitError` if git would take it for an option."""
    if name.startswith("-"):
        raise GitError(f"{name!r} is an option: name a commit, a branch or a tag")
    return name


def blobs(commit: str, names: Sequence[str], *, cwd: Path) -> dict[str, bytes]:
    """Return the contents of files at a commit. Files that the commit does not have are left out.

    `names` are relative to the top of the repository, which is `cwd`.
    """
    if not names:
        return {}
    asked = [name for name in names if "\n" not in name]  # git reads one name per line
    lines = "".join(f"{commit}:{name}\n" for name in asked)
    answer = output("cat-file", "--batch", cwd=cwd, text=os.fsencode(lines))
    contents = dict[str, bytes]()
    begin = 0
    for name in asked:
        end = answer.index(b"\n", begin)
        header = answer[begin:end].split()
        begin = end + 1
        if header[-1] == b"missing" or len(header) < 3:
            continue
        size = int(header[-1])
        if header[-2] == b"blob":
            contents[name] = answer[begin : begin + size]
        begin += size + 1
    return contents


def current_branch(repo: Path) -> str:
    """Return the name of the branch that is checked out, or HEAD if no branch is checked out."""
    return git("rev-parse", "--abbrev-ref", "HEAD", cwd=repo).strip()


def dates(repo: Path, branch: str) -> dict[str, int]:
    """Return the time of each commit on a branch itself (first parents), in Unix seconds, oldest first."""
    asked = ("log", "--first-parent", "--reverse", "--format=%H %ct", no_option(branch), "--")
    lines = git(*asked, cwd=repo).splitlines()
    return {commit: int(seconds) for commit, seconds in map(str.split, lines)}


def unplaced(commits: set[str], repo: Path, branch: str) -> dict[str, str]:
    """Return, for each commit, why it is not among the `dates` of a branch.

    Raises `GitError` if commits are missing because the clone is shallow.
    """
    if not commits:
        return {}
    missing = commits - set(git("rev-list", "--all", cwd=repo).split())
    if missing and git("rev-parse", "--is-shallow-repository", cwd=repo).strip() == "true":
        raise GitError(
            f"{repo} is a shallow clone, which lacks commits of the history ({len(missing)}). "
            "Fetch the whole history: git fetch --unshallow"
        )
    return {
        commit: f"not in {repo}" if commit in missing else f"not on {branch} itself (git log --first-parent)"
        for commit in sorted(commits)
    }
