"""What several frameworks share: models, weights, fine-tuning, tensor parallelism."""
