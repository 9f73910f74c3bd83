"""Test that compiled code in a dry run has the graphs, FLOPs and collectives of a launch.

Its kernels are unknown.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import FSDP2, Case, Model, Script, Topology
from perfsuite.dry.compilation import OTHER_BACKEND, Compilation, explained, without_kernels
from perfsuite.errors import DryRunError
from perfsuite.results.counts import Compiled, Counts, of_rank
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from tests.counted import make_compiled, make_counts
from tests.dry.runs import failure_of, passed
from tests.frameworks.test_base import COUNTED, llama_tiny, measured
from tests.samples import known

# Its attention is a pattern that inductor replaces with a fused kernel, which has other FLOPs.
NET = """
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel

WIDTH = 256
BLOCKS = 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in parts)
        scores = torch.matmul(q, k.transpose(-2, -1)).div(32**0.5).softmax(dim=-1)
        # here
        return x + self.out(torch.matmul(dropout(scores, 0.0), v).transpose(1, 2).flatten(2))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = torch.nn.Linear(WIDTH, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


dist.init_process_group()
model = DistributedDataParallel(Net(), bucket_cap_mb=1.5)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    tokens = torch.randint(0, 64, (2, 16))
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Each rank compiles in its own process, and compiles only scalar kernels. Otherwise it would start two more
# processes: one to compile kernels, and one to look for vector instructions. Both would import torch.
QUICKLY = """
import torch._inductor.config

torch._inductor.config.compile_threads = 1
torch._inductor.config.cpp.simdlen = 1
torch._inductor.config.cpp.vec_isa_ok = True
"""
TINY = QUICKLY + NET.replace("WIDTH = 256", "WIDTH = 64").replace("BLOCKS = 3", "BLOCKS = 1")
COMPILES = "torch.compile(model)"
BREAKS = NET.replace("# here", "print('a break')")
# Dynamo compiles the second length with dynamic shapes, which also fit the third.
VARIES = NET.replace("(2, 16)", "(2, 16 + step % 3)").replace(
    f"model = {COMPILES}", "[block.compile() for block in model.module.blocks]"
)
BLOCKS = FSDP2()
ON_A_GPU = COUNTED.replace(hardware="h100", precision="bf16-mixed", timeout_s=600)
SHALLOW = llama_tiny("llama-shallow", num_hidden_layers=2)


def case_of(directory: Path, text: str, **changes: Any) -> Case:
    directory.mkdir()
    file = directory / "train.py"
    file.write_text(text)
    tokens = "vary" if "step % 3" in text else "fixed"
    framework = Script(path=file, cwd=directory, loss="finite", tokens=tokens)
    net: dict[str, Any] = {"model": Model.named("net"), "framework": framework, "sequence_length": 16}
    return COUNTED.replace(**{**net, "topology": Topology(processes_per_node=2), "timeout_s": 600, **changes})


def of_rank_0(run: Run) -> Counts:
    return known(of_rank(run.counts, 0))


def graphs(run: Run) -> Compiled:
    """Return what torch.compile made, without the kernels."""
    return known(of_rank_0(run).compiled).replace(kernels=None, extern_calls=None)


def check_twins(dry: Run, launched: Run) -> None:
    assert graphs(dry) == graphs(launched)
    for name in ("collectives", "flops", "host_reads"):
        assert getattr(of_rank_0(dry), name) == getattr(of_rank_0(launched), name), name


@pytest.mark.launch
@pytest.mark.parametrize(
    "text",
    [
        TINY,
        pytest.param(NET, marks=pytest.mark.nightly),
        pytest.param(BREAKS, marks=pytest.mark.nightly),
        pytest.param(VARIES, marks=pytest.mark.nightly),
    ],
    ids=["tiny model", "whole model", "break in each block", "blocks, lengths vary"],
)
def test_compiled_script_runs_dry_as_launched(text: str, tmp_path: Path) -> None:
    case = case_of(tmp_path / "script", text)
    dry = passed(case, tmp_path / "dry")
    check_twins(dry, measured(case, tmp_path / "real"))
    made = known(of_rank_0(dry).compiled)
    assert (of_rank_0(dry).kernels, made.kernels, made.extern_calls) == (None, None, None)
    assert any("kernels and fusion are unknown" in note for note in dry.notes)


@pytest.mark.nightly
def test_compiled_blocks_run_dry_as_launched(tmp_path: Path) -> None:
    case = COUNTED.replace(model=SHALLOW, framework=BLOCKS, compile=True, timeout_s=600)
    check_twins(passed(case, tmp_path / "dry"), measured(case, tmp_path / "real"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", [ON_A_GPU, pytest.param(ON_A_GPU.replace(framework=BLOCKS), marks=pytest.mark.nightly)]
)
def test_compiled_case_does_the_work_of_its_eager_twin(case: Case, tmp_path: Path) -> None:
    """The GPU is pretended, so perfsuite chooses the kernel of attention instead of torch."""
    compiled = of_rank_0(passed(case.replace(compile=True), tmp_path / "compiled"))
    eager = of_rank_0(passed(case, tmp_path / "eager"))
    for name in ("collectives", "flops", "host_reads"):
        assert getattr(compiled, name) == getattr(eager, name), name
    assert compiled.compiled == Compiled(graphs=1, recompilations=0, kernels=None, extern_calls=None)


def failed(directory: Path, text: str) -> Failure:
    return failure_of(case_of(directory / "script", text), directory / "dry")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (BREAKS.replace(COMPILES, "torch.compile(model, fullgraph=True)"), "crash", "fullgraph=True"),
        (NET.replace(COMPILES, "torch.compile(model, backend='nosuch')"), "crash", "'nosuch'"),
    ],
    ids=["fullgraph with a break", "unknown backend"],
)
def test_failing_compilation_names_its_line(text: str, kind: str, said: str, tmp_path: Path) -> None:
    failure = failed(tmp_path, text)
    assert failure.kind == kind
    assert said in failure.message
    assert "train.py:" in failure.message


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ({}, "kernels and fusion are unknown"),
        ({"triton.cudagraphs": True}, "kernels, fusion and CUDA graphs are unknown"),
        ({"max_autotune": True}, "kernels, fusion and autotuning are unknown"),
        ({"max_autotune": False}, "kernels and fusion are unknown"),
    ],
)
def test_note_says_what_is_unknown(options: dict[str, Any], unknown: str) -> None:
    compilation = Compilation()
    compilation._note(options)
    (note,) = compilation.notes(make_counts(compiled=make_compiled()))
    assert unknown in note


