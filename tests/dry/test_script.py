import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import Case, Model, Script, Topology
from perfsuite.case import catalog
from perfsuite.dry import script
from perfsuite.dry.driver import dry_run
from perfsuite.dry.files import KEPT
from perfsuite.frameworks.common import private
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect
from perfsuite.results.counts import Counts, of_rank
from perfsuite.results.run import Run
from tests.benchmarks.dry_builds import CASES
from tests.dry.runs import failure_of, passed
from tests.frameworks.test_base import COUNTED, measured
from tests.packages import Packages
from tests.samples import known
from tests.worker import motor

pytestmark = pytest.mark.launch

TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group()
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randint(0, 64, (1024, 16)))
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data), num_workers=WORKERS)
total = 0.0
for epoch in range(20):
    for (tokens,) in loader:
        tokens = tokens[:, : 1 + int(tokens.size(1) - 1)].to(device)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # here
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
        print(f"loss {loss:.3f}")
torch.save(model.state_dict(), "model.pt")
"""
GROUP = "dist.init_process_group()"
ONE = Topology(processes_per_node=1)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def case_of(directory: Path, text: str, *command: str, ranks: int = 2, **changes: Any) -> Case:
    file = directory / "train.py"
    file.write_text(text.replace("WORKERS", "0"))
    how: dict[str, Any] = {"command": (*command, str(file))} if command else {"path": file}
    nodes = max(1, ranks // 8)
    framework = Script(cwd=directory, loss="finite", **how)
    topology = Topology(nodes=nodes, processes_per_node=ranks // nodes)
    net = {"model": Model.named("net"), "framework": framework, "sequence_length": 16, "topology": topology}
    return COUNTED.replace(**{**net, "timeout_s": 600, **changes})


def counted(run: Run) -> Counts:
    return known(of_rank(run.counts, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"phases": {"rollout": "train:generate"}},
            "phases={'rollout': 'train:generate'}: 'generate' does not exist in 'train' (the script itself). "
            "Name a function or method that the script calls",
        ),
        (
            {"loader": "batches:next"},
            "loader='batches:next': the script has not imported a module 'batches'. Give the",
        ),
        (
            {"loader": "train:TensorDataset"},
            "loader='train:TensorDataset': 'TensorDataset' is not a function",
        ),
        ({"loader": "train:unused"}, "loader='train:unused': it was not called in the first steps. Name the"),
    ],
)
def test_names_that_a_script_lacks_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    case = case_of(tmp_path, f"def unused(): pass\n{TRAIN}")
    failure = failure_of(case.replace(framework=case.framework.replace(**changes)), tmp_path / "dry")
    assert failure.kind == "mismatch"
    assert failure.message.startswith(message)


def test_finds_the_functions_that_a_case_names(tmp_path: Path) -> None:
    text = TRAIN.replace(
        GROUP, f"def generate():\n    pass\n\ndef batches():\n    yield from loader\n\n{GROUP}"
    )
    text = text.replace("in loader:", "in data_of_epoch:").replace(
        "for epoch", "data_of_epoch = batches()\nfor epoch"
    )
    case = case_of(tmp_path, text.replace("# here", "generate()"))
    named = case.framework.replace(phases={"rollout": "train:generate"}, loader="train:batches")
    assert passed(case.replace(framework=named), tmp_path / "dry").notes == ()


def alone(directory: Path) -> Case:
    """Return a case of one rank. Its script has a function that is never called."""
    command = (*TORCHRUN, "--standalone", "--nproc-per-node=1")
    return case_of(directory, f"def generate(): pass\n{TRAIN}", *command, ranks=1)


def test_a_phase_might_run_in_a_later_step(tmp_path: Path) -> None:
    case = alone(tmp_path)
    named = case.framework.replace(phases={"rollout": "train:generate"})
    run = passed(case.replace(framework=named, steps=20), tmp_path / "dry")
    assert "not checked: phase 'rollout' did not run in the 7 steps of the dry run" in run.notes


def test_a_phase_might_run_on_another_rank(tmp_path: Path) -> None:
    case = case_of(tmp_path, f"def generate(): pass\n{TRAIN}")
    named = case.framework.replace(phases={"rollout": "train:generate"})
    run = passed(case.replace(framework=named), tmp_path / "dry")
    (note,) = run.notes
    assert note.endswith("steps of the dry run of rank 0")


def test_a_phase_that_ran_in_no_step_is_refused(tmp_path: Path) -> None:
    case = alone(tmp_path)
    named = case.framework.replace(phases={"rollout": "train:generate"})
    case = case.replace(framework=named)
    failure = failure_of(case, tmp_path / "dry", counted_steps=case.total_steps)
    assert failure.kind == "mismatch"
    said = f"in the {case.total_steps} steps, no rank completed a call of this function"
    assert failure.message.startswith(f"phases={{'rollout': 'train:generate'}}: {said}")


def test_counts_objects_a_dry_script_keeps(tmp_path: Path) -> None:
    text = TRAIN.replace("total = 0.0", "total, kept = 0.0, []")
    leaks = text.replace("# here", "kept.append([model])")
    run = dry_run(case_of(tmp_path, leaks), tmp_path / "dry")
    kept = known(counted(run).kept)
    assert kept.by_type == {"list": 1}
    assert "`__main__.kept`" in kept.holders, kept


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("raise RuntimeError('boom')", "the training ended after 8 of 18 steps: RuntimeError: boom. "),
        ("raise SystemExit", "the training ended after 8 of 18 steps. If this is intended, count fewer"),
    ],
    ids=["crashes", "exits"],
)
def test_a_script_that_ends_early_is_not_counted(tmp_path: Path, ending: str, why: str) -> None:
    leaks_later = "made = made + 1; made > 8 and KEPT.append([model])\n        made > 8 and end()"
    text = TRAIN.replace("total = 0.0", f"def end():\n    {ending}\n\nKEPT, total, made = [], 0.0, 0")
    case = case_of(tmp_path, text.replace("# here", leaks_later)).replace(max_warmup_steps=10, steps=20)
    run = dry_run(case, tmp_path / "dry", counted_steps=12)
    assert run.failure is None
    assert run.counts == ()
    [reason] = run.hidden
    assert reason.startswith(why)


def test_dry_script_works_as_launched(tmp_path: Path) -> None:
    launched = measured(case_of(tmp_path, TRAIN), tmp_path / "run")
    for words in ((), (*TORCHRUN, "--nproc-per-node=2")):
        dry = passed(case_of(tmp_path, TRAIN, *words), tmp_path / f"dry-{len(words)}")
        for name in ("collectives", "flops"):
            assert getattr(counted(dry), name) == getattr(counted(launched), name) != {}, name
        scripts = {run.observed and run.observed.environment["script"] for run in (dry, launched)}
        assert len(scripts) == 1, "both say which script ran"


def test_trains_alike_on_64_pretended_gpus(tmp_path: Path) -> None:
    """A dry run loads batches in its own process instead of in workers.

    Loading is not counted as part of a step.
    """
    text = TRAIN.replace("WORKERS", "2")
    case = case_of(tmp_path, text, *TORCHRUN, "--nnodes=8", "--nproc-per-node=8", ranks=64, hardware="h100")
    run = passed(case, tmp_path / "dry")
    small = counted(passed(case_of(tmp_path, TRAIN), tmp_path / "small"))
    assert run.machine.device_name == "NVIDIA H100 80GB HBM3"
    assert {sent.ranks for sent in counted(run).collectives} == {64}
    assert counted(run).flops == small.flops
    assert run.notes == ()
    assert not (tmp_path / "model.pt").exists()


AUTOCAST = "with torch.autocast(device.type, torch.{}): loss = torch"
WRAPPED = "model = DistributedDataParallel(model)"
RECOMPUTES = """
import torch, transformers
config = transformers.LlamaConfig(**CONFIG)
model = transformers.LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    tokens = torch.ones(2, 16, dtype=torch.int64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("text", "claim", "said"),
    [
        (
            TRAIN,
            {"precision": "bf16-mixed"},
            "compute_dtype: the case asks for 'bfloat16', but 'float32' ran",
        ),
        pytest.param(
            TRAIN,
            {"gradient_accumulation": 3},
            "the case says 3, but backward was called on 1 losses",
            marks=pytest.mark.nightly,
        ),
        (TRAIN, {"micro_batch": 7}, "tokens: the case claims 224 a step"),
        pytest.param(
            TRAIN.replace("loss = torch", AUTOCAST.format("bfloat16")),
            {},
            "compute_dtype: the case asks for 'float32', but 'bfloat16' ran",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            TRAIN.replace("loss = torch", AUTOCAST.format("float16")),
            {"hardware": "h100"},
            "compute_dtype: the case asks for 'float32', but 'float16' ran",
            marks=pytest.mark.nightly,
        ),
        (
            TRAIN.replace(WRAPPED, ""),
            {},
            "the 2 ranks trained apart: no collective ran after the first step",
        ),
        pytest.param(
            TRAIN.replace(GROUP, "dist.init_process_group(rank=0, world_size=4)"),
            {},
            "world_size: the case asks for '2', but '4' ran",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            RECOMPUTES.replace("CONFIG", str(dict(catalog.MODELS["llama-tiny"].config))),
            {"model": "llama-tiny", "topology": ONE},
            "recomputing_blocks: the case asks for '0 of 4', but '4 of 4' ran",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            RECOMPUTES.replace("CONFIG", str(dict(catalog.MODELS["llama-tiny"].config))),
            {"topology": ONE},
            "recomputing_blocks: the case asks for '0 of 4', but '4 of 4' ran",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["precision", "passes", "tokens", "bf16", "fp16", "apart", "ranks", "recomputes", "named"],
)
def test_a_wrong_claim_is_refused_dry(tmp_path: Path, text: str, claim: dict[str, Any], said: str) -> None:
    failure = failure_of(case_of(tmp_path, text, **claim), tmp_path / "dry")
    assert (failure.kind, said in failure.message) == ("mismatch", True), failure.message


@pytest.mark.nightly
@pytest.mark.parametrize("claim", [{"precision": "bf16-mixed"}, {"gradient_accumulation": 3}])
def test_refuses_a_wrong_claim_as_a_launch_does(tmp_path: Path, claim: dict[str, Any]) -> None:
    case = case_of(tmp_path, TRAIN, **claim)
    launched = known(launch_once(case, detect(), tmp_path / "run").failure)
    dry = failure_of(case, tmp_path / "dry")
    assert (dry.kind, dry.message) == (launched.kind, launched.message)


UNSEEN = """
import torch
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))
    def forward(self, x):
        return checkpoint(lambda x: (x @ self.weight).relu() @ self.weight, x, use_reentrant=False)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_unseen_properties_are_only_claimed(tmp_path: Path) -> None:
    case = case_of(tmp_path, UNSEEN, ranks=1)
    framework = case.framework.model_copy(update={"loss": None})
    (note,) = passed(case.replace(framework=framework), tmp_path / "dry").notes
    assert note == (
        "claimed, not checked: precision='fp32' (no linear layer ran); gradient_accumulation=1 (loss=None); "
        "sequence_length=16 (the model was given no integers); activation_checkpointing='none' (some of "
        "the forward is recomputed, but the blocks of the model are not known)"
    )


def test_a_script_that_builds_too_much_does_not_fit(tmp_path: Path) -> None:
    built = TRAIN.replace(
        "model = Dist", "torch.empty(120 << 30, dtype=torch.uint8, device=device)\nmodel = Dist"
    )
    run = passed(case_of(tmp_path, built, hardware="h100"), tmp_path / "dry")
    fit = known(known(run.dry_facts).fit)
    assert (fit.verdict, fit.start >> 30) == ("does not fit", 120)


def test_notes_where_a_script_reads_an_unknown_bool(tmp_path: Path) -> None:
    code = "assert (model.module[1].weight < 9).all()"
    unknown = TRAIN.replace("# here", f"{code}; assert not loss.isnan()")
    run = passed(case_of(tmp_path, unknown), tmp_path / "dry")
    (note,) = (note for note in run.notes if "reads a bool" in note)
    assert f"gets True (train.py:{1 + unknown[: unknown.index(code)].count(chr(10))}: {code};" in note


ROLLOUT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

device = torch.device("cuda")
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    tokens = torch.zeros(4, 16, dtype=torch.long, device=device)
    with torch.no_grad():
        made = model.generate(tokens, max_new_tokens=3, pad_token_id=0)
    assert made.shape == (4, 19), made.shape
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_generate_makes_the_tokens_it_is_asked_for(tmp_path: Path) -> None:
    case = case_of(tmp_path, ROLLOUT, ranks=1, hardware="h100")
    tokens = case.framework.replace(tokens="vary")
    assert counted(passed(case.replace(framework=tokens), tmp_path / "dry")).host_reads["forward"] >= 3


@pytest.mark.nightly
def test_promises_no_speed_for_fp32_in_tf32(tmp_path: Path) -> None:
    text = TRAIN.replace(GROUP, f"{GROUP}; torch.backends.cuda.matmul.fp32_precision = 'tf32'")
    run = passed(case_of(tmp_path, text, hardware="h100"), tmp_path / "dry")
    assert known(run.dry_facts).roofline is None
    assert run.notes[0].startswith("the maximum speed is unknown: this case multiplies fp32 matrices in TF32")


@pytest.mark.nightly
def test_advises_torchrun_for_one_process(tmp_path: Path) -> None:
    case = case_of(tmp_path, TRAIN, ranks=1)
    launched = launch_once(case, detect(), tmp_path / "run").failure
    dry = failure_of(case, tmp_path / "dry")
    for failure in (known(launched), dry):
        assert "RANK is not set, because a single process is started as `python` would" in failure.message


@pytest.mark.nightly
def test_default_adamw_on_a_gpu_waits_for_nothing(tmp_path: Path) -> None:
    text = with_line("assert not model.training or optimizer.defaults['fused'] is None")
    reads = counted(passed(case_of(tmp_path, text, hardware="h100"), tmp_path / "dry")).host_reads
    assert reads.get("optimizer", 0) == 0
    assert reads["forward"] > 0, "of the loss"


USED = """
        import accelerate, copy
        accelerate.Accelerator()
        copied = copy.deepcopy([torch.tensor(0.0), model.module])[1]
        assert [type(each) for each in copied.parameters()] == [type(each) for each in model.parameters()]
        torch.tensor([loss.detach(), 1.0])
        with torch.inference_mode():
            assert bool((model(tokens) > 0).all())
        from accelerate.utils.random import synchronize_rng_states
        synchronize_rng_states(["torch"])
        torch.cuda.nvtx.range_push("step")
        assert torch.distributed.is_nccl_available() and torch.cuda.nccl.version() >= (2, 10)
        torch.compile(len)
        torch.cuda.default_generators[0].set_state(torch.cuda.random.get_rng_state())
"""
BACKENDS = """
assert dist.get_backend() == "undefined"  # as without a dry run
assert dist.get_backend(dist.new_group([0, 1], backend="gloo")) == "gloo"
dist.ProcessGroupNCCL.Options()._timeout = __import__("datetime").timedelta(minutes=9)
"""
COLLATE = """
def collate(rows):
    assert not (torch.tensor([0.5]) == 0.0).any()
    return torch.utils.data.default_collate(rows)
"""


def test_answers_what_scripts_ask_of_torch(tmp_path: Path) -> None:
    text = TRAIN.replace("        # here", USED).replace(GROUP, GROUP + BACKENDS)
    # torch keeps a backend for each call of torch.compile, which this script makes in each step.
    kept = "_TorchCompileInductorWrapper"
    run = passed(case_of(tmp_path, text, hardware="h100"), tmp_path / "dry", leaks=kept)
    (note,) = run.notes  # a function that is compiled but never called changes nothing else
    assert "assert bool((model(tokens) > 0).all())" in note


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["0", "2"])
def test_data_are_loaded_with_their_values(tmp_path: Path, workers: str) -> None:
    text = TRAIN.replace(GROUP, COLLATE + GROUP)
    text = text.replace("num_workers=WORKERS", f"num_workers={workers}, collate_fn=collate")
    passed(case_of(tmp_path, text), tmp_path / "dry")


class Rows(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(8)


def test_persistent_workers_load_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("next_data", "MultiProcessingDataLoaderIter"):
        owner, attribute = private.place(name)
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # restored after the test
    script._load_data_here()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1, persistent_workers=True)
    assert [len([*loader]) for _ in range(3)] == [2, 2, 2]


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))
# here
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(2, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_fsdp2_moves_a_model_as_on_a_gpu(tmp_path: Path) -> None:
    sharded = partial(case_of, tmp_path, sequence_length=None, hardware="h100")
    moved_by_fsdp2 = counted(passed(sharded(SHARDED), tmp_path / "fsdp2"))
    moved_before = passed(sharded(SHARDED.replace("# here", "model.cuda()")), tmp_path / "before")
    assert moved_by_fsdp2 == counted(moved_before)
    assert moved_by_fsdp2.collectives


@pytest.mark.nightly
def test_fsdp2_with_a_frozen_layer_trains_dry(tmp_path: Path) -> None:
    """FSDP2 gathers the layer for backward, although backward does not need it.

    It waits with `torch.accelerator`.
    """
    text = SHARDED.replace("# here", "model[0].requires_grad_(False)")
    run = passed(case_of(tmp_path, text, sequence_length=None, hardware="h100"), tmp_path / "dry")
    assert counted(run).collectives


UNUSED = """
import torch, torch.distributed as dist
dist.init_process_group()
layers = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(4))
class OfTwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers.cuda()
    def forward(self, inputs):
        return layers[1](layers[0](inputs))
model = torch.nn.parallel.DistributedDataParallel(OfTwoLayers(), bucket_cap_mb=2048 / 2**20, OPTION)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(4, 16, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_unused_parameters_are_reduced_on_a_gpu(tmp_path: Path) -> None:
    """A launch of two ranks over gloo also reduces both buckets, and a map of four numbers."""
    text = UNUSED.replace("OPTION", "find_unused_parameters=True")
    case = case_of(tmp_path, text, sequence_length=None, hardware="h100")
    sent = counted(passed(case, tmp_path / "dry")).collectives
    assert [(each.dtype, each.count, each.bytes) for each in sent] == [("float32", 2, 4096), ("int32", 1, 16)]


COPIES = """
import torch
model = torch.nn.Linear(8, 8).bfloat16()
copies = [each.detach().float().requires_grad_() for each in model.parameters()]
optimizer = torch.optim.SGD(copies, lr=0.1)
while True:
    model(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean().backward()
    for parameter, copied in zip(model.parameters(), copies):
        copied.grad = parameter.grad.float()
    optimizer.step()
    model.zero_grad()
"""


@pytest.mark.nightly
def test_copied_weights_are_noted(tmp_path: Path) -> None:
    """Without values, perfsuite cannot see whether the script ever writes the copies back into the model."""
    case = case_of(tmp_path, COPIES, ranks=1, sequence_length=None, precision="bf16-mixed")
    run = passed(case, tmp_path / "dry")
    copied = (
        "the optimizer SGD updates tensors that belong to no module. They are assumed to be copies of the "
        "model's parameters. This was not checked"
    )
    assert copied in run.notes


LOAD = """
from accelerate import init_empty_weights
from accelerate.utils import load_checkpoint_in_model, set_module_tensor_to_device
with init_empty_weights():
    loaded = torch.nn.Linear(4, 4)
assert loaded.weight.is_meta
load_checkpoint_in_model(loaded, "weights.bin", device_map={"": "cpu"})
set_module_tensor_to_device(loaded, "bias", device, value=torch.ones(4))
assert loaded.weight.device.type == "cpu" and loaded.bias.device == device
assert all(isinstance(each, torch.nn.Parameter) and each.requires_grad for each in loaded.parameters())
"""


@pytest.mark.nightly
def test_weights_are_loaded_by_accelerate(tmp_path: Path) -> None:
    """diffusers' `from_pretrained` loads weights like this."""
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "weights.bin")
    text = TRAIN.replace("model = Dist", f"{LOAD}model = Dist")
    passed(case_of(tmp_path, text, hardware="h100"), tmp_path / "dry")


RESUME = """
saved = torch.load("state.pt", map_location=lambda storage, place: storage)
assert {each.device.type for each in saved.values()} == {"cpu"}
"""


def test_a_checkpoint_that_exists_can_be_loaded(tmp_path: Path) -> None:
    """Lightning passes such a function."""
    torch.save({"weight": torch.zeros(3)}, tmp_path / "state.pt")
    text = TRAIN.replace("model = Dist", f"{RESUME}model = Dist")
    passed(case_of(tmp_path, text), tmp_path / "dry")


@pytest.mark.unforked  # the process from which others are forked has imported them
def test_libraries_belong_to_the_script_only(tmp_path: Path) -> None:
    """perfsuite replaces functions of these libraries."""
    lines = "import sys; assert not {'accelerate', 'safetensors', 'transformers'} & {*sys.modules}"
    passed(case_of(tmp_path, with_line(lines)), tmp_path / "dry")


SAVE_MODEL = """
    from accelerate import Accelerator
    Accelerator().save_model(model, "saved")
"""


def test_accelerate_saves_no_model(tmp_path: Path) -> None:
    text = TRAIN.replace("    for (tokens,)", f"{SAVE_MODEL}    for (tokens,)")
    passed(case_of(tmp_path, text), tmp_path / "dry")
    assert not [*tmp_path.glob("saved/*.safetensors")]


def test_an_asynchronous_saver_has_a_result(tmp_path: Path) -> None:
    save = "import torch.distributed.checkpoint as dcp; saved = dcp.async_save({}, checkpoint_id='c')"
    lines = f"{save}; saved.result(); saved.staging_completion.result()"
    passed(case_of(tmp_path, with_line(lines)), tmp_path / "dry")


ROTATE = """
    import os, shutil
    with open("new.pt.tmp", "wb") as file:
        torch.save(model, file)
    os.replace("new.pt.tmp", "new.pt")
    shutil.copy("new.pt", "model.pt")
    shutil.rmtree("checkpoint-1")
"""


def test_checkpoints_outlive_a_dry_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1" / "weights.pt"
    checkpoint.parent.mkdir()
    for file in (checkpoint, tmp_path / "model.pt"):
        file.write_text("real")
    run = passed(
        case_of(tmp_path, TRAIN.replace("    for (tokens,)", f"{ROTATE}    for (tokens,)")), tmp_path / "dry"
    )
    assert checkpoint.exists()
    assert (tmp_path / "model.pt").read_text() == "real"
    assert not (tmp_path / "new.pt").exists()
    assert f"{KEPT}: {tmp_path}/model.pt, {tmp_path}/checkpoint-1" in run.notes


LIGHTNING = """
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

class Task(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))

    def training_step(self, tokens, at):
        loss = torch.nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = Trainer(
    accelerator="auto", devices=2, strategy="ddp", max_steps=1000, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[EarlyStopping("loss", check_on_train_epoch_end=True, patience=1000)],
)
data = torch.utils.data.DataLoader(torch.randint(0, 64, (8, 16)), batch_size=2)
trainer.fit(Task(), data)
"""


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_ranks_of_lightning_agree_not_to_stop(tmp_path: Path, hardware: str) -> None:
    """Lightning's Trainer stops if it reads 1 from a flag that it broadcasts before each step."""
    counts = counted(passed(case_of(tmp_path, LIGHTNING, hardware=hardware), tmp_path / "dry"))
    assert {collective.kind for collective in counts.collectives} == {"all_reduce", "broadcast"}


def with_line(code: str) -> str:
    """Return `TRAIN` with `code` as its line 21."""
    return TRAIN.replace("# here", code)


def test_growth_steps_have_their_own_time(tmp_path: Path) -> None:
    left = "left = globals().setdefault('times', []); left.append(__import__('signal').getitimer(0)[0])"
    text = with_line(f"{left}; assert len(left) != 5 or left[4] > left[3], left")
    run = passed(case_of(tmp_path, text), tmp_path / "dry")
    assert run.counts[0].counts.kept is not None, run.notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            with_line("while True: loss + 1"),
            "the script exceeded its time limit of 8.0 s (timeout_s) after 0 of 4 optimizer steps. "
            "No torch optimizer stepped (train.py:21: while True: loss + 1)",
        ),
        (with_line("break"), "the script ended after 0 of 4 optimizer steps. No torch optimizer"),
        (with_line("raise SystemExit(3)"), "the script ended with exit code 3"),
        (with_line("open('tokens.bin')"), "'tokens.bin' (train.py:21: open('tokens.bin'))"),
        (
            with_line("__import__('yaml').safe_load('[')"),
            "(train.py:21: __import__('yaml').safe_load('['), in yaml/",
        ),
        (TRAIN.replace("import torch\n", "import torch, no_such_thing\n", 1), "No module named 'no_such"),
        (TRAIN.replace(f"{GROUP}\n", "").replace("model = Dist", "# "), "init_process_group"),
    ],
    ids=["for ever", "no step", "exit", "file", "library", "module", "no group"],
)
def test_reports_what_ends_a_script_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    case = case_of(tmp_path, text, timeout_s=8 if "while" in text else 600)
    failure = failure_of(case, tmp_path / "dry")
    assert failure.kind == "crash"
    assert said in failure.message


