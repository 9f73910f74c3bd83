"""Call NVML in a separate process with a deadline.

perfsuite's own process must not call NVML, because a call can hang.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import perfsuite
from perfsuite.errors import MachineError

LIBRARY = "libnvidia-ml.so.1"  # NVML. A machine without this library has no NVIDIA driver
# Seconds within which NVML must answer. NVML itself takes milliseconds, and Python takes a second to start.
ANSWER_S = 30.0


def has_library(library: str = LIBRARY) -> bool:
    """Return whether this machine has NVML, which is in the file `library`."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def ask(module: str, *words: str, answer_s: float = ANSWER_S) -> Any:
    """Run a module with these arguments, and return its `answer`.

    Raises `MachineError` if there is no answer within `answer_s` seconds.
    """
    # -P: without it, Python would import modules from the current directory, which can be an untrusted
    # checkout. perfsuite itself is then found only if it is installed, or on PYTHONPATH.
    command = [sys.executable, "-P", "-m", module, *words]
    paths = [str(Path(perfsuite.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    try:
        said, errors = child.communicate(timeout=answer_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1)
        raise MachineError(
            f"NVML did not answer within {answer_s:.0f} s (is a GPU lost?). Look at dmesg and restart the "
            "machine, or measure only on its CPU (CUDA_VISIBLE_DEVICES=)"
        ) from None
    try:
        reply = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        last = (errors.strip() or f"exit code {child.returncode}").splitlines()[-1]
        raise MachineError(
            f"the process that calls NVML failed: {last}. To see the error, run {' '.join(command)}"
        ) from None
    if "error" in reply:
        raise MachineError(reply["error"])
    return reply["answer"]


def answer(asked: Callable[[], Any]) -> None:
    """Print the result of `asked`, or its `MachineError`. This runs in the process that `ask` starts."""
    try:
        print(json.dumps({"answer": asked()}))
    except MachineError as error:
        print(json.dumps({"error": str(error)}))
