"""Read which torch is installed, and for which CUDA it was built, without importing torch."""

import importlib.util
import runpy
from pathlib import Path
from typing import Any

from perfsuite.case.hardware import Machine

MIN_TORCH = (2, 11)  # the oldest release that perfsuite can measure
_OR_NEWER = "perfsuite needs {0}.{1} or newer: pip install 'torch>={0}.{1}'".format(*MIN_TORCH)


def installed() -> dict[str, Any]:
    """Return the constants in `torch/version.py`, by name. Empty if torch is not installed.

    The constant `cuda` is None if torch was built without CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))


def release() -> tuple[int, int]:
    """Return the first two numbers of the installed torch version, or (0, 0) without torch."""
    major, minor = installed().get("__version__", "0.0").split(".")[:2]
    return int(major), int(minor)


def summary() -> str:
    """Describe the installed torch in one line."""
    build = installed()
    if not build:
        return "not installed"
    cuda = build.get("cuda")
    return f"{build['__version__']}, built {'without CUDA' if cuda is None else f'for CUDA {cuda}'}"


def wrong_build(machine: Machine) -> str | None:
    """Return why the installed torch cannot train on `machine`, or None. pip does not check this."""
    build = installed()
    if not build:
        return f"torch is not installed: {_OR_NEWER}"
    version = build["__version__"]
    if release() < MIN_TORCH:
        return f"torch {version} is too old: {_OR_NEWER}"
    if machine.device == "cpu" or build["cuda"] is not None:
        return None
    return (
        f"torch {version} was built without CUDA and cannot use the GPUs of this machine ({machine.devices} "
        f"x {machine.device_name}). Install the build from the public index (pip uninstall --yes torch && "
        f"PIP_EXTRA_INDEX_URL= pip install torch=={version.partition('+')[0]}), or run only the cases meant "
        "for cpu (-m cpu)"
    )
