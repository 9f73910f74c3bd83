"""Reads cases, and prints the losses of torchtitan for each. torchtitan does not draw the weights itself.

A model with a case's options gets the weights of perfsuite's own model. The weights of a registered model
depend only on the names of its parameters, and not on how the model is split.
"""

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing.connection import wait
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor

from perfsuite.case.case import Case, CaseFile
from perfsuite.frameworks.common.model import build_model
from perfsuite.frameworks.torchtitan import compat
from perfsuite.worker.clock.recorder import Recorder
from perfsuite.worker.clock.timers import HostTimer


def with_weights_of(model: Any, spec: Any) -> Any:
    """Return torchtitan's model of `spec`, not parallelised, with the weights of a transformers model."""
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    built = spec.model.build()
    built.load_state_dict(Llama3StateDictAdapter(spec.model, None).from_hf(model.state_dict()))
    return built


def drawn(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) / 50


def losses(case: Case) -> list[float]:
    """Return the loss of each step, as the mean over ranks."""
    from perfsuite.frameworks.torchtitan.trainer import CaseTrainer

    trainer = CaseTrainer(case, Recorder(HostTimer()))
    ours = {}
    if not case.framework.model_dump()["config"]:
        built = with_weights_of(build_model(case, torch.device("cpu")), trainer.config.model_spec)
        ours = dict(built.named_parameters())
    with torch.no_grad():
        for name, parameter in (pair for part in trainer.model_parts for pair in part.named_parameters()):
            full = ours[name] if ours else drawn(name, parameter.shape)
            mesh = parameter.device_mesh
            parameter.copy_(distribute_tensor(full, mesh, [Replicate()] * mesh.ndim))
    trainer.train()
    mean = torch.stack(trainer.losses()) / dist.get_world_size()
    dist.all_reduce(mean)
    return list(mean.tolist())


def tell(rank: int, case: Case, port: int) -> None:
    """Train as one rank of `case`. The first one prints the losses."""
    ranks = str(case.topology.world_size)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    values = losses(case)
    if rank == 0:
        print(json.dumps(values), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(case: Case) -> None:
    """Fork the ranks of a case. If one fails, all of them end."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=tell, args=(rank, case, port)) for rank in range(case.topology.world_size)]
    for process in ranks:
        process.start()
    while running := [process for process in ranks if process.exitcode is None]:
        wait([process.sentinel for process in running])
        if any(process.exitcode for process in ranks):
            os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    torch.set_num_threads(1)
    compat.before_import("cpu")
    importlib.import_module("perfsuite.frameworks.torchtitan.trainer")
    for line in sys.stdin:
        train(CaseFile.model_validate_json(line).case)
