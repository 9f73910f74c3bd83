"""Trains a tiny LayoutLMv3 of transformers to classify words on pages."""

import itertools

import torch
from small import VOCABULARY, batches
from transformers import LayoutLMv3Config, LayoutLMv3ForTokenClassification

torch.manual_seed(0)
config = LayoutLMv3Config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    coordinate_size=12,
    shape_size=8,
    max_position_embeddings=128,
    input_size=32,
    num_labels=5,
)
model = LayoutLMv3ForTokenClassification(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
corners = torch.randint(0, 500, (2, 32, 2))
boxes = torch.cat([corners, corners + 100], dim=-1)
pages = torch.rand(2, 3, 32, 32)
for tokens in itertools.cycle(batches(16)):
    model(input_ids=tokens, bbox=boxes, pixel_values=pages, labels=tokens % 5).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
