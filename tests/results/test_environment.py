import importlib.metadata
import platform

import pytest

from perfsuite.redaction import secret_variable
from perfsuite.results import environment


def test_records_telling_variables_but_no_secret() -> None:
    names = ["NCCL_ALGO", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHDYNAMO_DISABLE"]
    names += ["TORCHINDUCTOR_MAX_AUTOTUNE", "CUBLAS_WORKSPACE_CONFIG", "CUDNN_LOGLEVEL_DBG"]
    names += ["TRANSFORMERS_ATTENTION", "TRITON_CACHE_DIR"]
    others = ["NVIDIA_API_KEY", "TRANSFORMERS_TOKEN", "TORCH_SECRET", "HF_TOKEN", "HOME"]
    assert environment.variables(dict.fromkeys(names + others, "x")) == dict.fromkeys(names, "x")
    files = "/runs/launch-3/files"
    environ = {"PERFSUITE_LAUNCH_DIR": files, "TRITON_CACHE_DIR": f"{files}/triton"}
    variables = environment.variables(environ)
    assert variables == {"TRITON_CACHE_DIR": "{launch_dir}/triton"}, "the same as in any other launch"


def test_perfsuites_own_directories_are_no_change() -> None:
    environ = {
        "PERFSUITE_LAUNCH_DIR": "/runs/case/launch-3/files",
        "TORCHINDUCTOR_CACHE_DIR": "/runs/case/compile-caches/inductor",
        "TRITON_CACHE_DIR": "/mine",
    }
    assert environment.variables(environ) == {"TRITON_CACHE_DIR": "/mine"}


def test_a_secret_in_a_value_is_not_recorded() -> None:
    given = {"PYTORCH_INDEX_URL": "https://u:pw@h/simple", "NVIDIA_PASS": "x", "NCCL_IB_PKEY": "0"}
    assert environment.variables(given) == {"PYTORCH_INDEX_URL": "https://***@h/simple", "NCCL_IB_PKEY": "0"}


def test_records_a_non_utf8_variable_readably() -> None:
    assert environment.variables({"NCCL_\udc80": "a\udcff"}) == {"NCCL_\\udc80": "a\\udcff"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"LR": "1", "HF_TOKEN": "hf_x", "WANDB_API_KEY": "y"}, "HF_TOKEN"),
        ({"PAD_TOKEN": "<pad>", "TEXT_KEY": "text", "HF_TOKEN": ""}, None),
        ({"DB": "postgres://me:x@host/db"}, "DB"),
        ({"DB": "postgres://host/db", "EMPTY": ""}, None),
    ],
    ids=["by name", "no secret", "in an address", "no address"],
)
def test_finds_secrets_by_name_and_in_addresses(given: dict[str, str], expected: str | None) -> None:
    assert secret_variable(given) == expected


def test_session_reads_versions_without_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NVIDIA_API_KEY", "secret")
    seen = environment.of_this_process()
    assert seen["pydantic"] == importlib.metadata.version("pydantic")
    assert seen["torch"] == importlib.metadata.version("torch")
    assert (seen["python"], seen["kernel"]) == (platform.python_version(), platform.release())
    assert (seen["NCCL_ALGO"], "NVIDIA_API_KEY" in seen) == ("Ring", False)
