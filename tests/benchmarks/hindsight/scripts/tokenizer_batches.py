"""Tokenizes each batch with the slow tokenizer of BERT, which has many added tokens, in one worker."""

import os
from pathlib import Path

import torch
import transformers
from small import Net
from torch import Tensor
from torch.utils.data import DataLoader

# Release 5 has renamed the slow tokenizer.
Tokenizer = getattr(transformers, "BertTokenizerLegacy", None) or transformers.BertTokenizer
characters = [chr(0x4E00 + number) for number in range(200)]
vocabulary = Path(os.environ["PERFSUITE_LAUNCH_DIR"]) / "vocab.txt"
vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]), encoding="utf-8")
tokenizer = Tokenizer(str(vocabulary))
tokenizer.add_tokens(characters)
texts = ["".join(characters[(row * 7 + at * 3) % 200] for at in range(30)) for row in range(4000)]


def tokens(rows: list[str]) -> Tensor:
    return torch.tensor(tokenizer(rows)["input_ids"])


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in DataLoader(texts, batch_size=2, num_workers=1, collate_fn=tokens):
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
