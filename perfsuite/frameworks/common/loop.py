"""The training loop for frameworks whose library has no loop. Nothing in a step waits for the device."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from perfsuite.case.case import Case
from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import Ranks, Workload
from perfsuite.frameworks.common.model import COMPUTE_DTYPES, DTYPES, build_optimizer, synthetic_batches
from perfsuite.frameworks.common.own_list import OwnList

# The loss scale for fp16-mixed. torch would start at 65536, and skip the first steps until it has found a
# lower scale.
LOSS_SCALE = 1024.0


def training(
    case: Case,
    ranks: Ranks,
    model: Any,
    *,
    backward: Callable[[Tensor], Tensor],
    sync: Callable[[bool], AbstractContextManager[Any]],
    step: Callable[[], None],
    scaler: Any = None,
    autocast: torch.dtype | None = None,
    inputs: Callable[[Tensor], AbstractContextManager[Mapping[str, Tensor]]] | None = None,
    tensor_parallel: int = 1,
    settings: Mapping[str, str] | None = None,
) -> Workload:
    """Return a workload that trains a wrapped model on synthetic data. Losses stay on the device.

    `backward` takes the mean loss of a micro-batch. It divides this loss by the number of micro-batches,
    accumulates the gradients, and returns the divided loss. Forward and backward run inside the context
    manager `sync(is_last)`, which can keep ranks from reducing gradients before the last micro-batch. `step`
    updates the parameters and clears the gradients. `scaler` is the gradient scaler, which must not skip a
    step. `autocast` is the dtype of torch's autocast, or None to leave autocast off. `inputs` returns a
    context manager that prepares the model's inputs from a batch. Forward and backward also run inside this
    manager. `tensor_parallel` is the number of neighbouring ranks that see the same data.
    """
    inputs = inputs or (lambda batch: nullcontext({"input_ids": batch, "labels": batch}))
    batches = synthetic_batches(case, ranks.rank // tensor_parallel, ranks.device)
    tokens = itertools.cycle(batches)

    def forward(given: Mapping[str, Tensor]) -> Tensor:
        with torch.autocast(ranks.device.type, autocast, enabled=autocast is not None):
            loss: Tensor = model(**given).loss  # mean over all tokens except the first of each sequence
        return loss

    def train_step() -> Tensor:
        total = torch.zeros((), device=ranks.device)
        for micro_batch in range(case.gradient_accumulation):
            is_last = micro_batch == case.gradient_accumulation - 1
            with sync(is_last), inputs(next(tokens)) as given:
                share = backward(forward(given))
            total += share.detach()
        step()
        return total

    def run(steps: int) -> list[Tensor]:
        losses = OwnList[Tensor]()
        for _ in range(steps):
            losses.append(train_step())
        if scaler is not None and scaler.is_enabled() and scaler.get_scale() < LOSS_SCALE:
            raise MismatchError(
                f"{case.precision}: in some steps, gradients were not finite at a loss scale of "
                f"{LOSS_SCALE:g}, and the optimizer skipped these steps. Give a lower learning_rate, or "
                "train in bf16-mixed"
            )
        return losses

    data_parallel = ranks.world_size // tensor_parallel
    return Workload(run=run, data_parallel=data_parallel, model=model, settings=settings or {})


def data_parallel_workload(
    case: Case,
    ranks: Ranks,
    model: nn.Module,
    *,
    autocast: bool = False,
    no_sync: Callable[[], AbstractContextManager[None]] | None = None,
    tensor_parallel: int = 1,
    settings: Mapping[str, str] | None = None,
) -> Workload:
    """Return a workload (see `training`) for a model in one of torch's own wrappers. The optimizer is AdamW.

    With `autocast`, mixed precision is done by torch's autocast, not by the wrapper. All micro-batches except
    the last one run inside `no_sync`.
    """
    optimizer = build_optimizer(case, model)
    kind = ShardedGradScaler if isinstance(model, FullyShardedDataParallel) else torch.amp.GradScaler
    scaler = fixed_scaler(kind, ranks.device.type, enabled=case.precision == "fp16-mixed")
    dtype = COMPUTE_DTYPES[case.precision]

    def backward(loss: Tensor) -> Tensor:
        loss = loss * (1 / case.gradient_accumulation)
        scaler.scale(loss).backward()
        return loss

    def step() -> None:
        # Call `unscale_` for two reasons. For a fused optimizer, the scaler's `step` does not call it. And in
        # `ShardedGradScaler`, only `unscale_` makes all ranks agree whether there was an overflow.
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return training(
        case,
        ranks,
        model,
        backward=backward,
        sync=lambda is_last: nullcontext() if is_last or no_sync is None else no_sync(),
        step=step,
        scaler=scaler,
        autocast=dtype if autocast and dtype != DTYPES[case.precision] else None,
        tensor_parallel=tensor_parallel,
        settings=settings,
    )


def fixed_scaler(kind: Any, device: str, *, enabled: bool = True) -> Any:
    """Return a gradient scaler of class `kind` that starts at `LOSS_SCALE` and never grows."""
    return kind(device, init_scale=LOSS_SCALE, growth_interval=2**31 - 1, enabled=enabled)
