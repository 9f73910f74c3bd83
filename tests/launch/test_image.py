"""Test images as arms: the arguments of each runtime, with fake runtimes, and one real launch with podman."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from perfsuite import DDP, Topology
from perfsuite.errors import CaseError
from perfsuite.launch import image
from perfsuite.launch.arm import ask, resolve
from perfsuite.measure import Launching, launch_once
from perfsuite.node.machine import detect
from tests.processes import executable
from tests.samples import make_case

ROOT = Path(__file__).parents[2]


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a search path without a runtime. Tests add a fake runtime to it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "env", "sed", "grep", "id", "git", "tr", "wc"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    monkeypatch.setenv("PATH", str(tools))
    return str(tools)


@pytest.fixture
def _gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this machine the device file of NVIDIA's driver."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl" or exists(path))


def stand_in(tools: str, runtime: str, *lines: str) -> None:
    """Write a fake runtime with these lines.

    By default it records its arguments, and runs the command that follows the image.
    """
    record = f"printf '%s\\n' \"$@\" > {tools}/told"
    skip = 'until [ "$1" = python ] || [ "$1" = -c ]; do shift; done; [ "$1" = python ] && shift || shift 3'
    answers = "[ $1 = version ] && exit"
    executable(Path(tools, runtime), answers, *(lines or (record, skip, f'exec {sys.executable} "$@"')))


@pytest.mark.parametrize("runtime", image.RUNTIMES)
def test_asks_an_images_python_where_it_launches(
    only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    stand_in(only, runtime)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("VIRTUAL_ENV", "/here")
    root = tmp_path / "repository"
    store = tmp_path / "store"
    root.mkdir()
    arm = resolve("--arm", "image:octo/train:1 A=b", root=root, store=store)
    assert arm.given == {"A": "b"}
    assert ask(arm, "import os; print(os.getcwd())") == str(tmp_path)
    words = Path(only, "told").read_text().splitlines()
    assert {"octo/train:1", "docker://octo/train:1"} & {*words}
    mounted = [word for word in words if word.startswith(("--volume=", "--bind=", "--mount="))]
    assert [str(root) in word or str(store) in word for word in mounted] == [True, True]
    passed = {name for flag, name in pairwise(words) if flag == "--env"}
    if runtime in ("apptainer", "singularity"):  # these runtimes pass all variables without being asked
        assert not passed
    else:
        assert {"NCCL_ALGO", "A"} <= passed
        assert not {"PATH", "HOME", "VIRTUAL_ENV"} & passed


ONE = "GPU-8932f937"
TWO = "GPU-11e71f2a"


@pytest.mark.usefixtures("_gpus")
@pytest.mark.parametrize(
    ("runtime", "smi", "words"),
    [
        ("docker", f"echo {ONE}; echo {TWO}", ["--gpus", f'"device={ONE},{TWO}"']),
        (
            "podman",
            f"echo {ONE}; echo {TWO}",
            [f"--device=nvidia.com/gpu={ONE}", f"--device=nvidia.com/gpu={TWO}"],
        ),
        ("apptainer", f"echo {ONE}", ["--nv"]),
        ("singularity", f"echo {ONE}", ["--nv"]),
        ("enroot", f"echo {ONE}", ["--env", "NVIDIA_VISIBLE_DEVICES"]),
    ],
)
def test_passes_the_gpus_that_the_job_may_use(
    only: str, tmp_path: Path, runtime: str, smi: str, words: list[str]
) -> None:
    """A scheduler might have given the job two of eight GPUs, and the others to another user."""
    stand_in(only, runtime)
    executable(Path(only, "nvidia-smi"), smi)
    sif = tmp_path / "it.sif"
    sif.touch()
    python = image.interpreter(str(sif), [], tmp_path)
    subprocess.run([python, "-c", ""], check=True)
    given = Path(only, "told").read_text().splitlines()
    position = given.index(words[-1]) - len(words) + 1
    assert given[position : position + len(words)] == words


@pytest.mark.usefixtures("_gpus")
@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_a_job_without_gpus_passes_none(only: str, tmp_path: Path, runtime: str) -> None:
    """The machine has GPUs, but the scheduler gave none to the job."""
    stand_in(only, runtime)
    executable(Path(only, "nvidia-smi"), "echo No devices were found; exit 6")
    subprocess.run([image.interpreter("octo/train:1", [], tmp_path), "-c", ""], check=True)
    given = Path(only, "told").read_text().splitlines()
    assert not [word for word in given if word.startswith(("--gpus", "--device"))]
    assert "devices" not in given


@pytest.mark.usefixtures("_gpus")
@pytest.mark.parametrize(
    ("runtime", "words"),
    [("docker", ["--gpus", '"device=all"']), ("podman", ["--device=nvidia.com/gpu=all"])],
)
def test_all_gpus_need_no_uuids(only: str, tmp_path: Path, runtime: str, words: list[str]) -> None:
    """Without nvidia-smi, it is unknown which GPUs the job may use."""
    stand_in(only, runtime)
    subprocess.run([image.interpreter("octo/train:1", [], tmp_path), "-c", ""], check=True)
    given = Path(only, "told").read_text().splitlines()
    assert [word for word in given if word in words] == words


def test_an_image_without_gpus_asks_for_none(only: str, tmp_path: Path) -> None:
    stand_in(only, "docker")
    script = Path(image.interpreter("octo/train:1", [], tmp_path)).read_text()
    assert "--gpus" not in script
    assert "nvidia-smi" not in script


@pytest.mark.parametrize(
    ("runtime", "options"),
    [
        ("docker", ["--ipc=host", "--ulimit memlock=-1"]),
        ("podman", ["--ipc=host", "--ulimit=host", "--security-opt=label=disable"]),
    ],
)
def test_nccl_may_lock_and_share_memory(only: str, tmp_path: Path, runtime: str, options: list[str]) -> None:
    """SELinux keeps a labelled container of podman from the mounted store and from the GPUs' devices."""
    stand_in(only, runtime)
    script = Path(image.interpreter("octo/train:1", [], tmp_path)).read_text()
    assert [option for option in options if f" {option} " not in script] == []


