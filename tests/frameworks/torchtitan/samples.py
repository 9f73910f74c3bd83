"""A case of torchtitan, and the pytest marks of the test modules that import it."""

from typing import Any

import pytest

from perfsuite import TorchTitan
from perfsuite.case import torch_build
from perfsuite.case.catalog import MODELS
from perfsuite.case.model import Model
from perfsuite.frameworks.torchtitan import MIN_TORCH
from tests.frameworks import test_base as base

SMALL = base.SMALL.replace(framework=TorchTitan())
LLAMAS = [name for name, model in MODELS.items() if model.config["model_type"] == "llama"]

MARKS = [
    pytest.mark.skipif(
        torch_build.release() < MIN_TORCH,
        reason=f"torchtitan 0.3 needs a newer torch: {torch_build.summary()}",
    ),
    pytest.mark.usefixtures("titan"),
    # torchtitan loads torch's compiler, which warns about torch.jit, and torchdata, which warns about torch.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # torchtitan looks in its experiments for models that it cannot import otherwise.
    pytest.mark.filterwarnings("ignore:The 'torch' module has already been imported:UserWarning"),
]


def changed(**config: Any) -> Model:
    """Return llama-tiny with these fields changed."""
    return Model.from_config({**MODELS["llama-tiny"].config, **config}, name="changed")
