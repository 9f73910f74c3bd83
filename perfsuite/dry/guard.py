"""Build `guard.cpp` once, and load it into the process of a dry run, before torch. Imports no pytest."""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from perfsuite.case import torch_build
from perfsuite.errors import DryRunError

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILER = "g++"
DRIVER = "libcuda.so.1"
"""The guard's name for the dynamic linker, so that whoever loads NVIDIA's driver gets the guard. It has none
of the driver's functions, and CUDA's runtime takes that for a machine without a driver."""
BUILD_S = 300  # maximum time of a build, which takes 3 to 10 seconds


def why_not() -> str | None:
    """Return why CUDA cannot be pretended on this machine and what to do, or None."""
    if not torch_build.installed() or library().exists() or shutil.which(COMPILER) is not None:
        return None
    return f"there is no C++ compiler: install {COMPILER} (apt-get install g++)"


def library() -> Path:
    """Return the path of the guard in the user's cache: one per torch installation, source and Python."""
    torch = f"{torch_build.installed().get('__version__')} {_torch()}"
    key = f"{torch} {sys.version} {sys.platform}".encode() + SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "perfsuite" / f"guard-{hashlib.sha256(key).hexdigest()[:16]}.so"


def load() -> None:
    """Make torch, which is not loaded yet, believe in CUDA. Raises `DryRunError` if that fails."""
    assert "torch" not in sys.modules, "whoever asks first decides whether there is CUDA"
    file = library()
    if not file.exists():
        build(file)
    try:
        guard = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise DryRunError(f"the guard of torch {torch_build.summary()} cannot be loaded: {error}") from None
    importlib.import_module("torch")  # a build for CUDA brings a guard of its own, which this one replaces
    if not guard.perfsuite_install_guard():
        raise DryRunError(f"torch {torch_build.summary()} does not take the guard {file} for CUDA")


def refuse_driver() -> None:
    """Raise `DryRunError` if this process has loaded NVIDIA's driver, with which it could use a GPU."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.rpartition(" ")[2]
        if Path(file).name.startswith("libcuda.so"):
            raise DryRunError(
                f"a dry run uses no GPU, and this process has loaded NVIDIA's driver ({file}) by its path: "
                f"load {DRIVER}, which the linker finds, or launch the case"
            )


def build(file: Path) -> None:
    """Compile the guard, and move it into place as a whole. Raises `DryRunError` with the output."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".so")
    os.close(descriptor)
    torch = _torch()
    command = [COMPILER, "-O0", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", name]
    command += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    command += [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
    command += [f"-Wl,-soname,{DRIVER}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S)
        Path(name).replace(file)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise DryRunError(
            f"{COMPILER} cannot build {SOURCE} against torch {torch_build.summary()}; --device cpu needs no "
            f"compiler. It said: {said[:2000]}"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