def test_note_depends_on_the_backend_of_the_graphs() -> None:
    compilation = Compilation()
    assert compilation.notes(make_counts()) == ()
    assert compilation.notes(make_counts(compiled=make_compiled())) == (OTHER_BACKEND,)


def test_kernels_of_a_compiled_dry_run_are_unknown() -> None:
    counts = make_counts(spans={"step 5": make_counts(step=5)}, also_counted=(5,))
    assert without_kernels(counts, None) == counts
    compiled = without_kernels(counts, make_compiled())
    assert compiled.kernels is None
    assert known(compiled.in_step(5)).kernels is None
    assert compiled.compiled == make_compiled(kernels=None, extern_calls=None)


def test_explains_a_break_that_fullgraph_forbids() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        print("a break")
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))
    said = str(explained(caught.value))
    assert said.startswith("fullgraph=True asks for one whole graph, but torch.compile cannot capture it: ")
    assert "print" in said
    assert "\n" not in said


def test_explains_a_backend_that_cannot_run_dry() -> None:
    def nodevice(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no device")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(torch.sin, backend=nodevice)(torch.ones(1))
    error = explained(caught.value)
    assert isinstance(error, DryRunError)
    assert "backend='nodevice' raised: RuntimeError: no device. Launch the case" in str(error)


def test_explains_no_other_error() -> None:
    assert explained(ValueError("x")) is None
