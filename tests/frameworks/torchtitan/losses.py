"""Run by `test_trainer.py` under torchrun: what torchtitan learns from the weights of our own model.

Or a registered model from weights that only the names of the parameters decide, however it is split.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor

from perfsuite.case.case import CaseFile
from perfsuite.frameworks.common.model import build_model, build_optimizer, synthetic_batches
from perfsuite.frameworks.torchtitan import compat
from perfsuite.worker.recorder import Recorder
from perfsuite.worker.timers import HostTimer


def with_weights_of(model: Any, spec: Any) -> Any:
    """torchtitan's model of `spec`, not parallelised, with the weights of a transformers model."""
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    built = spec.model.build()
    built.load_state_dict(Llama3StateDictAdapter(spec.model, None).from_hf(model.state_dict()))
    return built


def torchtitan_losses(case: Any) -> list[float]:
    """Of each step, mean over ranks, starting from the weights of `build_model`."""
    from perfsuite.frameworks.torchtitan.trainer import CaseTrainer

    trainer = CaseTrainer(case, Recorder(HostTimer()))
    spec = trainer.config.model_spec
    unsharded = dict(with_weights_of(build_model(case, torch.device("cpu")), spec).named_parameters())
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            mesh = parameter.device_mesh
            parameter.copy_(distribute_tensor(unsharded[name], mesh, [Replicate()] * mesh.ndim))
    trainer.train()
    losses = torch.stack(trainer.losses())
    dist.all_reduce(losses)
    return list((losses / dist.get_world_size()).tolist())


def registered_losses(case: Any) -> list[float]:
    """Of each step, on this rank, which may have some of the layers alone."""
    from perfsuite.frameworks.torchtitan.trainer import CaseTrainer

    trainer = CaseTrainer(case, Recorder(HostTimer()))
    named = (each for part in trainer.model_parts for each in part.named_parameters())
    with torch.no_grad():
        for name, parameter in named:
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(distribute_tensor(drawn / 50, parameter.device_mesh, [Replicate()]))
    trainer.train()
    return [float(loss) for loss in trainer.losses()]


def plain_losses(case: Any, data_ranks: int) -> list[float]:
    """The same training in one process, without torchtitan."""
    model = build_model(case, torch.device("cpu"))
    optimizer = build_optimizer(case, model)
    batches = zip(
        *(synthetic_batches(case, rank, torch.device("cpu")) for rank in range(data_ranks)), strict=True
    )
    losses = []
    for tokens in list(batches)[: case.total_steps]:
        step = [model(input_ids=part, labels=part).loss / data_ranks for part in tokens]
        sum(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(loss.detach() for loss in step)))
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    compat.before_import("cpu")
    case = CaseFile.model_validate_json(sys.argv[1]).case
    ours = (registered_losses if case.framework.config else torchtitan_losses)(case)  # type: ignore[attr-defined]
    if case.framework.config:  # type: ignore[attr-defined]
        print(json.dumps(ours), flush=True)
    elif dist.get_rank() == 0:
        data_ranks = case.topology.world_size // case.framework.tensor_parallel  # type: ignore[attr-defined]
        print(json.dumps({"torchtitan": ours, "plain": plain_losses(case, data_ranks)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
