"""Wrap the Python of a container image in a script, so that launches can use it like any other interpreter.

The container shares this machine's processes, network and shared memory. So perfsuite can monitor and end a
launch in the same way as without a container, and NCCL can communicate.
"""

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.errors import CaseError
from perfsuite.node.processes import captured

PREFIX = "image:"
# Variables that refer to files of this machine. An image has its own files.
NOT_PASSED = "PATH|HOME|PWD|OLDPWD|SHLVL|_|TMPDIR"
BY_SIF = ("apptainer", "singularity")
# Runtime -> the command that runs an image's `python` in this directory. The first runtime that works is
# used.
RUNTIMES = {
    "docker": "docker run --rm --interactive --network=host --ipc=host --pid=host --ulimit memlock=-1 "
    '--user "$(id -u):$(id -g)" --env HOME={home} {gpus}{mounts}$names --workdir "$(pwd)" {image} '
    'python "$@"',
    "podman": "podman run --rm --interactive --network=host --ipc=host --pid=host --ulimit=host "
    '--security-opt=label=disable {gpus}{mounts}$names --workdir "$(pwd)" {image} python "$@"',
    **{
        runtime: runtime + ' exec --no-home {gpus}{mounts}--pwd "$(pwd)" {image} python "$@"'
        for runtime in BY_SIF
    },
    "enroot": 'enroot start {mounts}$names {image} sh -c \'cd "$0" && exec python "$@"\' "$(pwd)" "$@"',
}
GPUS = {
    "docker": '${gpus:+--gpus "\\"device=$gpus\\""} ',
    "podman": "${gpus:+$(printf ' --device=nvidia.com/gpu=%s' $(echo $gpus | tr , ' '))} ",
    **dict.fromkeys(BY_SIF, "--nv "),
}
"""Runtime -> the option for the GPUs in `$gpus`, which is a list of UUIDs, `all`, or empty."""
SEE_GPUS = """\
gpus=all
if command -v nvidia-smi > /dev/null; then
    gpus=$(nvidia-smi --query-gpu=uuid --format=csv,noheader 2> /dev/null | grep '^GPU-' | tr '\\n' ,)
    gpus=${gpus%,}
    # Old runtimes know the name `all`, but not UUIDs.
    seen=$(echo "$gpus" | tr , '\\n' | grep -c GPU)
    [ "$seen" = "$(echo /dev/nvidia[0-9]* | wc -w)" ] && gpus=all
fi
# enroot's hook reads these variables.
export NVIDIA_VISIBLE_DEVICES="${gpus:-void}"
export NVIDIA_DRIVER_CAPABILITIES="${NVIDIA_DRIVER_CAPABILITIES:-compute,utility}"
"""
"""Lines that find the GPUs that this process may use. A scheduler might have allocated only some of the
machine's GPUs. CUDA_VISIBLE_DEVICES then counts from the first allocated GPU."""
MOUNTS = {"enroot": "--mount={0}:{0} ", **dict.fromkeys(BY_SIF, "--bind={0} ")}
SCRIPT = """\
#!/bin/sh
# Python of a container image, with this machine's variables except those that refer to its files.
{see_gpus}unset LD_LIBRARY_PATH LD_PRELOAD PYTHONHOME VIRTUAL_ENV
unset $(env | sed -n 's/^\\(CONDA_[A-Z_0-9]*\\)=.*/\\1/p')
names=$(env | sed -n 's/^\\([A-Za-z_][A-Za-z0-9_]*\\)=.*/\\1/p' | grep -Evx '{not_passed}')
names=$(printf ' --env %s' $names)
exec {command}
"""


def _answers(runtime: str) -> bool:
    """Return whether a runtime is installed and works. Docker works only if its daemon responds."""
    return shutil.which(runtime) is not None and captured([runtime, "version"]).returncode == 0


def interpreter(image: str, shared: Sequence[Path], store: Path) -> str:
    """Return the path of a script that runs an image's Python with access to the `shared` directories.

    Raises `CaseError` if the name of the image is invalid or no container runtime works.
    """
    if not image.isprintable() or image.startswith("-") or not image.strip():
        raise CaseError(
            f"{PREFIX}{image!r} is not the name of an image. A name has no control characters "
            "and does not begin with a hyphen"
        )
    runtime = next(filter(_answers, RUNTIMES), None)
    if runtime is None:
        raise CaseError(f"{PREFIX}{image} needs one of {', '.join(RUNTIMES)}, but none of them works here")
    if runtime in BY_SIF and "://" not in image and not Path(image).exists():
        image = f"docker://{image}"
    mount = MOUNTS.get(runtime, "--volume={0}:{0} ")
    has_gpus = Path("/dev/nvidiactl").exists()
    # The user of this machine has no home in the image, so libraries could not write their caches there.
    home = (store / "images" / "home").absolute()
    home.mkdir(parents=True, exist_ok=True)
    command = RUNTIMES[runtime].format(
        gpus=GPUS.get(runtime, "") if has_gpus else "",
        home=shlex.quote(str(home)),
        mounts="".join(mount.format(shlex.quote(str(directory.absolute()))) for directory in shared),
        image=shlex.quote(image),
    )
    see_gpus = SEE_GPUS if has_gpus else ""
    script = SCRIPT.format(not_passed=NOT_PASSED, command=command, see_gpus=see_gpus)
    path = (store / "images" / documents.digest(script) / "python").absolute()
    documents.write_text(path, script)
    path.chmod(0o755)
    return str(path)
