import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from perfsuite import DDP, Case, LoRA, Model, Script, Topology
from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import Workload
from perfsuite.frameworks.common.model import build_model, build_optimizer, synthetic_batches
from perfsuite.results.rank_report import Observed
from perfsuite.worker.observation.observe import GRAPHS_NOT_OBSERVED, Observer, Owners, _attention, owner
from perfsuite.worker.observation.second_step import NO_FORWARD, NOT_OBSERVED
from tests.samples import make_case

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("new_objects_alone")


def observed(case: Case) -> tuple[Observer, Observed]:
    """Return what is observed in two steps of one process, without a wrapper."""
    model = build_model(case, CPU)
    optimizer = build_optimizer(case, model)
    observer = Observer(case, Workload(run=lambda steps: [], data_parallel=1, model=model))
    for tokens in synthetic_batches(case, 0, CPU)[:2]:
        model(input_ids=tokens, labels=tokens).loss.backward()
        observer.before_optimizer_step(optimizer, (), {})
        optimizer.step()
        optimizer.zero_grad()
    return observer, observer.result()


def replayed(case: Case) -> tuple[Observer, Observed]:
    """Return what is observed if the second step replays a CUDA graph.

    In a replay, gradients change, but no module is called.
    """
    model = build_model(case, CPU)
    optimizer = build_optimizer(case, model)
    observer = Observer(case, Workload(run=lambda steps: [], data_parallel=1, model=model))
    tokens = synthetic_batches(case, 0, CPU)[0]
    model(input_ids=tokens, labels=tokens).loss.backward()
    for _ in range(2):
        observer.before_optimizer_step(optimizer, (), {})
        optimizer.step()
    return observer, observer.result()


def in_a_script(**changes: Any) -> tuple[Observer, Observed]:
    """Return what is observed in a Llama, for a case that describes a script."""
    observer, result = observed(in_one_process(**changes))
    observer.case = observer.case.replace(framework=Script(path="train.py"))
    return observer, result


def refused(observer: Observer, result: Observed, **changes: Any) -> str:
    """Return the message of the mismatch if the case asks for something else."""
    observer.case = observer.case.replace(**changes)
    with pytest.raises(MismatchError) as error:
        observer.check(result)
    return str(error.value)


def as_ddp(result: Observed) -> Observed:
    """Return the same observation, as if the model had been wrapped in DDP as the case requires."""
    wrapped = {"world_size": "1", "wrapper": "DistributedDataParallel"}
    return result.replace(settings={**result.settings, **wrapped})


def in_one_process(model: str = "llama-tiny", **changes: Any) -> Case:
    one = Topology(processes_per_node=1)
    return make_case(model=model, framework=DDP(), sequence_length=16, topology=one, **changes)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"model": "llama-tiny"}, {"attention": "sdpa", "attention_kernel": "FlashAttentionForCpu"}),
        ({"model": "llama-tiny", "attention": "eager"}, {"attention": "eager", "attention_kernel": "math"}),
        ({}, {"attention": "none", "mamba_ssm": "none", "recomputing_blocks": "0 of 2"}),
        ({"activation_checkpointing": "full"}, {"recomputing_blocks": "2 of 2"}),
        ({"activation_checkpointing": "every-2"}, {"recomputing_blocks": "1 of 2"}),
    ],
)
def test_reports_the_attention_and_recomputed_blocks(
    changes: dict[str, Any], settings: dict[str, str]
) -> None:
    _, result = observed(in_one_process(**{"model": "mamba-tiny", **changes}))
    assert result.settings.items() >= settings.items()


@pytest.mark.parametrize(("asked", "fits"), [("sdpa", True), ("eager", False), ("flash_attention_2", False)])
def test_no_attention_fits_only_the_default(asked: str, fits: bool) -> None:
    observer, result = observed(in_one_process("mamba-tiny", attention=asked))
    said = f"attention: the case asks for '{asked}', but 'none' ran"
    with nullcontext() if fits else pytest.raises(MismatchError, match=said):
        observer.check(as_ddp(result))


def test_names_the_case_field_for_recomputation() -> None:
    observer, result = in_a_script(activation_checkpointing="full")
    observer.check(result)
    said = refused(observer, result, activation_checkpointing="none")
    assert said.startswith("recomputing_blocks: the case asks for '0 of 4', but '4 of 4' ran. The ")
    end = "If the script is as it should be, give another activation_checkpointing in the case."
    assert said.endswith(end)


