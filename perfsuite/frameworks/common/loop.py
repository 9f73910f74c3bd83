"""The training loop of adapters whose library has none: micro-batches, gradient accumulation, loss scale.

Worker side; imports torch. Nothing in a step waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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

LOSS_SCALE = 1024.0
"""Factor of the loss in fp16-mixed. torch starts at 65536, and skips the first steps to find a lower one."""


def training_loop(
    batches: Sequence[Tensor],
    micro_batches: int,
    *,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
    sync: Callable[[bool], AbstractContextManager[Any]],
    step: Callable[[], None],
    after: Callable[[], None] = lambda: None,
) -> Callable[[int], list[Tensor]]:
    """Return a function that makes N optimizer steps and returns the mean loss of each, on the device.

    Each step takes the next `micro_batches` of `batches` (shape [micro_batch, sequence_length]), round and
    round. `forward` returns the mean loss of a micro-batch. `backward` adds its gradients, divided by the
    number of micro-batches, and returns the loss divided alike. Both run inside `sync(is_last)`, which may
    keep ranks from reducing gradients before the last micro-batch. `step` steps the optimizer and clears the
    gradients. `after` is called after the last step.
    """
    tokens = itertools.cycle(batches)

    def train_step() -> Tensor:
        total = torch.zeros((), device=batches[0].device)
        for micro_batch in range(micro_batches):
            with sync(micro_batch == micro_batches - 1):
                share = backward(forward(next(tokens)))
            total += share.detach()
        step()
        return total

    def run(steps: int) -> list[Tensor]:
        losses = [train_step() for _ in range(steps)]
        after()
        return losses

    return run


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the model's mean cross-entropy over all tokens but the first of each sequence."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def data_parallel_workload(
    case: Case,
    ranks: Ranks,
    model: nn.Module,
    *,
    autocast: bool = False,
    no_sync: Callable[[], AbstractContextManager[None]] | None = None,
    tensor_parallel: int = 1,
) -> Workload:
    """Return the training of a wrapped model: AdamW, synthetic data and `training_loop`.

    `autocast`: torch's autocast computes a mixed precision, not the wrapper. `no_sync`, if given, is the
    context of each micro-batch but the last: gradients are not reduced there. `tensor_parallel`: number of
    neighbouring ranks that see the same data.
    """
    optimizer = build_optimizer(case, model)
    kind = ShardedGradScaler if isinstance(model, FullyShardedDataParallel) else torch.amp.GradScaler
    scaler = fixed_scaler(kind, ranks.device.type, enabled=case.precision == "fp16-mixed")
    dtype = COMPUTE_DTYPES[case.precision]
    is_autocast = autocast and dtype != DTYPES[case.precision]
    share = 1 / case.gradient_accumulation

    def forward(tokens: Tensor) -> Tensor:
        with torch.autocast(ranks.device.type, dtype, enabled=is_autocast):
            return next_token_loss(model, tokens)

    def backward(loss: Tensor) -> Tensor:
        loss = loss * share
        scaler.scale(loss).backward()
        return loss

    def step() -> None:
        scaler.unscale_(optimizer)  # the scaler's own call, so that ranks that shard agree on an overflow
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    run = training_loop(
        synthetic_batches(case, ranks.rank // tensor_parallel, ranks.device),
        case.gradient_accumulation,
        forward=forward,
        backward=backward,
        sync=lambda is_last: nullcontext() if is_last or no_sync is None else no_sync(),
        step=step,
        after=lambda: check_scale(case, scaler),
    )
    return Workload(run=run, data_parallel=ranks.world_size // tensor_parallel, model=model)


def fixed_scaler(kind: Any, device: str, *, enabled: bool = True) -> Any:
    """Return a gradient scaler of class `kind` at `LOSS_SCALE`, which never grows."""
    return kind(device, init_scale=LOSS_SCALE, growth_interval=2**31 - 1, enabled=enabled)


def check_scale(case: Case, scaler: Any) -> None:
    """Raise `MismatchError` if a gradient scaler at `LOSS_SCALE` (or None) made the optimizer skip steps."""
    if scaler is not None and scaler.is_enabled() and scaler.get_scale() < LOSS_SCALE:
        raise MismatchError(
            f"{case.precision}: gradients were not finite at a loss scale of {LOSS_SCALE:g}, and the "
            "optimizer skipped those steps: give a lower learning_rate, or bf16-mixed"
        )
