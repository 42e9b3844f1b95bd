"""A run's config: its models, reading YAML, and error messages."""
