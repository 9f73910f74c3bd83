"""Read the choices of torch.compile's autotuning from the files of inductor's cache. Imports no torch.

The files are private to torch (seen in 2.13). Each tuned Triton kernel has a file with its configuration
(`torch/_inductor/runtime/autotune_cache.py`). For matrix products, files in the directory `cache` contain the
times of all candidates (`PersistentCache` in `torch/_inductor/codecache.py`). Files in another format are
ignored.
"""

import hashlib
import json
from pathlib import Path

BOOKKEEPING = {"configs_hash", "found_by_coordesc", "time_taken_ms", "triton_cache_hash"}
LONGEST = 100  # maximum length of a choice, in characters


def choices(cache: Path) -> dict[str, str]:
    """Return the choice for each tuned kernel. The keys are the names of the kernels.

    `cache` is inductor's directory. If a kernel was tuned in two launches, it has the same name in both.
    """
    of_triton = (_of_triton(file) for file in cache.glob("*/*.best_config"))
    of_products = (_of_products(file) for file in cache.glob("cache/*"))
    by_kernel = {
        name: choice
        for choices_of_file in (*of_triton, *of_products)
        for name, choice in choices_of_file.items()
    }
    return dict(sorted(by_kernel.items()))


def _of_triton(file: Path) -> dict[str, str]:
    try:
        chosen = json.loads(file.read_bytes())
        settings = [f"{name}={value}" for name, value in sorted(chosen.items()) if name not in BOOKKEEPING]
    except (OSError, ValueError, AttributeError):
        return {}
    return {f"Triton kernel {file.stem[:12]}": ", ".join(settings)[:LONGEST]}


def _of_products(file: Path) -> dict[str, str]:
    try:
        operators: dict[str, dict[str, dict[str, dict[str, float]]]] = json.loads(file.read_bytes())["cache"]
        return {
            f"{operator} of inputs {_digest(inputs)}, {precision}": _fastest(times)
            for operator, of_inputs in operators.items()
            for inputs, of_precisions in of_inputs.items()
            for precision, times in of_precisions.items()
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def _fastest(times: dict[str, float]) -> str:
    return min(times, key=times.__getitem__)[:LONGEST]


def _digest(inputs: str) -> str:
    return hashlib.sha256(inputs.encode()).hexdigest()[:8]
