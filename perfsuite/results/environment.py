"""Versions and variables that measurements depend on, as far as they can be read without torch."""

import functools
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from perfsuite.results.run_dir import FILES, LAUNCH_DIR

VARIABLES = (  # the beginnings of environment variables that are recorded
    *("NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "GLOO_", "UCX_", "FI_"),
    *("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_", "TRANSFORMERS_", "PYTORCH_"),
    *("OMP_", "MKL_", "KMP_", "ONEDNN_", "DNNL_", "ATEN_CPU_CAPABILITY", "LD_PRELOAD"),
)
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
"""Words in a variable's name that keep it from being recorded: `NVIDIA_API_KEY` is a secret."""

_OF_A_VARIABLE = re.compile(
    r"(^|_|API|ACCESS|AUTH|PRIVATE|SECRET)KEY(_|$)|(^|_)TOKEN$|(^|_)(SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)",
    re.IGNORECASE,
)
_OF_TEXT = re.compile(  # a text's tokens and its samples' keys are no secrets: `PAD_TOKEN`, `TEXT_KEY`
    r"(^|_)(PAD|EOS|BOS|UNK|MASK|SEP|CLS|START|END|STOP|IMAGE|NEW|SPECIAL|EXTRA|PER|TEXT|LABEL)_(TOKEN|KEY)$",
    re.IGNORECASE,
)
_OF_AN_OPTION = re.compile(  # fewer words than of a variable: `--pad-token` and `--text-key` are no secrets
    r"(api|access|auth|bearer|comet|github|hf|hub|neptune|private|wandb)[-_]?(key|token)$"
    r"|(password|passwd|secret|secret[-_]key|credentials)$",
    re.IGNORECASE,
)
_IN_AN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")  # a password: `postgres://user:password@host`


def secret_variable(given: Mapping[str, str]) -> str | None:
    """Return the name of the first variable that looks as if it held a secret, or None."""
    for name, value in given.items():
        is_named_so = _OF_A_VARIABLE.search(name) and not _OF_TEXT.search(name)
        if value and (is_named_so or _IN_AN_ADDRESS.search(value)):
            return name
    return None


def secret_word(words: Sequence[str]) -> str | None:
    """Return the first word of a command that looks as if it (`--password=x`), or the next, held a secret."""
    for word, following in pairwise([*words, "-"]):
        name, equals, value = word.partition("=")
        if address := _IN_AN_ADDRESS.search(word):
            return word[: address.start()]
        is_given = value if equals else word.startswith("-") and not following.startswith("-")
        if is_given and _OF_AN_OPTION.search(name):
            return name
    return None


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the `VARIABLES` that hold no secret, with `LAUNCH_DIR` in place of the launch's directory."""
    new = environ.get(FILES) or LAUNCH_DIR
    return {
        key: value.replace(new, LAUNCH_DIR)
        for key, value in environ.items()
        if key.startswith(VARIABLES) and not SECRET.search(key)
    }


@functools.cache
def installed() -> Mapping[str, str]:
    """Return the version of each package that this interpreter finds, by its name in lower case."""
    return {each.name.lower(): each.version for each in importlib.metadata.distributions()}


def of_this_process() -> dict[str, str]:
    """Return what a launch will find: versions of Python, kernel and packages, and variables, by name."""
    own = {"python": platform.python_version(), "kernel": platform.release()}
    return {**installed(), **own, **variables(os.environ)}
