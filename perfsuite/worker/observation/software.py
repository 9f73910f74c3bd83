"""Record the versions, variables and switches on which a run depends. Imports torch."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from perfsuite.errors import PrivateNameError
from perfsuite.frameworks.common import private
from perfsuite.results.counts import Compiled, spans
from perfsuite.results.environment import variables
from perfsuite.worker.hooks import libraries

PACKAGES = ("transformers", "triton", "peft", "bitsandbytes", "flash_attn", "mamba_ssm")
"""Packages with kernels that libraries use automatically. The versions of those installed are recorded."""
NOT_THEIRS = frozenset(("perfsuite", "pip", "setuptools", "wheel"))  # distributions that no script depends on


def environment(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Return versions and variables that can explain a change. Runs are compared even if these differ."""
    seen = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "threads": str(torch.get_num_threads()),
    }
    for package in (*packages, *PACKAGES, *libraries.packages()):
        # Skip a package that is not installed, or that is a clone without a version.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            seen[package] = importlib.metadata.version(package)
    if torch.cuda.is_available():
        seen["cuda"] = str(torch.version.cuda)
        seen["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        seen["cudnn"] = str(torch.backends.cudnn.version())
        # These are the cores of one rank, because perfsuite binds ranks to sockets.
        seen["cores"] = spans(sorted(os.sched_getaffinity(0)))
    return {**seen, **variables(os.environ)}


def imported() -> dict[str, str]:
    """Return the version of each distribution from which a module is imported. This takes half a second."""
    modules = {name.partition(".")[0] for name in sys.modules}
    providers = importlib.metadata.packages_distributions()
    names = {name for module in modules for name in providers.get(module, ()) if name}
    versions = dict[str, str]()
    for name in sorted(names - NOT_THEIRS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # incomplete metadata
            versions[name] = importlib.metadata.version(name)
    return versions


def program() -> dict[str, str]:
    """Return the name and a digest of the file that runs as `__main__`. Empty if there is no such file."""
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    try:
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    except OSError:  # the file was deleted, or `file` is empty, so that `Path(file)` is the current directory
        return {}
    return {"script": f"{Path(file).name} {digest}"}


def arithmetic(device: str) -> dict[str, str]:
    """Return how fp32 is computed on a device (`ieee` or faster), and whether kernels are deterministic."""
    backends: Any = torch.backends
    on_gpu = device == "cuda"
    matmul = (backends.cuda if on_gpu else backends.mkldnn).matmul.fp32_precision
    convolution = (backends.cudnn if on_gpu else backends.mkldnn).conv.fp32_precision
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")  # in NVIDIA's libraries, this overrides torch's setting
    if on_gpu and override is not None:
        matmul = convolution = "ieee" if override == "0" else "tf32"
    return {
        "fp32_matmul": matmul.replace("none", "ieee"),
        "fp32_convolution": convolution.replace("none", "ieee"),
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
    }


def _dynamo() -> Mapping[str, Mapping[str, int]]:
    """Return the counters of torch.compile, or an empty dict if it was never loaded.

    Raises `PrivateNameError` if torch does not have the counters.
    """
    return private.if_loaded("dynamo_counters") or {}


def compiled_graphs() -> int | None:
    """Return the number of graphs that torch.compile has made in this process, or None if it is unknown."""
    with contextlib.suppress(PrivateNameError):
        return _graphs(_dynamo())
    return None


def is_in_compiled_code() -> bool:
    """Return whether the caller is part of a function that torch.compile compiles."""
    callback = private.or_none("compile_callback")
    return callback is not None and callback() is not None


def is_compiled_anew() -> bool:
    """Return whether inductor is known to have compiled a graph that was not in its cache."""
    with contextlib.suppress(PrivateNameError):
        return _dynamo().get("inductor", {}).get("fxgraph_cache_miss", 0) > 0
    return False


def compiled_counts() -> Compiled | None:
    """Return counts of the graphs and kernels that torch.compile has made, or None if there are no graphs.

    Kernels from inductor's cache count as well. Raises `PrivateNameError` if torch lacks a private name.
    """
    counters = _dynamo()
    if not _graphs(counters):
        return None
    breaks = Counter[str]()
    for reason, count in counters.get("graph_break", {}).items():
        breaks[reason.splitlines()[0]] += count  # other lines name places in files
    metrics = private.compilation_metrics()
    return Compiled(
        graphs=_graphs(counters),
        breaks=dict(breaks),
        recompilations=sum(metric.recompile_reason is not None for metric in metrics),
        kernels=private.if_loaded("inductor_kernels") or 0,
        extern_calls=counters.get("inductor", {}).get("extern_calls", 0),
    )


def _graphs(counters: Mapping[str, Mapping[str, int]]) -> int:
    return counters.get("stats", {}).get("unique_graphs", 0)
