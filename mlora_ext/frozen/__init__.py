"""Frozen weights and their products."""
