"""A training run from start to end."""
