"""Trains with ZeRO in DeepSpeed: `python deepspeed_zero.py STAGE ACCUMULATION [buckets]`."""

import itertools
import sys

import deepspeed
import torch
from small import Net, batches

stage = int(sys.argv[1])
accumulation = int(sys.argv[2])
kind = "".join(sys.argv[3:])

buckets = {"reduce_bucket_size": 50, "reduce_scatter": False} if kind == "buckets" else {}
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = Net(depth=8)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config={
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "overlap_comm": False, **buckets},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
)
for tokens in itertools.cycle(batches(16)):
    engine.backward(engine(tokens))
    engine.step()
