"""Initial values that depend on data or on weights."""
