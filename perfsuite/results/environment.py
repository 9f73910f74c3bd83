"""Collect the versions and variables that affect measurements and that can be read without torch."""

import functools
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from perfsuite.errors import readable
from perfsuite.redaction import is_secret
from perfsuite.results.run_dir import COMPILE_CACHES, FILES, LAUNCH_DIR, RunDir

VARIABLES = (  # prefixes of environment variables that are recorded
    *("NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "GLOO_", "UCX_", "FI_"),
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_", "TRANSFORMERS_", "PYTORCH_"),
    *("OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "OPENBLAS_", "GOMP_", "ATEN_CPU_CAPABILITY"),
    *("MALLOC_", "LD_PRELOAD", "LD_LIBRARY_PATH", "TOKENIZERS_", "ACCELERATE_", "FSDP_", "DEEPSPEED_"),
    *("PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONOPTIMIZE", "PYTHON_GIL", "PYTHON_JIT"),
)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to record: those with a prefix in `VARIABLES`, without secrets.

    A variable whose name suggests a secret is left out, and secrets in values are masked. `LAUNCH_DIR`
    replaces the path of the launch's directory. Cache directories of compilers are left out if perfsuite
    chose them, because they differ in each session.
    """
    new = environ.get(FILES) or LAUNCH_DIR
    ours = str(RunDir(Path(new).parent).compile_caches)
    recorded = {
        readable(name): readable(value.replace(new, LAUNCH_DIR))
        for name, value in environ.items()
        if name.startswith(VARIABLES) and not (name in COMPILE_CACHES and value.startswith(ours))
    }
    return {name: value for name, value in recorded.items() if not is_secret(name, value)}


@functools.cache
def installed() -> Mapping[str, str]:
    """Return the version of each package that this interpreter finds, by lower-case name."""
    return {
        distribution.name.lower(): distribution.version for distribution in importlib.metadata.distributions()
    }


def of_this_process() -> dict[str, str]:
    """Return the versions (Python, kernel, packages) and variables that a launch will have, by name."""
    own = {"python": platform.python_version(), "kernel": platform.release()}
    return {**installed(), **own, **variables(os.environ)}
