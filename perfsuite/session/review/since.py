"""Find how the reviewed baselines have changed since a git commit."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.inputs.git import commit_of, git
from perfsuite.results.store import BaselineFiles, BaselineStore, is_there
from perfsuite.session.review.counts import COUNTS
from perfsuite.session.review.times import PROFILES, TIMES, B, Refused, Shown


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A reviewed baseline that has changed."""

    file: str  # its name in the repository
    before: Any  # None if it was added
    now: Any  # None if it was deleted
    shown: Shown[Any]  # describes the change in words

    def as_row(self) -> dict[str, object]:
        """Return the old and the new content of the baseline as plain data."""
        sides = (("before", self.before), ("now", self.now))
        return {"file": self.file, **{key: side and documents.plain(side) for key, side in sides}}


def changed_since(ref: str, baselines: Path) -> list[Changed]:
    """Return the reviewed baselines that were added, changed or deleted since a git ref.

    Raises `GitError` if the ref does not exist, `FileError` if there is no directory of baselines, and
    `Refused` if a file at this ref is not a baseline.
    """
    root = Path(git("rev-parse", "--show-toplevel", cwd=Path()).strip())
    commit = commit_of(ref, cwd=root)
    store = BaselineStore(baselines.resolve())
    files = [*_changed_files(commit, store, root)]
    if not files and not baselines.is_dir():
        raise FileError(
            f"--baselines {baselines}: there is no such directory, and there was none at {ref}. Give the "
            "directory of your reviewed baselines"
        )
    return [_changed(file, store, commit, ref, root) for file in files]


def _changed_files(commit: str, store: BaselineStore, root: Path) -> Iterator[Path]:
    listed = git(
        "diff", "--name-only", "--no-renames", "--ignore-submodules=dirty", commit, "--", str(store), cwd=root
    )
    listed += git("ls-files", "--others", "--exclude-standard", "--", str(store), cwd=root)
    for name in sorted(set(listed.splitlines())):
        if name.endswith(".json"):
            yield root / name


def _changed(file: Path, store: BaselineStore, commit: str, ref: str, root: Path) -> Changed:
    if file.parent.parent == store.profiles.reviewed:
        return _of_kind(PROFILES, store.profiles, file, commit, ref, root)
    if file.parent.parent == store.counts.reviewed:
        return _of_kind(COUNTS, store.counts, file, commit, ref, root)
    return _of_kind(TIMES, store, file, commit, ref, root)


def _of_kind(
    shown: Shown[B], files: BaselineFiles[B], file: Path, commit: str, ref: str, root: Path
) -> Changed:
    name = str(file.relative_to(root))
    before = None
    if git("ls-tree", "--name-only", "--full-tree", commit, "--", name, cwd=root).strip():
        try:
            content = documents.parse(git("show", f"{commit}:{name}", cwd=root))
            before = files.kind.model_validate(content, context=documents.FROM_FILE)
        except (ValueError, RecursionError) as error:
            raise Refused(
                f"{name} at {ref} is not a baseline that this perfsuite can read: {error}"
            ) from None
    now = documents.read(file, files.kind) if is_there(file) else None
    return Changed(file=name, before=before, now=now, shown=shown)
