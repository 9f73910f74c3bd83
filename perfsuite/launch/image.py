"""Wrap the Python of a container image in a script, which launches use like any other interpreter.

The container shares this machine's processes, network and shared memory. So perfsuite can monitor and end a
launch as it does without a container, and NCCL can communicate.
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
# The command with which each runtime runs an image's `python` in this directory. The first runtime that works
# is used.
RUNTIMES = {
    "docker": "docker run --rm --interactive --network=host --ipc=host --pid=host --ulimit memlock=-1 "
    '--user "$(id -u):$(id -g)" {gpus}{mounts}$names --workdir "$(pwd)" {image} python "$@"',
    "podman": "podman run --rm --interactive --network=host --ipc=host --pid=host {gpus}{mounts}$names "
    '--workdir "$(pwd)" {image} python "$@"',
    **{
        runtime: runtime + ' exec --no-home {gpus}{mounts}--pwd "$(pwd)" {image} python "$@"'
        for runtime in BY_SIF
    },
    "enroot": 'enroot start {mounts}$names {image} sh -c \'cd "$0" && exec python "$@"\' "$(pwd)" "$@"',
}
GPUS = {
    "docker": "--gpus=all ",
    "podman": "--device=nvidia.com/gpu=all ",
    **dict.fromkeys(BY_SIF, "--nv "),
}
MOUNTS = {"enroot": "--mount={0}:{0} ", **dict.fromkeys(BY_SIF, "--bind={0} ")}
SCRIPT = """\
#!/bin/sh
# Python of a container image, with this machine's variables except those that refer to its files.
unset LD_LIBRARY_PATH LD_PRELOAD PYTHONHOME VIRTUAL_ENV $(env | sed -n 's/^\\(CONDA_[A-Z_0-9]*\\)=.*/\\1/p')
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
    command = RUNTIMES[runtime].format(
        gpus=GPUS.get(runtime, "") if Path("/dev/nvidiactl").exists() else "",
        mounts="".join(mount.format(shlex.quote(str(directory.absolute()))) for directory in shared),
        image=shlex.quote(image),
    )
    script = SCRIPT.format(not_passed=NOT_PASSED, command=command)
    path = (store / "images" / documents.digest(script) / "python").absolute()
    documents.write_text(path, script)
    path.chmod(0o755)
    return str(path)
