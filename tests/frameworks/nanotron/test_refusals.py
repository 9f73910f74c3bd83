"""Test that cases which nanotron cannot run are refused before anything is launched."""

from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case, Framework, Nanotron, Topology
from perfsuite.case.hardware import Machine
from perfsuite.dry.driver import dry_run
from perfsuite.dry.machine import why_not_dry
from perfsuite.errors import CaseError, DryRunError
from perfsuite.launch.requirements import unsupported
from perfsuite.node.machine import detect
from tests.frameworks.refusals import TAKES, check_refusal, row
from tests.frameworks.test_base import SMALL, remove
from tests.samples import make_case, make_gpu_machine

NANOTRON = Nanotron(dp=2)
WHOLE: dict[str, Any] = {"activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("case", "machine", "why"),
    [
        row(NANOTRON, None, head_dim=32, attention_bias=False, rope_theta=5e5),
        row(NANOTRON, TAKES.format("nanotron", "'fp32' or 'bf16'", "bf16-mixed"), precision="bf16-mixed"),
        row(NANOTRON, "nanotron supports activation_checkpointing 'none', but...", **WHOLE),
        row(NANOTRON, "nanotron supports attention 'sdpa' or 'flash_attention_2', but...", attention="eager"),
        row(NANOTRON, "nanotron supports compile False, but the case asks for True", compile=True),
        row(NANOTRON, "nanotron builds only Llama models, but gpt2-tiny is a gpt2", model="gpt2-tiny"),
        row(NANOTRON, "nanotron supports only head_dim=32, but odd has 64", head_dim=64),
        row(NANOTRON, "nanotron supports only mlp_bias=False, but odd has True", mlp_bias=True),
        row(NANOTRON, "nanotron supports only attention_dropout=0.0, but odd has 0.1", attention_dropout=0.1),
    ],
)
def test_refuses_an_impossible_case_beforehand(case: Case, machine: Machine, why: str | None) -> None:
    check_refusal(case, machine, why)


@pytest.mark.parametrize(
    ("framework", "slug"),
    [
        (Nanotron(dp=4, tp=4, tp_mode="REDUCE_SCATTER"), "nanotron-dp4-tp4-reduce_scatter"),
        (Nanotron(pp=2, pp_engine="afab", resume=True), "nanotron-pp2-afab-resume"),
    ],
)
def test_the_slug_names_the_options(framework: Framework, slug: str) -> None:
    assert framework.slug() == slug


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    remove(monkeypatch, "nanotron")
    why = "it needs the package nanotron, which is not installed: pip install 'perfsuite[nanotron]'"
    assert unsupported(SMALL.replace(framework=Nanotron()), detect()) == why


def test_a_file_of_nanotron_needs_no_nanotron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    remove(monkeypatch, "nanotron")
    file = tmp_path / "mine.yaml"
    sections = ["checkpoints", "general", "logging", "model", "optimizer", "tokens"]
    file.write_text(
        "parallelism: {dp: 2, pp: 1, tp: 1}\n" + "".join(f"{name}: {{x: 1}}\n" for name in sections)
    )
    case = make_case(framework=Nanotron(config=str(file)), hardware="cpu")
    why = "it needs the package nanotron, which is not installed: pip install 'perfsuite[nanotron]'"
    assert unsupported(case, detect()) == why


def test_nccl_connects_on_first_use() -> None:
    case = make_case(framework=Nanotron(dp=1, pp=2))
    assert Nanotron(dp=1, pp=2).plan(case).process_group == "lazy"


# --- dry runs -------------------------------------------------------------------------------------------

DRY = make_case(framework=NANOTRON, model="llama-tiny", hardware="cpu")


def test_layout_that_does_not_fit_is_a_case_error(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="dp 1 x tp 3 x pp 1 is 3"):
        dry_run(DRY.replace(framework=Nanotron(tp=3)), tmp_path)


def test_unknown_precision_is_refused_before_a_layout(tmp_path: Path) -> None:
    """nanotron has only some precisions.

    Its configuration, from which ranks are chosen, needs one of them.
    """
    with pytest.raises(DryRunError, match="nanotron"):
        dry_run(DRY.replace(precision="bf16-mixed"), tmp_path)


IN_FP32 = Nanotron(dp=8, accumulate_grad_in_fp32=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"framework": Nanotron(pp=8)}, "pipeline stages exchange"),
        ({"framework": Nanotron(dp=8, resume=True)}, "the values of a checkpoint"),
        ({"framework": IN_FP32, "precision": "bf16"}, "slices storages"),
    ],
)
def test_says_why_a_case_cannot_run_dry(changes: dict[str, Any], said: str) -> None:
    eight = make_case(hardware="h100", topology=Topology(processes_per_node=8), model="llama-tiny")
    reason = str(why_not_dry(eight.replace(**changes), make_gpu_machine()))
    assert reason.startswith("a dry run cannot do this: ")
    assert said in reason
