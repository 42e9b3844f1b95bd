"""The base model: loading it, cutting it into stages, attention over packed rows, generation."""
