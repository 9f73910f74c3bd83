"""torchtitan's Llama 3.1 with 8B, 70B and 405B on H100s, with FSDP and with FSDP x TP 8, compiled or not.

The published numbers are in published.json: `python -m bench_cases.published torchtitan-h100`.
"""

import pytest

from perfsuite import Case, Model, Topology, TorchTitan

TP_8 = "--parallelism.tensor_parallel_degree=8"
COMPILE = "--compile.enable"
ASYNC_TP = "--compile.enable_async_tensor_parallel"


def llama(size, nodes, batch, *overrides):
    """Return a case of the given size. 8B recomputes selectively, but 70B and 405B recompute each block."""
    options = (f"--training.local_batch_size={batch}", *overrides)
    config = f"llama3_{size}_whole_loss"
    return Case(
        model=Model.named("llama3"),
        framework=TorchTitan(module="bench_cases.torchtitan_configs", config=config, overrides=options),
        sequence_length=8192,
        micro_batch=batch,
        precision="bf16-mixed",
        activation_checkpointing="selective-op" if size == "8b" else "full",
        compile=COMPILE in overrides,
        topology=Topology(nodes=nodes, processes_per_node=8),
        hardware="h100",
        max_warmup_steps=10,
        steps=20,
        timeout_s=3600,
    )


# Compiled tensor parallelism was tried only on two CPU ranks, where torch 2.13 failed: its AOTAutograd tries
# to save a DeviceMesh as a tensor.
CASES = [
    *(llama("8b", nodes, 2) for nodes in (1, 16)),
    *(llama("8b", nodes, 2, COMPILE) for nodes in (1, 16)),
    llama("8b", 1, 1, COMPILE),
    *(llama("8b", 8, 12, TP_8, COMPILE, *more) for more in ((), (ASYNC_TP,))),
    *(llama("70b", 32, 16, COMPILE, *more) for more in ((), (ASYNC_TP,))),
    llama("405b", 16, 2),
]


@pytest.mark.parametrize("case", CASES)
def test_torchtitan_h100(bench, case):
    bench(case)
