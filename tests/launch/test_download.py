"""Tests of `launch.download`: planned sizes, the only question to the user, and refused downloads."""

import http.server
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perfsuite.errors import PackageError
from perfsuite.launch import download
from perfsuite.launch.download import Plan, ask_for, check_driver, check_space
from perfsuite.launch.installer import Package
from perfsuite.launch.overlay import Wanted, release
from tests.packages import write_wheel

BIG = Wanted(releases=("big==1.0",))


class Server(http.server.ThreadingHTTPServer):
    """A server of the files in a directory. It records the requests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
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

    def package(self, name: str, version: str = "1", *, size: float | None) -> Package:
        """Return a package whose file has this size here. If `size` is None, there is no such file."""
        file = f"{name}-{version}"
        if size is not None:
            with (self.directory / file).open("wb") as empty:
                empty.truncate(int(size))
        return Package(name=name, version=version, url=f"{self.url}/{file}")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a server that has no files yet."""
    (tmp_path / "web").mkdir()
    monkeypatch.setenv("no_proxy", "*")
    with Server(tmp_path / "web") as server:
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def index(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return an index of one package, which is the only place where pip looks for packages.

    The wheel has separate metadata, like on PyPI.
    """
    package = server.directory / "big"
    package.mkdir()
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
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    return server


@pytest.mark.launch
def test_asks_before_a_download(index: Server, tmp_path: Path) -> None:
    said: list[tuple[str, bool]] = []
    answers = iter([False, True])

    def consent(text: str, is_large: bool) -> bool:
        said.append((text, is_large))
        return next(answers)

    with pytest.raises(
        PackageError, match=r"^pip downloads 0\.0 MB: big 1\.0\. A download this large needs the option --yes"
    ):
        release(BIG, tmp_path / "store", consent)
    assert index.wheels() == ["HEAD"], "only the size is requested, and nothing is downloaded"
    made = release(BIG, tmp_path / "store", consent)
    assert (made / "big.py").exists()
    assert said == [("pip downloads 0.0 MB: big 1.0", False)] * 2
    with pytest.raises(StopIteration):
        next(answers)
    assert release(BIG, tmp_path / "store") == made, "the question is asked only once"


@pytest.mark.parametrize(
    ("sizes", "text", "is_large"),
    [
        ((600e6, 500e6), "pip downloads 1.1 GB: a 1 (0.6 GB), b 1 (0.5 GB)", True),
        ((20e6, 999), "pip downloads 20.0 MB: a 1 (20.0 MB), b 1", False),
        ((None, 2e9), "pip downloads 2.0 GB, and 1 more of unknown size: b 1 (2.0 GB), a 1", True),
        ((None, None), "pip downloads packages of unknown size: a 1, b 1", False),
    ],
)
def test_names_downloads_with_their_sizes(
    server: Server, sizes: tuple[Any, Any], text: str, is_large: bool
) -> None:
    said: list[tuple[str, bool]] = []

    def consent(text: str, is_large: bool) -> bool:
        said.append((text, is_large))
        return True

    packages = [server.package(name, size=size) for name, size in zip("ab", sizes, strict=True)]
    ask_for(consent, [Plan(changes=tuple(packages))])
    assert said == [(text, is_large)]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.whl", "nosuch://x", "https://[broken"])
def test_silent_server_hides_the_size(url: str) -> None:
    assert download.size_of(url) is None


def test_two_arms_need_one_consent(server: Server) -> None:
    """A file that both arms need counts only once."""
    said: list[tuple[str, bool]] = []
    common = server.package("cudnn", "9", size=600e6)

    def consent(text: str, is_large: bool) -> bool:
        said.append((text, is_large))
        return True

    plans = [Plan(changes=(common, server.package("torch", of, size=600e6))) for of in ("1", "2")]
    ask_for(consent, plans)
    text = "pip downloads 1.8 GB: cudnn 9 (0.6 GB), torch 1 (0.6 GB), torch 2 (0.6 GB)"
    assert said == [(text, True)]


def test_files_on_this_machine_need_no_consent(tmp_path: Path) -> None:
    here = Package(name="a", version="1", url=f"file://{tmp_path}/a.whl")
    ask_for(lambda text, is_large: pytest.fail(text), [Plan(changes=(here,))])


def test_a_plan_that_exceeds_the_disk_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with wheel.open("wb") as file:
        file.truncate(10**13)
    planned = Plan(changes=(Package(name="a", version="1", url=f"file://{wheel}"),))
    with pytest.raises(
        PackageError, match=r"^the packages need about 30000\.0 GB on the disk, but .* free\. "
    ):
        check_space([planned], tmp_path / "none" / "store")


CUDA_13 = Package(name="nvidia-cuda-runtime", version="13.0.96", url="")
CUDA_12 = Package(name="nvidia-cuda-runtime-cu12", version="12.8.90", url="")


@pytest.mark.parametrize(
    ("package", "driver", "fits"),
    [
        (CUDA_13, "570.86.10", False),
        (CUDA_13, "580.65.06", True),
        (CUDA_12, "570.86.10", True),
        (CUDA_12, "470.256", False),
        (CUDA_13, None, True),
        (Package(name="torch", version="2.13.0+cpu", url=""), "470.256", True),
    ],
)
def test_a_driver_must_support_the_cuda_of_a_build(package: Package, driver: str | None, fits: bool) -> None:
    planned = Plan(changes=(package,))
    if fits:
        check_driver(planned, driver)
        return
    with pytest.raises(
        PackageError, match=rf"needs NVIDIA driver \d+ or later, but this machine has {driver}\. "
    ):
        check_driver(planned, driver)
