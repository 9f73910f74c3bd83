"""Test packages on top of an environment: what they bring along, what is unchanged, and what is reused."""

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from perfsuite.errors import CaseError, PackageError
from perfsuite.launch import overlay
from perfsuite.launch.arm import Arm, resolve
from perfsuite.launch.download import Plan
from perfsuite.launch.installed import DONE
from perfsuite.launch.installer import Package
from perfsuite.launch.overlay import Environment, Wanted, broken_by, needs_of_torch, plan, release
from tests.packages import only_index, write_wheel
from tests.processes import executable


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only directory where pip finds packages, next to the current directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return only_index(tmp_path / "index", monkeypatch)


def arm(words: str, index: Path) -> Arm:
    return resolve("--a", words, root=index.with_name("here"), store=index.with_name("store"))


def printed(python: str, code: str) -> str:
    """Return what code prints in an arm's Python."""
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.launch
def test_releases_bring_their_needs_but_not_torch(index: Path) -> None:
    """The newest vision needs a torch that is not installed. It is refused unless torch is named, too."""
    for version, torch in (("0.9", ""), ("1.0", "torch"), ("2.0", "torch==99")):
        write_wheel(index, "vision", version, f"VERSION = {version!r}\n", *filter(None, [torch]))
    write_wheel(index, "torch", "99", "")
    write_wheel(index, "library", "1.0", "", "vision")
    write_wheel(index, "library", "2.0", "", "vision>=2")

    def installed(words: str) -> dict[str, str]:
        return {module.name: module.read_text() for module in Path(arm(words, index).packages).glob("*.py")}

    assert installed("library==1.0") == {"library.py": "", "vision.py": "VERSION = '1.0'\n"}
    assert installed("library==1.0 vision==0.9")["vision.py"] == "VERSION = '0.9'\n"
    with pytest.raises(
        CaseError, match=r"requirements contradict each other: .*torch==.*vision 2\.0 depends on t"
    ):
        installed("library==2.0")
    places = printed(
        arm("library==2.0 torch==99", index).python, "import library, torch; print(torch.__file__)"
    )
    assert "store" in places


@pytest.mark.launch
def test_another_torch_gets_an_environment(index: Path) -> None:
    """Other packages are not installed again. The libraries of the other torch are installed next to it."""
    write_wheel(index, "torch", "99", "__version__ = '99'\n", "nvidia-thing==1")
    write_wheel(index, "nvidia-thing", "1")
    made = arm("torch==99", index)
    assert made.packages == ""
    code = "import torch, typer, nvidia_thing as n; print(torch.__version__, typer.__file__, n.__file__)"
    version, typer, library = printed(made.python, code).split()
    assert version == "99"
    assert Path(library).is_relative_to(Path(made.python).parents[1])
    assert not Path(typer).is_relative_to(Path(made.python).parents[1])


@pytest.mark.nightly
def test_another_library_of_torch_takes_torch_along(index: Path) -> None:
    """torch pins its library, and loads it from its own directory."""
    write_wheel(index, "torch", "9", "", "nvidia-nccl==1")
    for version in ("1", "2"):
        write_wheel(index, "nvidia-nccl", version, f"VERSION = {version!r}\n")
    below = index.with_name("below") / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", below.parents[1]], check=True)
    subprocess.run([below, "-m", "pip", "install", "--quiet", "torch==9"], check=True)
    wanted = Wanted(releases=("nvidia-nccl==2",), python=str(below))
    made = release(wanted, index.with_name("store"))
    python = overlay.python_in(made)
    assert python is not None
    code = "import torch, nvidia_nccl as n; print(torch.__file__, n.__file__, n.VERSION)"
    torch, library, version = printed(python, code).split()
    assert version == "2"
    assert Path(torch).parent == Path(library).parent


def test_a_library_that_torch_does_not_load_is_refused(tmp_path: Path) -> None:
    wanted = Wanted(releases=("nvidia-absent-cu13==2",))
    with pytest.raises(
        PackageError, match=r"does not load nvidia-absent-cu13, so the launches would not change. Name"
    ):
        plan(wanted, tmp_path)


