"""A loss of sentence-transformers that computes in mini-batches and keeps only gradients."""

import itertools
import tempfile

import torch
from sentence_transformers import SentenceTransformer, losses, models
from small import VOCABULARY, WIDTH
from texts import text, tokenizer
from transformers import BertConfig, BertModel

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as directory:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    BertModel(config).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    bert = models.Transformer(directory, max_seq_length=16)
model = SentenceTransformer(modules=[bert, models.Pooling(WIDTH)], device="cpu")
loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for start in itertools.cycle(range(0, 4096, 32)):
    sides = [[text(at + side, 12) for at in range(start, start + 32)] for side in (0, 1)]
    loss([model.tokenize(side) for side in sides], torch.zeros(32)).backward()
    optimizer.step()
    optimizer.zero_grad()
