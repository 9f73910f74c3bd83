"""What several frameworks share: models, weights, the training loop, sharding, fine-tuning."""
