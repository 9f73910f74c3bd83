"""Find, wrap and watch functions of a training script and of its libraries."""