@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
def test_a_replayed_step_shows_no_forward(activation_checkpointing: Any) -> None:
    observer, result = replayed(in_one_process(activation_checkpointing=activation_checkpointing))
    assert [result.settings[name] for name in ("compute_dtype", "recomputing_blocks")] == [NO_FORWARD] * 2
    assert NO_FORWARD in refused(observer, as_ddp(result))
    with_graphs = as_ddp(result).replace(settings={**as_ddp(result).settings, "cuda_graphs": "yes"})
    observer.check(with_graphs)
    observer.case = observer.case.replace(framework=Script(path="train.py"))
    observer.check(result)


def test_checks_recomputation_known_by_name_only() -> None:
    """If only the name of a model is known, the number of recomputed blocks is not checked.

    The reason is that some of the model's blocks might not be found.
    """
    net = Model.named("net")
    observer, result = in_a_script(activation_checkpointing="every-2")
    for mode in ("every-2", "full"):
        observer.case = observer.case.replace(model=net, activation_checkpointing=mode)
        observer.check(result)
    said = refused(observer, result, activation_checkpointing="none")
    assert said.startswith("recomputing_blocks: the case asks for '0 of 4', but '2 of 4' ran")
    observer, result = in_a_script()
    said = refused(observer, result, model=net, activation_checkpointing="full")
    assert said.startswith("recomputing_blocks: the case asks for '4 of 4', but '0 of 4' ran")


def test_checks_script_adapters_against_the_case() -> None:
    lora = LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj"))
    observer, result = in_a_script(lora=lora)
    observer.check(result)
    said = refused(observer, result, lora=lora.replace(rank=8))
    assert "rank 8, alpha 8, on q_proj v_proj', but 'rank 4, alpha 8, on q_pr" in said
    code = 'set lora=LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj"))'
    assert said.endswith(f"If the script is as it should be, {code} in the case.")
    assert refused(observer, result, lora=None).endswith(f"The FLOPs depend on them: {code} in the case")


def test_reports_missing_adapters_of_a_lora_case() -> None:
    observer, result = in_a_script()
    said = refused(observer, result, lora=LoRA(rank=4, alpha=8))
    assert said.startswith("trained: the case asks for 'adapters only', but 'all' ran.")
    assert said.endswith("leave lora out of the case.")


def test_rank_without_trained_elements_passes() -> None:
    """With FSDP1 and adapters, a rank's shard can consist of frozen weights only."""
    observer, result = observed(in_one_process())
    assert result.settings["parameters_changed"] == "yes"
    for parameter in observer.model.parameters():
        parameter.requires_grad_(False)
    observer._before = {}
    assert observer.result().settings["parameters_changed"] == "yes"


def test_reports_diverged_weights_without_a_loss() -> None:
    observer, result = in_a_script()
    name = next(iter(observer._after))
    observer._after[name] = math.nan
    observer.check(result)  # with a loss, the loss shows the divergence
    said = refused(observer, result, framework=Script(path="train.py", loss=None))
    assert said.startswith(f"{name} is nan after the last step: the training div")


def test_attention_kernel_is_no_script_setting() -> None:
    observer, _ = in_a_script()
    result = observer.result()
    assert "attention_kernel" not in result.settings
    assert result.environment["attention_kernel"] == "FlashAttentionForCpu"


def test_refuses_a_compiled_case_without_a_graph() -> None:
    """Such a case has no graph if TORCHDYNAMO_DISABLE is set, for example."""
    observer, result = observed(in_one_process())
    assert result.settings["compiled"] == "no"
    said = refused(observer, as_ddp(result), compile=True)
    assert said.startswith("compiled: the case asks for 'yes', but 'no' ran")


def test_unknown_compilation_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._dynamo.utils.counters")
    observer, result = observed(in_one_process())
    assert result.settings["compiled"] == GRAPHS_NOT_OBSERVED
    observer.case = observer.case.replace(compile=True)
    observer.check(as_ddp(result))


def test_leaves_a_model_that_may_be_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._dynamo.utils.counters")
    observer, _ = observed(in_one_process())
    assert not observer._second_step.inside


def test_evidence_is_of_step_two_and_replicas() -> None:
    evidence = observed(in_one_process())[0].evidence()
    assert (evidence.samples, evidence.tokens, evidence.padding, evidence.forwards) == (2, 2 * 16, 0, 1)
    assert (evidence.collectives, evidence.replicated) == (None, {}), "a single process has no replica"


