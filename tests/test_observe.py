from __future__ import annotations

import pytest
import torch

from perfsuite.case import Case
from perfsuite.errors import MismatchError
from perfsuite.framework import Workload
from perfsuite.frameworks.ddp import DDP
from perfsuite.observe import Observer
from perfsuite.result import Observed
from perfsuite.torch_model import build_model, build_optimizer, synthetic_batches
from tests.samples import make_case


def observed(case: Case) -> tuple[Observer, Observed]:
    """What is seen in two steps of one process, without a wrapper."""
    model = build_model(case, torch.device("cpu"))
    optimizer = build_optimizer(case, model)
    observer = Observer(case, Workload(run=lambda steps: [], data_parallel=1, model=model))
    for tokens in synthetic_batches(case, 0, torch.device("cpu"))[:2]:
        model(input_ids=tokens, labels=tokens).loss.backward()
        observer.before_optimizer_step(optimizer, (), {})
        optimizer.step()
        optimizer.zero_grad()
    return observer, observer.result()


def in_one_process(model: str, **changes: str) -> Case:
    case = make_case(model=model, framework=DDP(), sequence_length=16, **changes)
    return case.replace(topology=case.topology.replace(processes_per_node=1))


@pytest.mark.parametrize(
    ("model", "attention"),
    [("llama-tiny", {"attention": "sdpa"}), ("mamba-tiny", {"attention": "none", "mamba_ssm": "none"})],
)
def test_which_attention_runs(model: str, attention: dict[str, str]) -> None:
    _, result = observed(in_one_process(model))
    assert result.settings.items() >= attention.items()


@pytest.mark.parametrize(("asked", "fits"), [("sdpa", True), ("eager", False), ("flash_attention_2", False)])
def test_a_model_without_attention_runs_the_default_and_no_other(asked: str, fits: bool) -> None:
    observer, result = observed(in_one_process("mamba-tiny", attention=asked))
    result = result.replace(
        settings={**result.settings, "world_size": "1", "wrapper": "DistributedDataParallel"}
    )
    if fits:
        observer.check(result)
    else:
        with pytest.raises(MismatchError, match=f"attention: the case asks for '{asked}', but 'none' ran"):
            observer.check(result)


@pytest.mark.parametrize(
    ("mode", "recomputing"), [("none", "0 of 2"), ("full", "2 of 2"), ("every-2", "1 of 2")]
)
def test_the_blocks_of_a_mamba_are_recomputed(mode: str, recomputing: str) -> None:
    _, result = observed(in_one_process("mamba-tiny", activation_checkpointing=mode))
    assert result.settings["recomputing_blocks"] == recomputing
