"""Build `guard.cpp` once, and load it into the process of a dry run before torch. Does not import pytest."""

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
"""The name under which the dynamic linker knows the guard. It is the name of NVIDIA's driver, so a library
that loads the driver by this name gets the guard, which has none of the driver's functions. CUDA's runtime
then behaves as on a machine without a driver."""
BUILD_S = 300  # maximum duration of a build in seconds; a build usually takes 3 to 10


def why_not() -> str | None:
    """Return why CUDA cannot be faked on this machine and what to do, or None if it can be."""
    if not torch_build.installed() or library().exists() or shutil.which(COMPILER) is not None:
        return None
    return f"there is no C++ compiler: install {COMPILER} (apt-get install g++)"


def library(source: Path = SOURCE) -> Path:
    """Return the path of the guard that is built from `source`, in the user's cache.

    Each combination of torch installation, text of `source` and Python version has its own file.
    """
    torch = f"{torch_build.installed().get('__version__')} {_torch()}"
    key = f"{torch} {sys.version} {sys.platform}".encode() + source.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "perfsuite" / f"guard-{hashlib.sha256(key).hexdigest()[:16]}.so"


def load() -> None:
    """Load torch and make it believe that CUDA is available. Raises `DryRunError` if that fails."""
    assert "torch" not in sys.modules, "the guard must be loaded before torch looks for CUDA"
    file = library()
    if not file.exists():
        build(file)
    try:
        guard = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise DryRunError(f"the guard for torch {torch_build.summary()} cannot be loaded: {error}") from None
    # If torch is built for CUDA, it registers its own device guard here. `perfsuite_install_guard` then
    # replaces that guard.
    importlib.import_module("torch")
    if not guard.perfsuite_install_guard():
        raise DryRunError(
            f"torch {torch_build.summary()} reports no CUDA, although perfsuite's stand-in for it ({file}) "
            "was loaded. Give --device cpu, which needs no CUDA"
        )


def refuse_driver() -> None:
    """Raise `DryRunError` if this process has loaded NVIDIA's driver, with which it could use a GPU."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.rpartition(" ")[2]
        if Path(file).name.startswith("libcuda.so"):
            raise DryRunError(
                "a dry run must not use a GPU, but this process has loaded NVIDIA's driver by its path "
                f"({file}). Load it by its name, {DRIVER}, or launch the case"
            )


def build(file: Path, *, source: Path = SOURCE, driver: str = DRIVER) -> None:
    """Compile `source` and move the library to `file`. Raises `DryRunError` with the compiler's output.

    `driver` is the name under which the dynamic linker will know the library.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".so")
    except OSError as error:
        raise DryRunError(
            f"cannot write {file}, which fakes CUDA: {error.strerror}. Set XDG_CACHE_HOME to another "
            "directory, or give --device cpu"
        ) from None
    os.close(descriptor)
    torch = _torch()
    command = [COMPILER, "-O0", "-shared", "-fPIC", "-std=c++20", str(source), "-o", name]
    command += [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    command += [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu"]
    command += [f"-Wl,-soname,{driver}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_S)
        Path(name).replace(file)
    except OSError as error:  # for example, there is no compiler any more
        raise DryRunError(f"cannot build {file}, which fakes CUDA: {error}. Give --device cpu") from None
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise DryRunError(
            f"{COMPILER} cannot build {source} against torch {torch_build.summary()}. Give --device cpu, "
            f"which needs no compiler. Output of the compiler: {said[:2000]}"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