def test_does_not_judge_unobservable_attention() -> None:
    """Examples are torchtune's models, which have no configuration of transformers."""
    observer, result = in_a_script()
    result = result.replace(settings={**result.settings, **_attention(nn.Linear(2, 2))})
    assert result.settings["attention"] == "not observed (the model is not transformers' own)"
    observer.check(result)
    observer.case = observer.case.replace(framework=DDP())
    observer.check(as_ddp(result))


def sgd(*parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters)


def test_observes_several_modules_of_an_optimizer() -> None:
    embeddings = nn.Embedding(8, 4)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = sgd(*model.parameters(), *embeddings.parameters())
    owners = owner(optimizer)
    assert isinstance(owners, Owners)
    assert list(owners) == [model, embeddings]
    case = make_case(framework=Script(path="train.py"), model=Model.named("net"), sequence_length=3)
    observer = Observer(case, Workload(run=lambda steps: [], data_parallel=1))
    for _ in range(2):
        model(embeddings(torch.ones(2, 3, dtype=torch.int64))).sum().backward()
        observer.before_optimizer_step(optimizer, (), {})
        optimizer.step()
    assert observer.result().settings["parameters_changed"] == "yes"
    assert observer.evidence().tokens == 6
    assert not model._forward_hooks
    assert not embeddings._forward_pre_hooks


def test_outermost_module_trains() -> None:
    inner = nn.Linear(2, 2)
    alone = torch.ones(2, requires_grad=True)
    outer = nn.Sequential(inner)
    with pytest.raises(MismatchError, match=r"^no module owns 1 of the 3 tensors that SGD steps\. Put them"):
        owner(sgd(*inner.parameters(), alone))
    assert owner(sgd(*inner.parameters())) is outer


def copies_of(model: nn.Module) -> list[torch.Tensor]:
    """Return fp32 master weights like those that mixed-precision optimizers keep."""
    return [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]


def copying(model: nn.Module, optimizer: torch.optim.Optimizer, copies: list[torch.Tensor]) -> Observer:
    """Return an observer of two steps in which an optimizer steps copies of a model's parameters."""
    case = make_case(framework=Script(path="train.py"), model=Model.named("net"), precision="bf16-mixed")
    observer = Observer(case, Workload(run=lambda steps: [], data_parallel=1))
    for _ in range(2):
        model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        observer.before_optimizer_step(optimizer, (), {})
        for parameter, copied in zip(model.parameters(), copies, strict=True):
            copied.grad = parameter.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for parameter, copied in zip(model.parameters(), copies, strict=True):
                parameter.copy_(copied)
    return observer


def test_model_of_copied_parameters_is_observed() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    copies = copies_of(model)
    optimizer = torch.optim.SGD(copies, lr=0.1)
    assert owner(optimizer) is model
    observer = copying(model, optimizer, copies)
    assert observer.steps_copies
    assert observer.result().settings["parameters_changed"] == "yes"


def test_a_model_that_is_stepped_itself_has_no_copies() -> None:
    observer, _ = in_a_script()
    assert not observer.steps_copies


def test_copies_may_be_shards_but_not_larger() -> None:
    model = nn.Linear(4, 4, bias=False)
    assert owner(sgd(torch.zeros(5, requires_grad=True))) is model
    with pytest.raises(MismatchError, match=r"^no module owns 1 of the 1 tensors that SGD steps\. Put them"):
        owner(sgd(torch.zeros(17, requires_grad=True)))


def test_model_of_another_optimizer_is_not_copied() -> None:
    model = nn.Linear(4, 4)
    other = sgd(*model.parameters())
    with pytest.raises(MismatchError, match=r"if no other optimizer steps the parameters themselves$"):
        owner(sgd(torch.zeros(4, requires_grad=True)))
    del other


def test_model_that_is_not_trained_is_not_copied() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(MismatchError, match=r"^no module owns 1 of the 1 tensors"):
        owner(sgd(torch.zeros(4, requires_grad=True)))
    del frozen


def test_several_models_are_copied_together() -> None:
    """Examples are the stages of Megatron's interleaved pipelines."""
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    owners = owner(sgd(*[copied for stage in stages for copied in copies_of(stage)]))
    assert isinstance(owners, Owners)
    assert {*owners} == {*stages}


def test_accepts_recomputation_torch_does_not_show() -> None:
    observer, result = in_a_script(activation_checkpointing="full")
    settings = {**result.settings, "recomputing_blocks": NOT_OBSERVED}
    observer.check(result.replace(settings=settings))