def test_a_user_without_a_home_in_the_image_gets_one(only: str, tmp_path: Path) -> None:
    stand_in(only, "docker")
    script = Path(image.interpreter("octo/train:1", [], tmp_path)).read_text()
    home = tmp_path / "images" / "home"
    assert f" --env HOME={home} " in script
    assert home.is_dir()


NOT_ALONE = "an image has its own interpreter and packages"
DENIED = "docker: Error response from daemon: pull access denied for a"


@pytest.mark.parametrize(
    ("words", "runtime", "message"),
    [
        ("image:a image:b", None, NOT_ALONE),
        ("image:a accelerate==1.10.0", None, NOT_ALONE),
        ("image:a", None, f"image:a needs one of {', '.join(image.RUNTIMES)}, but none of them works"),
        (
            *("image:a", "echo 'No module named perfsuite' >&2; exit 1"),
            "cannot import perfsuite .*Install it in the image",
        ),
        (
            *("image:a", f"printf '{DENIED}\\n\\nRun docker run --help for more\\n' >&2; exit 125"),
            rf"the image does not run \(\S+: {DENIED}\)\. To see why, .* run \S+/images/\S+/python -c",
        ),
    ],
    ids=["two", "a release, too", "no runtime", "no perfsuite", "not pulled"],
)
def test_refuses_an_invalid_arm_of_an_image(
    only: str, tmp_path: Path, words: str, runtime: str | None, message: str
) -> None:
    if runtime is not None:
        stand_in(only, "docker", runtime)
    with pytest.raises(CaseError, match=message):
        resolve("--arm", words, root=tmp_path, store=tmp_path / "store")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield an empty image. Everything that Python needs is mounted from this machine."""
    if shutil.which("podman") is None:
        if os.environ.get("CI"):
            pytest.fail("podman is not installed: make podman")
        pytest.skip("needs podman: make podman")
    seen = ["/usr", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(ROOT)]
    volumes = ", ".join(f'"{path}:{path}:ro"' for path in dict.fromkeys(seen) if Path(path).exists())
    settings = (
        f"[containers]\ndefault_ulimits = ['nofile=1024:1024', 'nproc=4096:4096']\nvolumes = [{volumes}]\n"
    )
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():  # the machine uses version 1 of cgroups
        settings += "[engine]\ncgroup_manager = 'cgroupfs'\nruntime = 'runc'\n"
    (tmp_path / "containers.conf").write_text(settings)
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "docker", "exit 1")  # so that podman is used
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for name in ("usr", "lib", "lib64", "tmp", "root"):
        (tmp_path / "root" / name).mkdir(parents=True)
    archive = shutil.make_archive(str(tmp_path / "root"), "tar", tmp_path / "root")
    path = f"ENV PATH={Path(sys.executable).parent}:/usr/bin:/bin"
    podman("import", "--change", path, archive, "perfsuite-bare:1")
    yield "perfsuite-bare:1"
    podman("rmi", "--force", "perfsuite-bare:1")


def podman(command: str, *words: str) -> None:
    subprocess.run(["podman", command, *words], check=True, capture_output=True, timeout=300)


@pytest.mark.nightly
def test_launches_an_image_like_this_environment(
    bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """podman runs the launch in a new container, which is gone afterwards."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    arm = resolve("--arm", f"image:{bare}", root=tmp_path, store=tmp_path / "store")
    case = make_case(framework=DDP(), topology=Topology(processes_per_node=1))
    run = launch_once(case, detect(), tmp_path / "store" / "launch-1", Launching(arm=arm))
    assert run.failure is None, run.failure
    assert run.observed is not None
    assert run.counts
    left = subprocess.run(["podman", "ps", "--quiet"], capture_output=True, text=True, check=True)
    assert left.stdout == ""


@pytest.mark.parametrize(
    "name", ["a\ntouch ran", "a\rtouch ran", "a\x1b[2J", "a\u2028b", "--privileged", "", " "]
)
def test_refuses_a_name_that_is_not_an_image(only: str, tmp_path: Path, name: str) -> None:
    stand_in(only, "docker")
    with pytest.raises(CaseError, match="is not the name of an image"):
        image.interpreter(name, (), tmp_path)


def test_names_are_never_code_to_the_shell(only: str, tmp_path: Path) -> None:
    stand_in(only, "docker")
    ran = tmp_path / "ran"
    evil = f"$(touch {ran});`touch {ran}`'\"{{}} {{image}}"
    shared = tmp_path / f"$(touch ran)\ntouch {ran.name}"
    script = image.interpreter(evil, (shared,), tmp_path / "store")
    subprocess.run([script, "-c", "print(1)"], check=True, cwd=tmp_path)
    assert not ran.exists()
    text = Path(only, "told").read_text()
    assert evil in text.splitlines()
    assert f"--volume={shared}:{shared}" in text
