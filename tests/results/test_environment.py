from __future__ import annotations

import importlib.metadata
import platform

import pytest

from perfsuite.results import environment


def test_variables_that_may_explain_a_change_and_no_secret() -> None:
    kept = {
        "NCCL_ALGO": "Ring",
        "NVIDIA_TF32_OVERRIDE": "1",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TRITON_CACHE_DIR": "/x",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDNN_LOGLEVEL_DBG": "0",
        "TRANSFORMERS_ATTENTION": "x",
    }
    dropped = {
        "NVIDIA_API_KEY": "nvapi-1",
        "TRANSFORMERS_TOKEN": "t",
        "TORCH_SECRET": "s",
        "HF_TOKEN": "t",
        "HOME": "/root",
    }
    assert environment.variables({**kept, **dropped}) == kept


def test_the_directory_of_a_launch_is_no_change_from_the_launch_before() -> None:
    environ = {
        "PERFSUITE_LAUNCH_DIR": "/runs/launch-3/files",
        "TRITON_CACHE_DIR": "/runs/launch-3/files/triton",
    }
    assert environment.variables(environ) == {"TRITON_CACHE_DIR": "{launch_dir}/triton"}


def test_a_session_knows_every_version_without_importing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NVIDIA_API_KEY", "secret")
    seen = environment.of_this_process()
    assert seen["pydantic"] == importlib.metadata.version("pydantic")
    assert seen["torch"] == importlib.metadata.version("torch")
    assert (seen["python"], seen["kernel"]) == (platform.python_version(), platform.release())
    assert seen["NCCL_ALGO"] == "Ring"
    assert "NVIDIA_API_KEY" not in seen