@pytest.mark.launch
def test_a_version_that_is_here_changes_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch==2.13.0` is installed as the local build `2.13.0+cpu`, so nothing has to be downloaded."""
    version = Environment.of(sys.executable).versions["torch"].partition("+")[0]
    same = arm(f"torch=={version}", index)
    assert same.acts_as(Arm(commit=same.commit, dirty=same.dirty))


@pytest.mark.launch
def test_a_list_names_several_packages(index: Path) -> None:
    write_wheel(index, "one", "1.0")
    write_wheel(index, "two", "1.0")
    index.with_name("here").joinpath("requirements.txt").write_text("one==1.0\ntwo  # any\n")
    made = arm("requirements.txt X=1", index)
    assert {module.name for module in Path(made.packages).glob("*.py")} == {"one.py", "two.py"}
    assert made.given == {"X": "1"}


@pytest.mark.parametrize("text", ["", "\n# only a comment\n"])
def test_a_list_without_packages_is_refused(tmp_path: Path, text: str) -> None:
    """Both arms would be the same environment."""
    file = tmp_path / "empty.txt"
    file.write_text(text)
    with pytest.raises(PackageError, match=r"empty\.txt names no package, so the launches would not change$"):
        Wanted(lists=(file,)).requirements(tmp_path)


@pytest.mark.launch
def test_a_lock_of_uv_names_several_packages(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, "one", "1.0", "", "two")
    write_wheel(index, "two", "1.0")
    here = index.with_name("here")
    here.joinpath("pyproject.toml").write_text(
        "[project]\nname = 'script'\nversion = '1'\nrequires-python = '>=3.11'\n"
        f"dependencies = ['one']\n[tool.uv]\nno-index = true\nfind-links = ['{index}']\n"
    )
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    subprocess.run([Path(sys.executable).with_name("uv"), "lock", "--offline"], cwd=here, check=True)
    made = arm("uv.lock", index)
    assert {module.name for module in Path(made.packages).glob("*.py")} == {"one.py", "two.py"}


@pytest.mark.launch
def test_an_interrupted_installation_is_not_used(index: Path) -> None:
    write_wheel(index, "one", "1.0")
    store = index.with_name("store")
    works = f'exec {sys.executable} "$@"'
    python = executable(index.with_name("python"), works)
    wanted = Wanted(releases=("one==1.0",), python=str(python))
    half = wanted.directory(store) / "one.py"
    full = f"touch {half} && echo 'ERROR: the disk is full' >&2; exit 1"
    executable(python, f'if [ "$2" = pip ]; then {full}; fi', works)
    with pytest.raises(PackageError, match="the disk is full"):
        release(wanted, store)
    assert not wanted.directory(store).exists()
    assert not wanted.is_kept(store)
    wanted.directory(store).mkdir()  # as if the process had been killed
    wanted.directory(store).joinpath("half").touch()
    executable(python, works)
    made = release(wanted, store)
    assert (made / DONE).exists()
    assert not (made / "half").exists()


@pytest.mark.launch
def test_a_torch_that_cannot_be_imported_is_refused(index: Path) -> None:
    write_wheel(index, "torch", "99", "raise OSError('libcudart.so.13: cannot open shared object file')\n")
    with pytest.raises(
        CaseError, match=r"torch 99 was installed but cannot be imported: OSError: libcudart\.so\.13"
    ):
        arm("torch==99", index)
    assert not [entry for entry in index.with_name("store").joinpath("packages").iterdir() if entry.is_dir()]


def distribution(place: Path, name: str, version: str, *needs: str) -> PathDistribution:
    directory = place / f"{name}-{version}.dist-info"
    directory.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs), ""]
    (directory / "METADATA").write_text("\n".join(lines))
    return PathDistribution(directory)


@pytest.fixture
def below(tmp_path: Path) -> Environment:
    """Return an environment with torch 2, a vision that pins it, and a library that needs torch>=2."""
    distribution(tmp_path, "torch", "2", "cuda-toolkit[blas]==13; python_version > '3'", "sympy")
    distribution(
        tmp_path, "cuda-toolkit", "13", "nvidia-blas==1; extra == 'blas'", "nvidia-fft; extra == 'fft'"
    )
    for name in ("nvidia-blas", "nvidia-fft", "sympy"):
        distribution(tmp_path, name, "1")
    distribution(tmp_path, "vision", "1", "torch==2")
    distribution(tmp_path, "library", "1", "torch>=2")
    distribution(tmp_path, "broken", "1", "torch>=7")
    return Environment("python", "3.11.7", (str(tmp_path),), ())


def test_torch_loads_libraries_of_extras_too(below: Environment) -> None:
    assert needs_of_torch(below.distributions) == {"torch", "cuda-toolkit", "nvidia-blas"}


def test_names_what_another_torch_breaks(below: Environment) -> None:
    """Packages that already did not fit before are not reported."""
    changes = {"torch": Package(name="torch", version="1", url="")}
    assert broken_by(changes, below) == {
        "vision": "vision 1 needs torch==2",
        "library": "library 1 needs torch>=2",
    }
    assert set(broken_by(changes, below, pins=True)) == {"vision"}


def test_a_torch_that_perfsuite_does_not_support_is_named(below: Environment, tmp_path: Path) -> None:
    """perfsuite needs torch only with an extra."""
    distribution(tmp_path, "perfsuite", "0.1", "torch>=2; extra == 'torch'")
    changes = {"torch": Package(name="torch", version="1", url="")}
    assert broken_by(changes, below)["perfsuite"] == "perfsuite 0.1 needs torch>=2"


def listed(packages: Iterable[Package]) -> str:
    """Return packages as the code of `installer.LISTS` lists them."""
    wheel = "{0.name}-{0.version}-py3-none-any.whl"
    return json.dumps([(of.name, wheel.format(of), of.url, of.yanked) for of in packages])


def planned(below: Environment, tmp_path: Path, torch: Package, *others: Package) -> Plan:
    """Return the plan for torch 1 if pip would install torch and, if vision is also requested, the others."""
    (tmp_path / "without.json").write_text(listed([torch]))
    (tmp_path / "with.json").write_text(listed([torch, *others]))
    python = executable(
        tmp_path / "python",
        'case " $* " in *" vision "*) which=with;; *) which=without;; esac',
        f'cp {tmp_path}/$which.json "$3"',
    )
    wanted = Wanted(releases=("torch==1",))
    wanted.__dict__["below"] = replace(below, python=str(python))
    return plan(wanted, tmp_path)


def test_packages_that_pin_torch_move_with_it(below: Environment, tmp_path: Path) -> None:
    torch = Package(name="torch", version="1", url="")
    vision = Package(name="vision", version="0.5", url="")
    made = planned(below, tmp_path, torch, vision)
    assert made.changes == (torch, vision)
    assert made.notes == ("library 1 needs torch>=2, but is not changed", "vision changes from 1 to 0.5")


@pytest.mark.parametrize(
    ("why", "note"),
    [("wrong results", "torch 1 was yanked: wrong results"), ("", "torch 1 was yanked")],
    ids=["with a reason", "without a reason"],
)
def test_a_yanked_release_is_named(below: Environment, tmp_path: Path, why: str, note: str) -> None:
    torch = Package(name="torch", version="1", url="", yanked=why)
    assert note in planned(below, tmp_path, torch).notes


def test_another_text_of_a_list_needs_another_directory(below: Environment, tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    places = set()
    for text in ("one==1.0\n", "one==2.0\n"):
        file.write_text(text)
        wanted = Wanted(lists=(file,))
        wanted.__dict__["below"] = below
        places.add(wanted.directory(tmp_path))
    assert len(places) == 2


@pytest.mark.launch
def test_other_packages_below_need_another_directory(index: Path) -> None:
    """A release's dependencies that are installed today could have other versions tomorrow."""
    wanted = [Wanted(releases=("one==1.0",)) for _ in range(2)]
    wanted[1].__dict__["below"] = Environment(sys.executable, "3.11.7", (), ())
    assert wanted[0].directory(index) != wanted[1].directory(index)
    assert wanted[0].directory(index) == Wanted(releases=("one==1.0",)).directory(index)
