"""Names the tests that a change can break, for `make quick`.

    python -m tests.changed [BASE]

A room is a folder of perfsuite or a file next to these folders; in `features`, each feature is a room. A room
has changed if one of its files differs from the merge base of HEAD and BASE. Changes that are not committed
count too. Three kinds of tests are named: tests of changed rooms, tests of rooms that import a changed room,
and tests that import a changed test helper. If nothing has changed, nothing is printed.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

import grimp

ROOT = Path(__file__).parent.parent
EVERYTHING = {"pyproject.toml", "constraints.txt", "conftest.py", "tests/conftest.py"}
READ_BY = {
    "docs": "pages.test_docs",
    "README.md": "pages.test_docs",
    ".github": "repository.test_workflows",
    "Makefile": "repository.test_workflows",
}
"""Files and folders that are not Python, and the tests that read them."""
OF_NO_ROOM = ("tests.test_", "tests.bench_cases.", "tests.pages.", "tests.repository.", "tests.robustness.")
"""For test modules that are not in the folder of their room: prefixes of their names, and the rooms."""


def changed_files(base: str, root: Path = ROOT) -> set[str]:
    """Return the files that differ from the merge base of HEAD and `base`.

    Deleted and untracked files are included.
    """

    def git(*arguments: str) -> list[str]:
        command = ("git", "-C", str(root), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    (left_at,) = git("merge-base", "HEAD", base)
    changed = git("diff", "--name-only", "--no-renames", left_at)
    return {*changed, *git("ls-files", "--others", "--exclude-standard", "--full-name")}


def affected_tests(files: Iterable[str]) -> list[str]:
    """Return the test files and folders that changed `files` can break, as arguments of pytest."""
    files = set(files)
    if files & EVERYTHING:
        return ["tests"]
    graph = grimp.build_graph("perfsuite", "tests", cache_dir=None)
    reached = {"tests": set[str](), "perfsuite": set[str]()}
    for file in files:
        first, *below = PurePath(file).with_suffix("").parts
        module = ".".join((first, *below)).removesuffix(".__init__")
        if first in reached:
            reached[first] |= {module}
        if module in graph.modules:
            reached[first] |= graph.find_downstream_modules(module)
        elif (room := f"perfsuite.{below[0]}" if below else "") in graph.modules and first == "perfsuite":
            reached[first] |= graph.find_downstream_modules(room, as_package=True)  # not Python
    rooms = {_room_of(name) for name in reached["perfsuite"] if name.startswith("perfsuite.")}
    own = {path for room in rooms for path in _of_room(room)}
    modules = reached["tests"] | {name for name in reached["perfsuite"] if name.startswith(OF_NO_ROOM)}
    modules |= {f"tests.{READ_BY[first]}" for file in files if (first := PurePath(file).parts[0]) in READ_BY}
    own |= {PurePath(*name.split(".")).with_suffix(".py") for name in modules if ".test_" in name}
    return sorted(
        str(test_path)
        for test_path in own
        if not own & set(test_path.parents) and (ROOT / test_path).exists()
    )


def _room_of(module: str) -> str:
    _, *names = module.split(".")
    return "/".join(names[: 2 if names[0] == "features" else 1])


def _of_room(room: str) -> Iterator[PurePath]:
    yield PurePath("tests", room)
    for file in (ROOT / "tests").glob(f"test_{room}*.py"):
        yield PurePath("tests", file.name)


if __name__ == "__main__":
    print(*affected_tests(changed_files(sys.argv[1] if sys.argv[1:] else "main")))
