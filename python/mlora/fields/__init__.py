"""What a run's config may ask for, field by field."""
