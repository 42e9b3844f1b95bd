"""What may be asked for in YAML: the models of a run's config, reading, and errors."""
