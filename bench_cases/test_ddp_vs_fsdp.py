"""DDP against FSDP SHARD_GRAD_OP on one node with fast NVLink, for a model that fits on one GPU.

The cases follow R. Baviskar's post "How Data Parallelism & Hardware Affect Speed": GPT-2 large (batch 11) and
XL (batch 5) on a DGX with 8 x A100-80GB. The post used `accelerate launch`. The cases also use torch's own
wrappers. The published times are in published.json: `python -m bench_cases.published ddp-vs-fsdp`.
"""

import pytest

from perfsuite import DDP, FSDP, Accelerate, Case, Topology

STRATEGIES = [DDP(), FSDP(sharding_strategy="SHARD_GRAD_OP")]
BY_ACCELERATE = [
    Accelerate(strategy="ddp"),
    Accelerate(strategy="fsdp1", sharding_strategy="SHARD_GRAD_OP"),
]

LARGE = Case(
    model="gpt2-large",
    framework=DDP(),
    sequence_length=128,
    micro_batch=11,
    topology=Topology(processes_per_node=8),
    hardware="a100-80gb",
    learning_rate=5e-5,
)
XL = LARGE.replace(model="gpt2-xl", micro_batch=5)
LARGE_BY_ACCELERATE = [LARGE.replace(framework=how) for how in BY_ACCELERATE]
XL_BY_ACCELERATE = [XL.replace(framework=how) for how in BY_ACCELERATE]

# The same code paths with a tiny model, on any machine.
TWIN = Case(
    model="gpt2-tiny",
    framework=DDP(),
    sequence_length=128,
    micro_batch=4,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    timeout_s=300,
)
TWIN_BY_ACCELERATE = [TWIN.replace(framework=how, max_warmup_steps=5, steps=20) for how in BY_ACCELERATE]

CASES = [
    *(size.replace(framework=how) for size in (LARGE, XL, TWIN) for how in STRATEGIES),
    *LARGE_BY_ACCELERATE,
    *XL_BY_ACCELERATE,
    *TWIN_BY_ACCELERATE,
]


@pytest.mark.parametrize("case", CASES)
def test_gpt2(bench, case):
    bench(case)
