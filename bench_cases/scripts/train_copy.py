"""An everyday training script in plain torch: a small transformer learns to repeat a sequence, under DDP.

    torchrun --nproc-per-node=2 bench_cases/scripts/train_copy.py --epochs 2

It does not know perfsuite. `bench_cases/test_cpu.py` measures it unchanged.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Repetitions(Dataset):
    """Sequences whose second half repeats the first."""

    def __init__(self, samples, length, vocabulary):
        generator = torch.Generator().manual_seed(0)
        half = torch.randint(vocabulary, (samples, length // 2), generator=generator)
        self.tokens = torch.cat([half, half], dim=1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


class Decoder(nn.Module):
    """Embeddings, causal transformer layers, and a head."""

    def __init__(self, vocabulary, length, width=128, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        """Return logits of shape [batch, length, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(positions)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    data = Repetitions(samples=4096, length=options.length, vocabulary=64)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(Decoder(vocabulary=64, length=options.length).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device)
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    if options.save and dist.get_rank() == 0:
        torch.save(model.module.state_dict(), options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
