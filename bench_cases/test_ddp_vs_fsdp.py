"""DDP against FSDP SHARD_GRAD_OP on one node: how much slower is a replicated model where NVLink is fast?

After R. Baviskar, "How Data Parallelism & Hardware Affect Speed": GPT-2 large (batch 11) and XL (batch 5),
block size 128, one epoch of wikitext-2 on a DGX with 8 x A100-80GB. Published training times: large 5m57s
under DDP, 4m27s under FSDP; XL 21m32s and 14m37s. The model fits on one GPU either way.
"""

import pytest

from perfsuite import DDP, FSDP, Case, Topology

STRATEGIES = [DDP(), FSDP(sharding_strategy="SHARD_GRAD_OP")]

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

# The same code path on any machine.
TWIN = Case(
    model="gpt2-tiny",
    framework=DDP(),
    sequence_length=128,
    micro_batch=4,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    timeout_s=300,
)


@pytest.mark.parametrize(
    "case", [size.replace(framework=how) for size in (LARGE, XL, TWIN) for how in STRATEGIES]
)
def test_gpt2(bench, case):
    bench(case)
