"""Trains with all calls of torch.cuda that scripts make. The kernels of some layers depend on libraries."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

assert torch.cuda.is_available()
device = torch.device("cuda", torch.cuda.current_device())
torch.cuda.set_device(device)
torch.accelerator.set_device_index(0)
torch.manual_seed(1)
torch.cuda.manual_seed_all(1)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.benchmark = True
dist.init_process_group("nccl")
assert dist.get_backend() == dist.get_backend(dist.new_group([0])) == "nccl"
dtype = torch.float16 if "--static-graph" in sys.argv else torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.attend = nn.MultiheadAttention(32, 2, batch_first=True)
        self.convolve = nn.Conv1d(32, 32, 3, padding=1)
        self.normalise = nn.BatchNorm1d(32)
        self.remember = nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Sequential(
            nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.normalise(self.convolve(hidden.transpose(1, 2))).transpose(1, 2)
        hidden = hidden + self.remember(hidden)[0]
        out: torch.Tensor = checkpoint(self.out, hidden, use_reentrant=False)
        return out


net = Net().to(device)
model: nn.Module = net
if "--fsdp2" in sys.argv:
    fully_shard(net.out)
    fully_shard(net)
else:
    model = DistributedDataParallel(net, device_ids=[0], static_graph="--static-graph" in sys.argv)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
data = TensorDataset(torch.randint(0, 64, (1024, 16)))
side = torch.cuda.Stream()
for (tokens,) in DataLoader(data, batch_size=2, pin_memory=True, num_workers=1):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(side):
        tokens = tokens.to(device, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    tokens.record_stream(torch.cuda.current_stream())
    torch.cuda.nvtx.range_push("step")
    with torch.autocast("cuda", dtype), torch.profiler.record_function("forward"):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    torch.cuda.nvtx.range_pop()
    end.record()
    torch.cuda.synchronize()
    torch.accelerator.synchronize()
    figures = (
        start.elapsed_time(end),
        torch.cuda.max_memory_allocated(),
        torch.cuda.get_device_properties(0).name,
    )
    print(f"loss {loss.item():.3f}", figures, torch.cuda.memory_stats(), torch.cuda.mem_get_info())
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    torch.accelerator.empty_cache()
dist.barrier()
dist.destroy_process_group()