def test_a_checkpoint_that_was_not_written_cannot_be_loaded(tmp_path: Path) -> None:
    text = with_line("torch.save(model, 'c.pt'); open('c.pt', 'wb').close(); torch.load('c.pt')")
    failure = failure_of(case_of(tmp_path, text), tmp_path / "dry")
    said = "a dry run cannot load a checkpoint that the script saved before, because a dry run writes no "
    assert failure.kind == "not_dry"
    assert failure.message.startswith(f"{said}checkpoints: EOFError")


@pytest.mark.fault("dry run needs the values of a tensor")
def test_refuses_a_value_dependent_script(tmp_path: Path) -> None:
    line = "rows = (loss.expand(3) > 0).nonzero()"
    failure = failure_of(case_of(tmp_path, with_line(line)), tmp_path / "dry")
    assert failure.kind == "not_dry"
    assert f"depends on the values of a tensor (train.py:21: {line})" in failure.message


@pytest.mark.nightly
def test_refuses_an_engine_that_needs_values(packages: Packages, tmp_path: Path) -> None:
    motor.install(packages)
    text = "from motor.driving import Driver\nengine = Driver(Mock())\n"
    failure = failure_of(case_of(tmp_path, f"from unittest.mock import Mock\n{text}"), tmp_path / "dry")
    assert failure.kind == "not_dry"
    assert "a dry run cannot do this: a motor needs fuel" in failure.message
    assert "ended after 0 of 4 optimizer steps" in failure.message


TWO_LOSSES = """
import torch
real = torch.nn.Linear(8, 8)
judge = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(real.parameters(), lr=0.1)
other = torch.optim.SGD(judge.parameters(), lr=0.1)
for step in range(40):
    judge(torch.ones(4, 8)).square().mean().backward()
    other.step()
    real(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    other.zero_grad()
"""


@pytest.mark.nightly
def test_ignores_losses_of_another_optimizer(tmp_path: Path) -> None:
    """A dry run drops some objects before it counts the objects that a step keeps.

    It must not drop the objects that show which optimizer a loss belongs to.
    """
    case = case_of(tmp_path, TWO_LOSSES, ranks=1)
    clock = case.replace(framework=case.framework.replace(clock="SGD:2"))
    assert counted(passed(clock, tmp_path / "dry")).flops


def test_a_script_may_call_all_of_torch_cuda(tmp_path: Path) -> None:
    """The script uses streams, events, pinned memory, a static graph, a scaler and `torch.accelerator`."""
    run = passed(CASES["script, static graph, fp16"], tmp_path)
    assert run.machine.device == "cuda"
    gradients = [sent for sent in counted(run).collectives if sent.kind == "all_reduce"]
    assert {sent.dtype for sent in gradients} == {"float32"}
