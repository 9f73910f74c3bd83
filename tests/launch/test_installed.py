"""Environments that lock files name: made once, by pip, without an index."""

import http.server
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perfsuite.errors import CaseError, PackageError
from perfsuite.inputs.git import git
from perfsuite.launch import installed
from perfsuite.launch.arm import Arm, resolve
from perfsuite.launch.installed import Package
from tests.packages import only_index, write_wheel
from tests.processes import executable
from tests.synthetic import commit

LOCK = "requirements.lock"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which alone pip finds packages, two versions of perfsuite among them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        index = only_index(tmp_path_factory.mktemp("installed") / "index", patch)
        for version in ("1.0", "2.0"):
            write_wheel(index, "perfsuite", version, f"__version__ = {version!r}\n")
        yield index


@pytest.fixture(scope="module")
def made(index: Path) -> Path:
    """A repository, in whose store each environment is made once for all tests. Two commits, the first
    tagged `old`, lock two versions of a package."""
    repository = index.with_name("repo")
    git("init", "-q", "-b", "main", str(repository), cwd=index)
    for version in ("1.0", "2.0"):
        (repository / LOCK).write_text(f"perfsuite=={version}\n")
        commit(repository)
    git("tag", "old", "main~1", cwd=repository)
    return repository


@pytest.fixture
def repo(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That repository as the current directory."""
    monkeypatch.chdir(made)
    return made


def arm(text: str, repo: Path) -> Arm:
    return resolve("--a", text, root=repo, store=repo.with_name("store"))


@pytest.mark.launch
def test_installs_a_locks_packages_once(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that fails is said, and begun anew. What is on the path here stands not before it."""

    def breaks(*command: str, **settings: object) -> str:
        Path(command[-1], "half").mkdir(parents=True)
        raise PackageError("pip install: No matching distribution")

    with monkeypatch.context() as patch:
        patch.setattr(installed, "run", breaks)
        with pytest.raises(CaseError, match=rf"--a 'old:{LOCK}': pip install: No matching distribution"):
            arm(f"old:{LOCK}", repo)
    (tmp_path / "perfsuite.py").write_text("__version__ = '9'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    old = arm(f"old:{LOCK} X=1", repo)
    assert (old.perfsuite, old.lock, old.given) == ("1.0", LOCK, {"X": "1"})
    assert old.python != sys.executable
    assert not Path(old.python).parents[1].joinpath("half").exists()
    assert old.commit == git("rev-parse", "old", cwd=repo).strip()
    monkeypatch.setattr(installed, "run", lambda *command, **settings: pytest.fail(f"ran {command}"))
    assert arm(f"old:{LOCK} X=1", repo) == old
    assert arm(f"old:{LOCK} PYTHONPATH={tmp_path}", repo).perfsuite == "9", "asked for"


def test_refuses_a_lock_file_without_perfsuite(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str, **settings: object) -> str:
        if "venv" in command:
            python = Path(command[-1], "bin", "python")
            python.parent.mkdir(parents=True)
            executable(python, "case $2 in *json*) echo '[\"/\"]';; *) echo No module >&2; exit 1;; esac")
        return ""

    (repo / "empty.txt").touch()
    commit(repo)
    monkeypatch.setattr(installed, "run", run)
    with pytest.raises(CaseError, match=r"cannot import perfsuite .*\. Name it in empty\.txt$"):
        arm("main:empty.txt", repo)


def test_refuses_missing_or_two_environments(repo: Path) -> None:
    with pytest.raises(CaseError, match=r"that commit has no such file"):
        arm("old:uv.lock", repo)
    with pytest.raises(CaseError, match=r"name the lock file after the colon"):
        arm("old:", repo)
    with pytest.raises(CaseError, match=r"an interpreter or a lock file, not both"):
        arm(f"old:{LOCK} {sys.executable}", repo)


PACKAGE = '[[package]]\nname = "net"\nsource = {{ {} }}\n'


@pytest.mark.parametrize(
    ("name", "text", "is_of_commit"),
    [
        (LOCK, "torch==2.13.0 \\\n    --hash=sha256:abc\n", False),
        (LOCK, "-i https://index.example.org/simple\nnet @ https://example.org/net.whl\n", False),
        *(
            (LOCK, f"{line}\n", True)
            for line in ("-r more.txt", "--editable .", "./local", ".", "net @ file:./x", "wheels/x.whl")
        ),
        ("uv.lock", PACKAGE.format('editable = "."'), False),
        ("uv.lock", PACKAGE.format('directory = "libs/net"'), True),
    ],
)
def test_nested_requirements_belong_to_one_commit(
    tmp_path: Path, name: str, text: str, is_of_commit: bool
) -> None:
    (tmp_path / name).write_text(text)
    one, other = (installed._key(tmp_path / name, commit) for commit in "ab")
    assert (one != other) == is_of_commit
    (tmp_path / name).write_text(f"{text}# another\n")
    assert installed._key(tmp_path / name, "a") != one


@pytest.mark.launch
def test_installs_a_uv_lock_with_the_local_uv(
    repo: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repo / "pyproject.toml").write_text(
        "[project]\nname = 'script'\nversion = '1'\nrequires-python = '>=3.11'\n"
        f"dependencies = ['perfsuite==2.0']\n[tool.uv]\nno-index = true\nfind-links = ['{index}']\n"
    )
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    beside = Path(sys.executable).parent
    others = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != beside]
    monkeypatch.setenv("PATH", os.pathsep.join(others))  # the environment is not activated
    subprocess.run([beside / "uv", "lock", "--offline"], cwd=repo, check=True)
    commit(repo)
    locked = arm("main:uv.lock", repo)
    assert (locked.perfsuite, locked.lock) == ("2.0", "uv.lock")
    assert locked.python != sys.executable


def test_a_lock_of_uv_needs_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv.lock").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(PackageError, match=r"uv, which is not there: pip install uv"):
        installed.environment(tmp_path / "uv.lock", "a", tmp_path / "store")


@pytest.mark.launch
def test_releases_bring_their_needs_but_not_torch(repo: Path, index: Path) -> None:
    """The newest vision needs another torch than the one here: that is refused unless it is named."""
    for version, torch in (("0.9", ""), ("1.0", "torch"), ("2.0", "torch==99")):
        write_wheel(index, "vision", version, f"VERSION = {version!r}\n", *filter(None, [torch]))
    write_wheel(index, "torch", "99", "")
    write_wheel(index, "library", "1.0", "", "vision")
    write_wheel(index, "library", "2.0", "", "vision>=2")

    def installed(words: str) -> dict[str, str]:
        return {each.name: each.read_text() for each in Path(arm(words, repo).packages).glob("*.py")}

    assert installed("library==1.0") == {"library.py": "", "vision.py": "VERSION = '1.0'\n"}
    assert installed("library==1.0 vision==0.9")["vision.py"] == "VERSION = '0.9'\n"
    with pytest.raises(CaseError, match=r"pip install .* library==2\.0 torch==.*: ERROR: "):
        installed("library==2.0")
    assert set(installed("library==2.0 torch==99")) == {"library.py", "vision.py", "torch.py"}


MISLEADING = {
    "FORCE_COLOR": "1",
    "PIP_DRY_RUN": "1",
    "PIP_VERBOSE": "2",
    "PIP_QUIET": "3",
    "PIP_REPORT": "/no/such/directory/report.json",
    "PIP_TARGET": "/no/such/directory",
    "PIP_REQUIRE_VIRTUALENV": "1",
    "PIP_NO_INPUT": "1",
    "PIP_PROGRESS_BAR": "on",
}


@pytest.mark.launch
def test_variables_of_pip_mislead_nobody(repo: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say where packages are stay: the only index is in one of them."""
    write_wheel(index, "plain", "1.0", "VERSION = '1.0'\n")
    for name, value in MISLEADING.items():
        monkeypatch.setenv(name, value)
    assert (Path(arm("plain==1.0", repo).packages) / "plain.py").read_text() == "VERSION = '1.0'\n"
    assert "1.0" in map(str, installed.versions("plain"))


class Server(http.server.ThreadingHTTPServer):
    """An index whose wheels have metadata of their own, as on PyPI; it keeps what it was asked for."""

    def __init__(self, directory: Path) -> None:
        self.asked: list[tuple[str, str]] = []
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(directory))

            def log_message(self, *words: object) -> None:
                server.asked.append((self.command, self.path))

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def wheels(self) -> list[str]:
        return [how for how, path in self.asked if path.endswith(".whl")]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An index of one package, from which pip alone takes packages."""
    package = tmp_path / "web" / "big"
    package.mkdir(parents=True)
    write_wheel(package, "big", "1.0", "VERSION = '1.0'\n")
    wheel = next(package.glob("*.whl"))
    with zipfile.ZipFile(wheel) as content:
        (package / f"{wheel.name}.metadata").write_bytes(content.read("big-1.0.dist-info/METADATA"))
    link = f'<a href="{wheel.name}" data-dist-info-metadata="true" data-core-metadata="true">{wheel.name}</a>'
    (package / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("no_proxy", "*")
    with Server(tmp_path / "web") as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.launch
def test_asks_before_a_large_download(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, bool]] = []
    answers = iter([False, True])

    def consent(text: str, is_large: bool) -> bool:
        said.append((text, is_large))
        return next(answers)

    monkeypatch.setattr(installed, "LARGE_BYTES", 100)
    with pytest.raises(
        PackageError, match=r"^pip downloads 0\.0 MB: big 1\.0\. A download this large needs --yes"
    ):
        installed.release(["big==1.0"], sys.executable, tmp_path / "store", consent)
    assert server.wheels() == ["HEAD"], "its size is asked for, and nothing is downloaded"
    made = installed.release(["big==1.0"], sys.executable, tmp_path / "store", consent)
    assert (made / "big.py").exists()
    assert said == [("pip downloads 0.0 MB: big 1.0", True)] * 2
    with pytest.raises(StopIteration):
        next(answers)
    assert installed.release(["big==1.0"], sys.executable, tmp_path / "store") == made, "once"


@pytest.mark.parametrize(
    ("sizes", "text", "is_large"),
    [
        ((600e6, 500e6), "pip downloads 1.1 GB: a 1 (0.6 GB), b 1 (0.5 GB)", True),
        ((20e6, 999), "pip downloads 20.0 MB: a 1 (20.0 MB), b 1", False),
        ((None, 2e9), "pip downloads 2.0 GB, and 1 of a size that is not known: b 1 (2.0 GB), a 1", True),
        ((None, None), "pip downloads packages of unknown size: a 1, b 1", False),
    ],
)
def test_what_is_downloaded_is_told_with_its_size(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[Any, Any], text: str, is_large: bool
) -> None:
    monkeypatch.setattr(installed, "size_of", dict(zip("ab", sizes, strict=True)).get)
    said: list[tuple[str, bool]] = []

    def consent(text: str, is_large: bool) -> bool:
        said.append((text, is_large))
        return True

    installed.ask_for(consent, [Package(name=name, version="1", url=name) for name in "ab"])
    assert said == [(text, is_large)]


def test_silent_server_hides_the_size() -> None:
    for url in ("http://127.0.0.1:9/x.whl", "nosuch://x", "https://[broken"):
        assert installed.size_of(url) is None


def test_pip_has_the_private_names_we_use() -> None:
    """Without them an old pip downloads everything before anybody is asked."""
    from pip._internal.cli import cmdoptions
    from pip._internal.operations.prepare import RequirementPreparer

    assert callable(RequirementPreparer.prepare_linked_requirements_more)
    assert "fast-deps" in cmdoptions.use_new_feature.keywords["choices"]  # type: ignore[attr-defined]


@pytest.mark.launch
def test_a_pip_without_these_names_says_the_same(
    repo: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, "older", "1.0", "", "oldest")
    write_wheel(index, "oldest", "2.0", "")
    found = [installed.would_install("older==1.0", python=sys.executable)]
    monkeypatch.setattr(installed, "LISTS", installed.LISTS.replace("_linked_requirements_more", "_nothing"))
    found.append(installed.would_install("older==1.0", python=sys.executable))
    assert found[0] == found[1]
    assert [(each.name, each.version) for each in found[0]] == [("older", "1.0"), ("oldest", "2.0")]
