"""nanotron's known issues with pipelines. For each issue, the report says whether it is still there.

Issue 209, "multi-machine pp hang": with gradient accumulation, a pipeline over two machines hangs (reported
with Llama-3-8B, DP 2 x TP 4 x PP 2 on 16 H800). Issue 221: resuming from a checkpoint fails if PP > 1.

Each issue also has a case on one node and a case on a CPU. On a CPU, pipeline sends do not wait
(`perfsuite.frameworks.nanotron.compat`), so the CPU cases declare no known issue: they are expected to run.
"""

import pytest

from perfsuite import MODELS, Case, KnownIssue, Model, Nanotron, Topology

ISSUES = "https://github.com/huggingface/nanotron/issues"
HOW = {"tp_mode": "REDUCE_SCATTER", "tp_linear_async_communication": True, "accumulate_grad_in_fp32": True}

ACCUMULATION = Case(
    model="llama-3.1-8b",
    framework=Nanotron(dp=2, tp=4, pp=2, **HOW),
    sequence_length=4096,
    micro_batch=1,
    gradient_accumulation=4,
    precision="bf16",
    topology=Topology(nodes=2, processes_per_node=8),
    hardware=("h100", "h200"),
    learning_rate=3e-4,
    max_warmup_steps=40,  # 0.3 s each
    steps=80,
    known_issue=KnownIssue(url=f"{ISSUES}/209", failure="timeout"),
)
ONE_NODE = ACCUMULATION.replace(
    framework=Nanotron(tp=4, pp=2, **HOW),
    topology=Topology(processes_per_node=8),
    known_issue=None,
)
# A small model, because the checkpoint with optimizer state takes 14 bytes per parameter (17 GB for this
# model).
RESUME = ACCUMULATION.replace(
    model="llama-3.2-1b",
    framework=Nanotron(dp=2, tp=4, pp=2, resume=True, **HOW),
    micro_batch=4,
    gradient_accumulation=1,
    max_warmup_steps=160,  # 0.1 s each
    steps=320,
    timeout_s=1800,  # long enough for a slow disk, because only a crash counts as the known issue
    known_issue=KnownIssue(url=f"{ISSUES}/221", failure="crash"),
)
RESUME_ON_ONE_NODE = RESUME.replace(
    framework=Nanotron(tp=4, pp=2, resume=True, **HOW),
    topology=Topology(processes_per_node=8),
)

# As in nanotron's own example, the head is tied to the embedding, and the two are on different stages.
TIED = Model(name="llama-tiny-tied", config={**MODELS["llama-tiny"].config, "tie_word_embeddings": True})
TWIN = Case(
    model=TIED,
    framework=Nanotron(pp=2),
    sequence_length=64,
    micro_batch=1,
    gradient_accumulation=4,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    timeout_s=300,
)
RESUME_TWIN = TWIN.replace(framework=Nanotron(pp=2, resume=True), micro_batch=4, gradient_accumulation=1)


@pytest.mark.parametrize("case", [ACCUMULATION, ONE_NODE, TWIN])
def test_gradient_accumulation_in_a_pipeline(bench, case):
    bench(case)


@pytest.mark.parametrize("case", [RESUME, RESUME_ON_ONE_NODE, RESUME_TWIN])
def test_resuming_a_pipeline(bench, case):
    bench(case)
