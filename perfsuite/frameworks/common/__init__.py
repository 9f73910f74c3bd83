"""Helpers that several frameworks share: models, weights, the training loop, sharding, fine-tuning."""
